"""Swapping layers in and out: ``sparsify`` and ``densify``."""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain import registry
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import pack_24
from sparsepretrain.kernels.groups import widen
from sparsepretrain.sparsity.fp8 import FP8Recipe, recipe_from
from sparsepretrain.sparsity.layers import (
    SparseLayer,
    invalidate_after_load,
    layer_family,
    refuse_sharded,
    sparse_class,
)
from sparsepretrain.sparsity.policy import Method
from sparsepretrain.sparsity.sparsifier import MicroBatchCounter, Sparsifier
from sparsepretrain.sparsity.state import PREVIOUS_MASK, Clock, LayerState


def sparsify(
    model: nn.Module,
    method: str,
    *,
    targets: str | list[str],
    n: int = 2,
    m: int = 4,
    seed: int = 0,
    total_steps: int | None = None,
    backend: str = "emulate",
    precision: str | dict[str, str] | None = None,
    **options: Any,
) -> Sparsifier:
    """Make layers of ``model`` sparse, in place, and freeze what comes from initial weights.

    Every Parameter keeps its object, name and shape, so optimisers built before or after, state
    dicts and ``save_pretrained`` keep working.

    Args:
        model: contains nn.Linear, nn.Conv2d or transformers' Conv1D layers.
        method: a name of :func:`sparsepretrain.list_methods`.
        targets: globs of module names, such as ``["*.mlp.*"]``. ``*`` crosses dots, and a leading
            ``*.`` also matches at the root.
        n, m: N:M pattern along in_features, or along input channels at each kernel position.
        seed: of the method's random draws.
        total_steps: optimiser steps of the run; needed when something is a fraction of it.
        backend: ``"emulate"``: exact arithmetic with dense products.
        precision: None: the dtype of autocast, or of the weight. ``"fp8_sim"``, or a dict such as
            ``{"name": "fp8_sim", "recipe": "reference"}``: training products of these layers see
            fp8 operands (:class:`~sparsepretrain.sparsity.fp8.FP8Recipe`), evaluation does not.
        **options: the method's own (keys of ``configs/sparsity/<method>.yaml``); dotted ones as
            dicts, ``window={"start": 0.1}``.

    Returns:
        the handle to attach, measure and save with.

    Raises:
        ConfigError: an argument of the wrong type; unknown method, option or range; no layer for
            a pattern; a layer that is sparse already, shares its weight, or whose width is not a
            multiple of M; a bare layer as ``model``; sharded weights (DTensor).
    """
    patterns = [targets] if isinstance(targets, str) else targets
    _check_arguments(model, method, patterns, seed, total_steps, backend)
    recipe = recipe_from(precision)
    cls: Any = registry.get("method", method)
    given = {"name": method, "n": n, "m": m, "targets": list(patterns), **options}
    implementation: Method = cls(build(cls.Options, given), total_steps)
    layers = _select(model, list(patterns))
    _check_shapes(layers, implementation)
    weight = next(iter(layers.values())).weight
    clock = Clock(weight.device)  # type: ignore[arg-type]
    sparse = {
        name: _swap(layer, name, index, implementation, seed, clock, recipe)
        for index, (name, layer) in enumerate(layers.items())
    }
    _let_layers_run(model)
    sparsifier = Sparsifier(implementation, sparse, clock, model, recipe)
    model.register_forward_pre_hook(MicroBatchCounter(clock))
    return sparsifier


_FUSED = "_sparsity_activation_relu_or_gelu"


def _let_layers_run(model: nn.Module) -> None:
    """Keep PyTorch from evaluating an encoder layer by a kernel that reads the stored weights.

    What :func:`densify` undoes. The attribute is PyTorch's own condition for that kernel.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(child, SparseLayer) for child in module.modules()
        ):
            if not hasattr(module, _FUSED):  # sparse layers of an earlier call
                setattr(module, _FUSED, module.activation_relu_or_gelu)
            module.activation_relu_or_gelu = 0


def densify(model: nn.Module) -> nn.Module:
    """Give the layers their original classes back, holding the weight that evaluation uses.

    Dropped weights become exact zeros (+0.0) and scales are folded in, so outputs stay equal.
    Weights are not quantised: evaluation after training in simulated fp8 runs without fp8.

    Args:
        model: anything; layers that are not sparse stay as they are.

    Returns:
        ``model``.

    Raises:
        ConfigError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {_show(model)}")
    for module in model.modules():
        if hasattr(module, _FUSED):
            module.activation_relu_or_gelu = module.__dict__.pop(_FUSED)
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, MicroBatchCounter):
                del module._forward_pre_hooks[key]
        if not isinstance(module, SparseLayer):
            continue
        projection = module.sparsity.project(module)
        if projection.forward is not None:
            with torch.no_grad():
                module.weight.copy_(projection.forward)
        for name in [b for b in module._buffers if b.startswith("sparsity_")]:
            del module._buffers[name]
        for key, load_hook in list(module._load_state_dict_post_hooks.items()):
            if load_hook is invalidate_after_load:
                del module._load_state_dict_post_hooks[key]
        del module.sparsity
        module.__class__ = module.replaces  # type: ignore[assignment]
    return model


def _check_arguments(
    model: Any, method: Any, patterns: Any, seed: Any, total_steps: Any, backend: Any
) -> None:
    """Types of what does not pass through an options class."""
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"model must be a torch.nn.Module, got {_show(model)}")
    if not isinstance(method, str):
        problems.append(f"method must be a name such as 'sste', got {_show(method)}")
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        problems.append(f"targets must be a glob or a list of globs, got {_show(patterns)}")
    if not _is_integer(seed) or not 0 <= seed < 2**63:
        problems.append(f"seed must be an integer in [0, 2^63), got {_show(seed)}")
    if total_steps is not None and (not _is_integer(total_steps) or total_steps < 1):
        problems.append(f"total_steps must be an integer ≥ 1 or None, got {_show(total_steps)}")
    if backend in ("reference", "triton"):
        problems.append(
            f"backend {backend!r} is one of single kernels (sparsepretrain.kernels); layers have "
            f"'emulate' (dense products of sparse operands)"
        )
    elif backend != "emulate":
        problems.append(
            f"backend must be 'emulate' (dense products of sparse operands; the only one so far), "
            f"got {_show(backend)}"
        )
    if problems:
        raise ConfigError(problems)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    """A wrong argument in one line."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


def _select(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """Matching layers by name, in the model's order; every problem is reported at once."""
    if sparse_class(type(model)) is not None or isinstance(model, SparseLayer):
        raise ConfigError("the model is a bare layer: wrap it in a module, which can be searched")
    problems: list[str] = []
    chosen: dict[str, nn.Module] = {}
    matched: set[str] = set()
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    for module, aliases in names.items():  # a module under two names appears once
        name = aliases[0]
        hits = {p for p in patterns for a in aliases if _matches(a, p)}
        if not name or not hits:
            continue
        if isinstance(module, SparseLayer):
            problems.append(f"layer {name!r} is sparse already: call densify(model) first")
            matched |= hits
        elif sparse_class(type(module)) is not None:
            chosen[name] = module
            matched |= hits
        elif layer_family(type(module)) is not None:
            kind = type(module).__name__
            problems.append(f"layer {name!r} ({kind}) has a forward of its own: exclude it")
            matched |= hits
    for pattern in patterns:
        if pattern not in matched:
            near = registry.suggestion(pattern, _layer_names(model))
            problems.append(f"targets: no linear layer or convolution matches {pattern!r}{near}")
    owners = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append(f"{name}.{key}")
    for name, module in chosen.items():
        users = owners[id(module.weight)]
        if len(users) > 1:
            problems.append(f"layer {name!r} shares its weight ({', '.join(users)}): exclude it")
    if problems:
        raise ConfigError(problems)
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def _layer_names(model: nn.Module) -> list[str]:
    names = [k for k, v in model.named_modules() if sparse_class(type(v)) is not None]
    return names[:8]


def _check_shapes(layers: dict[str, nn.Module], method: Method) -> None:
    """Refuse shards, and widths that groups do not divide, one message for all of one width."""
    refuse_sharded(layers)
    problems = []
    m = method.options.m
    odd: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        assert isinstance(layer.weight, Tensor)
        if torch.nn.parameter.is_lazy(layer.weight):
            problems.append(f"layer {name!r} has no shape yet: run one forward before sparsify")
            continue
        cls = sparse_class(type(layer))
        assert cls is not None
        widths = cls.widths(layer)
        for (axis, size), multiple in zip(widths.items(), reversed(method.multiples), strict=True):
            if size % multiple:
                key = f"m = {m}: " if multiple == m else ""
                problem = f"{axis} = {size} is not a multiple of {multiple}; change the width"
                odd[key, problem].append(name)
        if method.mixes_outputs and getattr(layer, "groups", 1) > 1:
            own = method.options.name
            problem = f"{own} mixes output channels of all groups; choose another method"
            odd["", problem].append(name)
    for (key, problem), names in odd.items():
        them = "them" if len(names) > 1 else "it"
        problems.append(f"{key}{_list(names)}: {problem} or exclude {them} from targets")
    if problems:
        raise ConfigError(problems)


def _list(names: list[str]) -> str:
    """``layer 'a'``, or the first three of several and how many more."""
    shown = ", ".join(map(repr, names[:3]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"layer{'s' if len(names) > 1 else ''} {shown}{more}"


def _swap(
    layer: nn.Module,
    name: str,
    index: int,
    method: Method,
    seed: int,
    clock: Clock,
    recipe: FP8Recipe | None,
) -> SparseLayer:
    cls = sparse_class(type(layer))
    assert cls is not None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    layer.__class__ = cls  # the object stays: references, hooks and second names keep working
    assert isinstance(layer, SparseLayer)
    state = method.initial_state(widen(weight.detach()), cls.in_dim)
    for key, value in state.items():
        layer.register_buffer(f"sparsity_{key}", value)
    layer.sparsity = LayerState(method, name, index, seed, cls.in_dim, tuple(state), clock, recipe)
    empty = pack_24(torch.zeros(weight.shape, dtype=torch.bool, device=weight.device))
    layer.register_buffer(PREVIOUS_MASK, empty)
    layer.register_load_state_dict_post_hook(invalidate_after_load)
    if method.window[0] == 0:
        layer.sparsity.update(layer)
    return layer
