"""Replace layers by sparse ones and back: ``sparsify`` and ``densify``."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain import registry
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.sparsity import attachments
from sparsepretrain.sparsity.backend import (
    Backend,
    FP8Precision,
    LayerProducts,
    LayerSize,
    backend_of,
    precision_of,
)
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.layers import (
    SparseLayer,
    dense_weights,
    layer_family,
    refuse_sharded,
    sparse_class,
)
from sparsepretrain.sparsity.method import Method, MethodOptions, title
from sparsepretrain.sparsity.model_state import ModelState
from sparsepretrain.sparsity.sparsifier import Sparsifier

SUPPORTED = "(supported: nn.Linear, nn.Conv2d, transformers' Conv1D)"
"""Kinds of layers, in messages."""


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
    backend: str = "emulate",
    precision: str | dict[str, str] | None = None,
    **options: Any,
) -> Sparsifier:
    """Make layers of ``model`` sparse, in place, and derive frozen state from initial weights.

    Every Parameter keeps its object, name and shape, so optimizers built before or after, state
    dicts and ``save_pretrained`` keep working. All state is in the model's state dict.

    Args:
        model: contains nn.Linear, nn.Conv2d or transformers' Conv1D layers.
        method: a name of :func:`sparsepretrain.list_methods`.
        targets: globs of module names, such as ``["*.mlp.*"]``. ``*`` crosses dots, and a leading
            ``*.`` also matches at the root. ``"!glob"`` leaves layers out, as ``exclude`` does.
        exclude: globs of layers to leave out.
        n, m: N:M pattern along in_features, or along input channels at each kernel position.
        seed: of the method's random draws. Sparsifiers of one model draw differently; models that
            are sparsified one by one share draws unless their seeds differ.
        total_steps: optimizer steps of the run; needed when something is a fraction of it.
        backend: ``"emulate"``: exact arithmetic with dense products. ``"semi_structured"``: sparse
            ones, in fp16 and bf16 on CUDA devices that have them, of whatever operand is 2:4 and
            fits; the rest is emulated (:meth:`Sparsifier.coverage` says why). ``"auto"``: those
            of them that are faster, which the first eager training forward of a layer finds out.
        precision: None: the dtype of autocast, or of the weight. ``"fp8"``: training products of
            these layers are those of fp8 tensor cores, evaluation's are not
            (:class:`~sparsepretrain.sparsity.products.FP8`). ``"fp8_sim"``: they have the same
            operands, on any device. Or a dict such as ``{"name": "fp8", "recipe": "e4m3"}``.
        **options: the method's own (keys of ``configs/sparsity/<method>.yaml``); dotted ones as
            dicts, ``window={"start": 0.1}``.

    Returns:
        the handle to attach, measure and save with.

    Raises:
        ConfigError: an argument of the wrong type; unknown method, option or range; no layer for
            a pattern; a layer that is sparse already, shares its weight, or whose width is not a
            multiple of M; a bare layer as ``model``; sharded weights (DTensor); sparse or fp8
            products asked for of which none is possible.
    """
    targets, exclude = ([x] if isinstance(x, str) else x for x in (targets, exclude))

    def globs(given: Any) -> bool:
        return isinstance(given, list | tuple) and all(isinstance(p, str) for p in given)

    steps_fit = total_steps is None or (type(total_steps) is int and total_steps >= 1)
    rules = [
        ("model must be a torch.nn.Module", model, isinstance(model, nn.Module)),
        ("method must be a name such as 'sste'", method, isinstance(method, str)),
        ("targets must be a glob or a list of globs", targets, globs(targets)),
        ("exclude must be a glob or a list of globs", exclude, globs(exclude)),
        ("seed must be an integer in [0, 2^63)", seed, type(seed) is int and 0 <= seed < 2**63),
        ("total_steps must be an integer ≥ 1 or None", total_steps, steps_fit),
    ]
    problems = [f"{rule}, got {_show(given)}" for rule, given, fits in rules if not fits]
    if problems:
        raise ConfigError(problems)

    cls: Any = registry.get("method", method)
    given = {"name": method, "n": n, "m": m, "targets": list(targets), **options}
    chosen = build(cls.Options, given)
    rest: Any = {"total_steps": total_steps, "backend": backend, "precision": precision}
    return sparsify_with(model, chosen, targets=targets, exclude=exclude, seed=seed, **rest)


def sparsify_with(
    model: nn.Module,
    options: MethodOptions,
    *,
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    seed: int = 0,
    total_steps: int | None = None,
    backend: str | Backend = "emulate",
    precision: str | dict[str, str] | FP8Precision | None = None,
) -> Sparsifier:
    """:func:`sparsify` with options that were checked already, and the same errors.

    ``targets`` are globs and take the place of ``options.targets``, which may hold aliases.
    """
    formats, chooser = precision_of(precision), backend_of(backend)
    cls: Any = registry.get("method", options.name)
    method: Method = cls(options, total_steps)
    if total_steps is not None and method.schedule.start >= total_steps:
        reason = f": sparse from step {method.schedule.start} on, but there are {total_steps} steps"
        raise ConfigError([("window.start", reason)])
    dropped = [*exclude, *(p.removeprefix("!") for p in targets if p.startswith("!"))]
    layers = _select(model, [p for p in targets if not p.startswith("!")], dropped)
    _check_shapes(layers, method)
    device = next(iter(layers.values())).weight.device
    later = device.type == "cpu" and torch.cuda.is_available()  # the model may move there
    trains_on = torch.device("cuda", torch.cuda.current_device()) if later else device
    products = []
    for layer in layers.values():
        cls = sparse_class(type(layer))
        size = LayerSize(tuple(layer.weight.shape), cls.in_dim, trains_on)
        products.append(LayerProducts(method, formats, chooser, size))
    if formats is not None:
        formats.require(chosen.simulated for chosen in products)
    if chooser is not None:
        chooser.require(options.name, (chosen.reasons for chosen in products))
    state = ModelState(model, method, formats, chooser, seed, device)
    first = sum(isinstance(module, SparseLayer) for module in model.modules())
    for index, (name, layer) in enumerate(layers.items(), first):
        cls = sparse_class(type(layer))
        if layer.weight.requires_grad or state.example is None:
            state.example = layer
        with torch.no_grad():
            own = LayerState(state, name, index, layer.weight.detach(), cls.in_dim)
        # the object stays: references, hooks and second names keep working
        layer.__class__ = cls
        layer.add_module("sparsity", own)
        attachments.watch(layer)
    return Sparsifier(state)


def sparsifier_of(model: nn.Module) -> Sparsifier:
    """Return a handle to a model that was given to :func:`sparsify`, a copy, or a container of it.

    Raises:
        ConfigError: it is not sparse, or :func:`sparsify` was called for several parts of it.
    """
    layers = [m for m in model.modules() if isinstance(m, SparseLayer)]
    states = list(dict.fromkeys(layer.sparsity.model for layer in layers))
    if not states:
        raise ConfigError("the model is not sparse: call sparsify(model, method, targets=…)")
    if len(states) > 1:
        several = ", ".join(title(state.method) for state in states)
        raise ConfigError(f"sparsify was called {len(states)} times ({several}): keep its handles")
    return Sparsifier(states[0])


def densify(model: nn.Module, *, fold: bool = True) -> nn.Module:
    """Give the layers their original classes back, holding the weight that evaluation uses.

    Dropped weights become exact zeros (+0.0) and scales are folded in, so outputs stay equal.
    Weights are not quantized: evaluation after training in simulated fp8 runs without fp8.

    Args:
        model: sparse, or with sparse layers in it.
        fold: add what a method adds to the product (adapters) to the weight too, which leaves no
            exact zeros; False: leave it out.

    Returns:
        ``model``; its layers that are not sparse stay as they are.

    Raises:
        ConfigError: ``model`` is not a module, or it is sharded.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {_show(model)}")
    layers = [module for module in model.modules() if isinstance(module, SparseLayer)]
    states = {layer.sparsity.model for layer in layers}
    if any(layer.sparsity.rows.is_sharded for layer in layers):
        raise ConfigError(
            "a sharded model cannot be densified: save it, and load the checkpoint in one process"
        )
    folded: list[str] = []
    for state in states:
        state.sync()
        if (phase := state.method.phase) and not phase.evaluation and phase.why:
            warnings.warn(
                f"{state.method.options.name} evaluates dense weights {phase.why}: densify leaves "
                "no zeros in them",
                SparsePretrainWarning,
                stacklevel=2,
            )
    for layer in layers:
        own, weight = layer.sparsity, layer.weight
        with torch.no_grad():
            forward = own.project(weight).forward
            residual = residual_weight(layer) if fold else None
            if forward is not None:
                weight.copy_(forward)
            if residual is not None:
                weight.add_(residual)
                folded.append(own.layer_name)
        del layer._modules["sparsity"]
        attachments.living.discard(layer)
        layer.__class__ = layer.replaces  # type: ignore[assignment]
    for state in states:
        attachments.detach(state, densified=True)
        state.release()
    if folded:
        warnings.warn(
            f"low-rank adapters were folded into {len(folded)} layers ({folded[0]}, …): their "
            "weights have no exact zeros any more",
            SparsePretrainWarning,
            stacklevel=2,
        )
    return model


def residual_weight(layer: SparseLayer) -> Tensor | None:
    """Return what the method adds to the output, as a weight that is stored like the layer's."""
    own, weight = layer.sparsity, layer.weight
    if weight.dim() != 2:
        return None
    identity = torch.eye(weight.shape[own.dim], dtype=weight.dtype, device=weight.device)
    residual = own.method.residual(identity, own)
    return residual.t() if residual is not None and own.dim == 1 else residual


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


def _select(model: nn.Module, patterns: list[str], exclude: Sequence[str]) -> dict[str, Any]:
    """Matching layers by name, in the model's order; every problem is reported at once."""
    if sparse_class(type(model)) is not None or isinstance(model, SparseLayer):
        raise ConfigError("the model is a bare layer: wrap it in a module, which can be searched")
    problems: list[str | tuple[str, str]] = []
    chosen: dict[str, Any] = {}
    matched: set[str] = set()
    dense: dict[str, str] = {}  # modules with weights that cannot be sparse
    left_out: dict[str, str] = {}  # such modules that the pattern "*" matches, as everything
    owners: dict[Any, list[str]] = defaultdict(list)  # parameter -> its names
    names: dict[nn.Module, list[str]] = defaultdict(list)  # and with a dot before, for `*.x`
    for name, module in model.named_modules(remove_duplicate=False):
        names[module] += name, f".{name}"
    for module, aliases in names.items():  # a module under two names appears once
        name = aliases[0]
        for key, parameter in module._parameters.items():
            owners[parameter].append(f"{name}.{key}")
        hits = {p for p in patterns for alias in aliases if fnmatchcase(alias, p)}
        if not name or not hits:
            continue
        if any(fnmatchcase(alias, p) for alias in aliases for p in exclude):
            pass
        elif isinstance(module, SparseLayer):
            problems.append(f"layer {name!r} is sparse already: call densify(model) first")
        elif layer_family(type(module)) is not None and module._parameters.get("weight") is None:
            problems.append(
                f"layer {name!r} computes its weight from another one (parametrization, "
                "spectral_norm or weight_norm): remove that, or exclude the layer"
            )
        elif sparse_class(type(module)) is not None:
            chosen[name] = module
        elif layer_family(type(module)) is not None:
            kind = type(module).__name__
            problems.append(f"layer {name!r} ({kind}) has a forward of its own: exclude it")
        elif kept := dense_weights(module):
            text = _described(name, module, kept)
            if hits == {"*"}:
                left_out[name] = text
                continue
            dense[name] = text
        else:
            continue
        matched |= hits
    if dense:
        globs = ", ".join(sorted({f"'*.{name.rpartition('.')[2]}'" for name in dense}))
        text = f": weights that match cannot be sparse {SUPPORTED}: {_listed(dense.values())}"
        problems.append(("targets", f"{text}; leave them out, such as exclude=[{globs}]"))
    for pattern in patterns:
        if pattern not in matched and (found := _parameters_like(model, pattern)):
            text = f": {pattern!r} matches {_listed(found)}, which cannot be sparse {SUPPORTED}"
            problems.append(("targets", text))
        elif pattern not in matched:
            known = [k for k, v in model.named_modules() if sparse_class(type(v)) is not None]
            text = f": no linear layer or convolution matches {pattern!r}"
            problems.append(("targets", text + registry.suggestion(pattern, known[:8])))
    for name, module in chosen.items():
        users = owners[module.weight]
        if len(users) > 1:
            problems.append(f"layer {name!r} shares its weight ({', '.join(users)}): exclude it")
    if not chosen and not problems:
        problems.append(("targets", ": every layer that matches is excluded"))
    if problems:
        raise ConfigError(problems)
    if left_out:
        warnings.warn(
            f"weights that match targets stay dense {SUPPORTED}: {_listed(left_out.values())}",
            SparsePretrainWarning,
            stacklevel=4,
        )
    return chosen


def _described(name: str, module: nn.Module, weights: dict[str, Any]) -> str:
    """Name and shape of a module's own parameters, and its class."""
    shapes = ", ".join(f"{name}.{k} {tuple(weight.shape)}" for k, weight in weights.items())
    return f"{shapes} of {type(module).__name__}"


def _listed(texts: Iterable[str]) -> str:
    """The first three, and how many more there are."""
    every = [*texts]
    more = [f"and {len(every) - 3} more"] * (len(every) > 3)
    return "; ".join([*every[:3], *more])


def _parameters_like(model: nn.Module, pattern: str) -> list[str]:
    """Parameters of two or more dimensions, in no linear layer, whose names match a glob."""
    found = []
    for name, module in model.named_modules():
        if layer_family(type(module)) is None:
            kept = dense_weights(module).items()
            like = {k: w for k, w in kept if fnmatchcase(f".{name}.{k}", pattern)}
            found += [_described(name, module, like)] if like else []
    return found


def _check_shapes(layers: dict[str, Any], method: Method) -> None:
    """Refuse shards, and widths that groups do not divide, one message for all of one width."""
    refuse_sharded(layers)
    problems: list[str | tuple[str, str]] = []
    m = method.options.m
    odd: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if torch.nn.parameter.is_lazy(layer.weight):
            problems.append(f"layer {name!r} has no shape yet: run one forward before sparsify")
            continue
        cls: Any = sparse_class(type(layer))
        convolution, groups = isinstance(layer, nn.Conv2d), getattr(layer, "groups", 1)
        kind = ("channels" if convolution else "features") + " / groups" * (groups > 1)
        sizes = layer.weight.shape[cls.in_dim], layer.weight.shape[1 - cls.in_dim] // groups
        for axis, size, multiple in zip(("in", "out"), sizes, method.multiples[::-1], strict=True):
            if size % multiple:
                problem = f"{axis}_{kind} = {size} is not a multiple of {multiple}"
                odd["m" if multiple == m else "", f"{problem}; change the width"].append(name)
        own = method.options.name
        layer_kind = "grouped " * (groups > 1) + "convolution" if convolution else "linear"
        if layer_kind not in method.layer_kinds:
            known = ", ".join(method.layer_kinds)
            odd["", f"{own} supports {known}, not {layer_kind}"].append(name)
    for (key, problem), names in odd.items():
        shown = ", ".join(map(repr, names[:3]))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        s, them = ("s", "them") if len(names) > 1 else ("", "it")
        text = f"layer{s} {shown}{more}: {problem} or exclude {them} from targets"
        problems.append((key, f" = {m}: {text}") if key else text)
    if problems:
        raise ConfigError(problems)
