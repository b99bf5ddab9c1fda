"""Replace layers by sparse ones and back: ``sparsify`` and ``densify``."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sparsepretrain import registry
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import widen
from sparsepretrain.sparsity.engine.banks import SparseBank
from sparsepretrain.sparsity.engine.data_parallel import refuse_wrapped
from sparsepretrain.sparsity.engine.layer_classes import replacement_of, require_free_names
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.engine.own_forwards import read_attributes
from sparsepretrain.sparsity.engine.sharing import require_unshared
from sparsepretrain.sparsity.engine.steps import require_known, require_own_weights
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.fsdp.rows import ALL_ROWS, BankRows, Rows
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.matmuls.fp8 import FP8Precision, precision_of
from sparsepretrain.sparsity.matmuls.geometry import LayerSize
from sparsepretrain.sparsity.matmuls.layer import LayerMatmuls
from sparsepretrain.sparsity.matmuls.policy import SparseMatmulPolicy, sparse_matmul_policy
from sparsepretrain.sparsity.method import Method, MethodOptions
from sparsepretrain.sparsity.operand_table import DW
from sparsepretrain.sparsity.patterns import Pattern
from sparsepretrain.sparsity.selection import assign_patterns, check_shapes, select_layers
from sparsepretrain.sparsity.sparsifier import Sparsifier, residual_weight


def sparsify(
    model: nn.Module,
    method: str,
    *,
    targets: str | Sequence[str],
    exclude: str | Sequence[str] = (),
    n: int = 2,
    m: int = 4,
    seed: int = 0,
    total_steps: int | None = None,
    sparse_matmuls: str = "emulate",
    precision: str | dict[str, str] | None = None,
    **options: Any,
) -> Sparsifier:
    """Make layers of ``model`` sparse, in place, and derive frozen state from initial weights.

    Every Parameter keeps its object, name and shape, so optimizers built before or after, state
    dicts and ``save_pretrained`` keep working. Build the optimizer afterwards if the method adds
    Parameters (adapters of SLoPe), or after :meth:`Sparsifier.prepare_sharding`. All state is in
    the model's state dict. Methods that learn masks freeze all Parameters but their own.

    Args:
        model: contains nn.Linear, nn.Conv2d or transformers' Conv1D layers.
        method: a name of :func:`sparsepretrain.list_methods`.
        targets: globs of module names, such as ``["*.mlp.*"]``. ``*`` crosses dots, and a leading
            ``*.`` also matches at the root. ``"!glob"`` leaves layers out, as ``exclude`` does.
        exclude: globs of layers to leave out.
        n: elements kept of every m.
        m: group size along in_features, or along input channels at each kernel position.
            Layers with another pattern are named by the option ``patterns``, such as
            ``patterns={"*.fc1": "1:4", "blocks.0.*": "dense"}``: the first glob that matches a
            layer decides.
        seed: seed of the method's random draws. Several sparsifiers of one model draw different
            numbers; two models with equal seeds draw the same ones.
        total_steps: optimizer steps of the run; required by options that are fractions of the run.
        sparse_matmuls: ``"emulate"``: dense matmuls of zero-filled operands, on any device.
            ``"semi_structured"``: sparse matmuls (fp16 or bf16, on CUDA devices that have them) for
            each operand that is 2:4 and fits; the others are emulated, and
            :meth:`Sparsifier.coverage` gives the reason. ``"auto"``: sparse matmuls only where they
            are faster; the first eager training forward of a layer times both.
        precision: None: matmuls run in the dtype of autocast, or of the weight. ``"fp8"``: in
            training, matmuls of these layers run on fp8 tensor cores; evaluation does not use fp8
            (:class:`~sparsepretrain.sparsity.matmuls.fp8.FP8`). ``"fp8_sim"``: the same fp8
            operands, multiplied in a wider type. Or a dict: ``{"name": "fp8", "recipe": "e4m3"}``.
        **options: options of the method (keys of ``configs/sparsity/<method>.yaml``); nested ones
            as dicts: ``window={"start": 0.1}``.

    Returns:
        Handle that attaches to the optimizer, measures and saves.

    Raises:
        ConfigError: an argument has the wrong type; method or option is unknown, or a value is out
            of range; a glob matches no layer, or decides none; a layer is sparse already, shares
            its weight, or has a width that is no multiple of M; ``model`` is a layer; weights are
            sharded (DTensor); no layer supports the requested sparse or fp8 matmuls; a layer has an
            attribute of a name that sparse layers use; ``model`` is the result of torch.compile.
            After any error ``model`` is as it was before.
    """
    targets, exclude = ([x] if isinstance(x, str) else x for x in (targets, exclude))

    def globs(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(p, str) for p in value)

    steps_fit = total_steps is None or (type(total_steps) is int and total_steps >= 1)
    rules = [
        ("model must be a torch.nn.Module", model, isinstance(model, nn.Module)),
        ("method must be a name such as 'sste'", method, isinstance(method, str)),
        ("targets must be a glob or a list of globs", targets, globs(targets)),
        ("exclude must be a glob or a list of globs", exclude, globs(exclude)),
        ("seed must be an integer in [0, 2^63)", seed, type(seed) is int and 0 <= seed < 2**63),
        ("total_steps must be an integer ≥ 1 or None", total_steps, steps_fit),
    ]
    problems = [f"{rule}, got {_show(value)}" for rule, value, fits in rules if not fits]
    if problems:
        raise ConfigError(problems)

    cls: type[Method] = registry.get("method", method)
    values = {"name": method, "n": n, "m": m, "targets": list(targets), **options}
    chosen: MethodOptions = build(cls.Options, values)
    return sparsify_with(
        model,
        chosen,
        targets=targets,
        exclude=exclude,
        seed=seed,
        total_steps=total_steps,
        sparse_matmuls=sparse_matmuls,
        precision=precision,
    )


def sparsify_with(
    model: nn.Module,
    options: MethodOptions,
    *,
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    seed: int = 0,
    total_steps: int | None = None,
    sparse_matmuls: str | SparseMatmulPolicy = "emulate",
    precision: str | dict[str, str] | FP8Precision | None = None,
    roles: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Sparsifier:
    """Do the work of :func:`sparsify` with checked options; raise the same errors.

    ``targets`` are globs. They replace ``options.targets``, which may have aliases such as ``ffn``.
    ``roles`` has the globs of each alias, which keys of ``options.patterns`` may be.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "sparsify was called in torch.inference_mode(), whose tensors cannot be trained: call "
            "it outside"
        )
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "sparsify was given the result of torch.compile: call it with the model, and compile "
            "the sparse model afterwards"
        )
    formats = precision_of(precision)
    policy = sparse_matmul_policy(sparse_matmuls)
    cls: type[Method] = registry.get("method", options.name)
    method = cls(options, total_steps)
    if total_steps is not None and method.schedule.start >= total_steps:
        reason = f": sparse from step {method.schedule.start} on, but there are {total_steps} steps"
        raise ConfigError([("window.start", reason)])
    overrides = cls.adjust_gradient_ is not Method.adjust_gradient_
    declares_decay = cls.decay is not Method.decay  # J is dW while λ is 0
    if overrides and method.sparse_row.J == DW and not declares_decay:
        raise ConfigError(
            f"method {options.name}: adjust_gradient_ would never run, as sparse_row has J = dW: "
            "name what the optimizer receives, such as J=Operand('M∘dW')"
        )
    dropped = [*exclude, *(p.removeprefix("!") for p in targets if p.startswith("!"))]
    layers = select_layers(model, [p for p in targets if not p.startswith("!")], dropped)
    assigned = assign_patterns(model, layers, options.patterns, roles, method.final_pattern)
    methods = _methods_by_layer(assigned, method)
    layers = {name: layers[name] for name in methods}
    check_shapes(layers, methods, options.m)
    for name, layer in layers.items():
        if not isinstance(layer, SparseBank):
            require_free_names(name, layer)
    device = next(iter(layers.values())).weight.device
    later = device.type == "cpu" and torch.cuda.is_available()  # the model may move there
    trains_on = torch.device("cuda", torch.cuda.current_device()) if later else device
    expected = []
    for name, layer in layers.items():
        size = _size_of(layer, trains_on)
        expected.append(LayerMatmuls(methods[name], formats, policy, size))
    banks = [name for name, layer in layers.items() if isinstance(layer, SparseBank)]
    if formats is not None and banks:
        raise ConfigError(
            f"the bank {banks[0]!r} has no fp8 matmuls: leave precision out, or exclude the bank"
        )
    if formats is not None:
        formats.require(matmuls.simulated for matmuls in expected)
    if policy is not None:
        policy.require(options.name, (matmuls.reasons for matmuls in expected))
    state = ModelState(model, methods, formats, policy, seed, device)
    state.dense_by_pattern = tuple(name for name in assigned if name not in methods)
    # keys of draws: layers that were made sparse before have the first numbers
    first = sum(isinstance(module, SparseWeight) for module in model.modules())
    try:
        begun = {
            name: _begin_operands(state, name, layer, methods[name], index)
            for index, (name, layer) in enumerate(layers.items(), first)
        }
        if any(operands.state._parameters for operands in begun.values()):
            refuse_wrapped(model, options.name)
    except BaseException:
        state.release((), set())  # no layer has changed so far
        raise
    for name, operands in begun.items():
        layer = layers[name]
        # the object stays: references, hooks and second names keep working
        if isinstance(layer, SparseBank):
            layer.install()
        else:
            fixed = read_attributes(layer)
            layer.__class__ = replacement_of(layer)
            if fixed:
                layer.fixed_attributes = fixed
        layer.add_module("sparsity", operands.state)
        layer.operands = operands
        layer.operands.note_source(layer.weight)
        layer.sparse_model = state
        state.operands.append(layer.operands)
        if layer.weight.requires_grad and state.watched is None:
            state.watched = name, layer
    state.warn_of_remarks()
    if method.trains != "model":
        trained = {id(layer.weight) for layer in layers.values()}
        if method.trains == "method":
            trained = {id(p) for operands in state.operands for p in operands.state.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    return Sparsifier(state)


def _begin_operands(
    model: ModelState, name: str, layer: Any, method: Method, index: int
) -> LayerOperands:
    """Return the operands of a layer or bank with their initial state; the layer stays as it is.

    Args:
        model: state that all layers share.
        name: of the layer.
        layer: is not sparse yet.
        method: of this layer.
        index: position among the sparse layers of the model, part of the keys of its draws.
    """
    is_bank = isinstance(layer, SparseBank)
    weight = layer.weight.detach()
    rows: Rows = BankRows(weight.shape) if is_bank else ALL_ROWS
    size = _size_of(layer, weight.device)
    slice_rows = weight.shape[-2] if is_bank else None
    weight = rows.local(weight)
    state = LayerState(model.clock, name, index, weight, size.dim, slice_rows)
    with torch.no_grad():
        state.add_tensors(method.initial_state(widen(weight), state))
        if method.schedule.start == 0:
            method.update_(widen(weight), state)
    operands = LayerOperands(
        method, state, LayerMatmuls(method, model.precision, model.policy, size)
    )
    operands.rows = rows
    return operands


def _methods_by_layer(assigned: Mapping[str, Pattern | None], method: Method) -> dict[str, Method]:
    """Return the method of each layer that is not dense; layers with one pattern share it.

    Args:
        assigned: layer -> pattern; None: dense.
        method: of the pattern of the options.
    """
    by_pattern = {method.final_pattern: method}
    methods = {}
    for name, pattern in assigned.items():
        if pattern is None:
            continue
        if pattern not in by_pattern:
            n, m = pattern
            options = dataclasses.replace(method.options, n=n, m=m)
            by_pattern[pattern] = type(method)(options, method.schedule.total_steps)
        methods[name] = by_pattern[pattern]
    return methods


def _size_of(layer: Any, device: torch.device) -> LayerSize:
    """Return the size of a layer or bank that is not sparse yet."""
    shape = tuple(layer.weight.shape)
    if isinstance(layer, SparseBank):
        return LayerSize((math.prod(shape[:-2]), *shape[-2:]), layer.in_dim, device)
    return LayerSize(shape, replacement_of(layer).in_dim, device)


def sparsifier_of(model: nn.Module) -> Sparsifier:
    """Return a handle to a model that was given to :func:`sparsify`, a copy, or a container of it.

    Raises:
        ConfigError: it is not sparse, or :func:`sparsify` was called for several parts of it.
    """
    layers = [m for m in model.modules() if isinstance(m, SparseWeight)]
    states = list(dict.fromkeys(layer.sparse_model for layer in layers))
    if not states:
        raise ConfigError("the model is not sparse: call sparsify(model, method, targets=…)")
    if len(states) > 1:
        several = ", ".join(state.title for state in states)
        raise ConfigError(
            f"the model has {len(states)} sparse parts with counters of their own ({several}), "
            "from several calls of sparsify or from copies of one: keep the handles, or call "
            "sparsifier_of on each part"
        )
    return Sparsifier(states[0])


def densify(model: nn.Module, *, fold: bool = True) -> nn.Module:
    """Turn sparse layers into their original classes, in place, with the weights of evaluation.

    Pruned weights become exact zeros (+0.0) and scales are multiplied in, so the outputs of the
    model do not change. Weights are not quantized, as evaluation does not use fp8. Sparse layers
    outside ``model`` train on; :func:`sparsifier_of` returns a handle to them.

    Args:
        model: model that is sparse or contains sparse layers.
        fold: also add low-rank adapters to the weight, which then has no exact zeros; False: drop
            the adapters.

    Returns:
        ``model``.

    Raises:
        ConfigError: ``model`` is not a module, it is sharded, sparse layers were replaced, or their
            weights were tied to others or are computed from others, as by weight_norm.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {_show(model)}")
    named = {n: module for n, module in model.named_modules() if isinstance(module, SparseWeight)}
    layers = [*named.values()]
    states = {layer.sparse_model for layer in layers}
    require_own_weights(named)
    require_unshared(model, named)
    require_known(model)
    if any(layer.operands.rows.is_sharded for layer in layers):
        raise ConfigError(
            "a sharded model cannot be densified: save it, and load the checkpoint in one process"
        )
    folded: list[str] = []
    for state in states:
        state.sync(always=True)
        state.require_masks()
        state.watch_copy()
        phase = state.method.phase
        name = state.method.options.name
        if phase.evaluation and not state.phase_is_final:
            warnings.warn(
                f"{state.title} has not reached its pattern after {state.step} steps: "
                f"densify leaves the weights of this phase, {phase.row.A}",
                SparsePretrainWarning,
                stacklevel=2,
            )
        if not phase.evaluation and phase.reason:
            warnings.warn(
                f"{name} evaluates dense weights {phase.reason}: densify leaves no zeros in them",
                SparsePretrainWarning,
                stacklevel=2,
            )
    gone = {layer.operands for layer in layers}
    for state in states:
        lost = [each.state.layer_name for each in state.operands if each not in gone]
        if lost and state.root is model:
            raise ConfigError(
                f"sparse layers were replaced after sparsify: {', '.join(lost)}; they are dense: "
                "put the sparse ones back, or call densify on the parts that still have theirs"
            )
    for layer in layers:
        operands = layer.operands
        weight = layer.weight
        with torch.no_grad():
            forward = operands.project(weight).forward
            residual = residual_weight(layer) if fold else None
            if forward is not None:
                operands.rows.local(weight).copy_(forward)
            if residual is not None:
                weight.add_(residual)
                folded.append(operands.state.layer_name)
        layer.become_dense()
    for state in states:
        optimizer, only_finite = state.attachment.optimizer, state.attachment.only_finite
        state.attachment.detach()
        state.release(layers, gone)
        if optimizer is not None and state.operands:  # layers elsewhere train on
            Sparsifier(state).hook(optimizer, only_finite=only_finite)
    if folded:
        warnings.warn(
            f"low-rank adapters were folded into {len(folded)} layers ({folded[0]}, …): their "
            "weights have no exact zeros any more",
            SparsePretrainWarning,
            stacklevel=2,
        )
    return model


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
