"""Select the layers that globs name, and refuse layers that cannot be sparse."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.sparsity.engine.banks import SparseBank, is_transposed
from sparsepretrain.sparsity.engine.layer_classes import (
    dense_weights,
    replacement_of,
    sparse_class,
)
from sparsepretrain.sparsity.engine.own_forwards import forward_objection, layer_family
from sparsepretrain.sparsity.engine.sharing import shared_weights
from sparsepretrain.sparsity.engine.weights import SparseWeight, is_dtensor
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.patterns import Pattern, pattern_in

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of a weight that can be sparse."""

_NO_BANKS = (
    nn.modules.conv._ConvNd,
    nn.Bilinear,
    nn.RNNBase,
    nn.utils.parametrize.ParametrizationList,
    SparseWeight,
)
"""Modules whose Parameters of three or more dimensions are no slices for matmuls."""

SUPPORTED = "(supported: nn.Linear, nn.Conv2d, transformers' Conv1D and experts, banks by name)"
"""Kinds of layers, in messages."""


def select_layers(model: nn.Module, patterns: list[str], exclude: Sequence[str]) -> dict[str, Any]:
    """Return matching layers by name, in the model's order; report every problem at once."""
    if sparse_class(type(model)) is not None or isinstance(model, SparseWeight):
        raise ConfigError("the model is a bare layer: wrap it in a module, which can be searched")
    problems: list[str | tuple[str, str]] = []
    chosen: dict[str, Any] = {}
    matched: set[str] = set()
    dense: dict[str, str] = {}  # modules with weights that cannot be sparse
    left_out: dict[str, str] = {}  # such modules that the pattern "*" matches, as everything
    names: dict[nn.Module, list[str]] = defaultdict(list)  # and with a dot before, for `*.x`
    for name, module in model.named_modules(remove_duplicate=False):
        names[module] += name, f".{name}"
    adapters = _parts_of_adapters(model)
    for module, aliases in names.items():  # a module under two names appears once
        name = aliases[0]
        if module in adapters:
            continue
        hits = {p for p in patterns for alias in aliases if _matches(alias, p)}
        banks, bank_hits, kept = _select_banks(module, aliases, patterns, exclude)
        chosen |= banks
        matched |= bank_hits
        if banks and "forward" in vars(module):
            problems.append(
                f"the bank {next(iter(banks))!r} is read by a forward of its module's own object, "
                "which another library has set: sparsify before that, or exclude it"
            )
        if not hits:
            continue
        if not name:  # weights of all blocks may be one Parameter of the root
            if kept:
                left_out[name] = _described(name, module, kept)
            continue
        if any(_matches(alias, p) for alias in aliases for p in exclude):
            pass
        elif isinstance(module, SparseWeight):
            problems.append(f"layer {name!r} is sparse already: call densify(model) first")
        elif layer_family(type(module)) is not None and _computes_weight(module):
            problems.append(
                f"layer {name!r} computes its weight from another one (parametrization, "
                "spectral_norm, weight_norm or another library): remove that, or exclude the layer"
            )
        elif layer_family(type(module)) is not None and _is_quantized(module.weight):
            problems.append(
                f"layer {name!r} has a weight of the class {type(module.weight.data).__name__}: "
                "dequantize it, or exclude the layer"
            )
        elif layer_family(type(module)) is not None:
            kind = type(module).__name__
            if sparse_class(type(module)) is None:
                problems.append(f"layer {name!r} ({kind}) is bypassed by its module: exclude it")
            elif "forward" in vars(module):
                problems.append(
                    f"layer {name!r} ({kind}) has a forward of its own object, which another "
                    "library has set: sparsify before that, or exclude it"
                )
            elif why := forward_objection(module):
                problems.append(f"layer {name!r} ({kind}) has {why}: exclude it")
            else:
                chosen[name] = module
        elif kept:
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
        if pattern not in matched and (tensors := _parameters_like(model, pattern)):
            text = f": {pattern!r} matches {_listed(tensors)}, which cannot be sparse {SUPPORTED}"
            problems.append(("targets", text))
        elif pattern not in matched:
            known = [k for k, v in model.named_modules() if sparse_class(type(v)) is not None]
            text = f": no linear layer or convolution matches {pattern!r}"
            problems.append(("targets", text + registry.suggestion(pattern, known[:8])))
    for name, users in shared_weights(model, chosen).items():
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


def _select_banks(
    module: nn.Module, aliases: Sequence[str], patterns: Sequence[str], exclude: Sequence[str]
) -> tuple[dict[str, SparseBank], set[str], dict[str, Tensor]]:
    """Return the own Parameters of a module that become banks, by name.

    Experts of transformers match by the name of the module or of the Parameter. Other Parameters of
    three or more dimensions match by their own names, and not ``*``, which means all layers: what
    their axes are shows when they are read. Also return the globs that match, and the other
    Parameters of two or more dimensions that were not excluded.
    """
    banks: dict[str, SparseBank] = {}
    matched: set[str] = set()
    others: dict[str, Tensor] = {}
    transposed = is_transposed(module)
    # a module without a forward, such as nn.ParameterList, is read by another one
    runs = type(module).forward is not nn.Module.forward
    is_layer = layer_family(type(module)) is not None or isinstance(module, _NO_BANKS)
    has_banks = runs and not is_layer
    for key, parameter in dense_weights(module).items():
        paths = _paths(aliases, key)
        is_known = transposed is not None
        names = [*paths, *aliases] if is_known else paths
        hits = {p for p in patterns for each in names if _matches(each, p)}
        if any(_matches(each, p) for each in (*paths, *aliases) for p in exclude):
            matched |= hits
            continue
        is_named = bool(hits) and (is_known or hits != {"*"})
        if parameter.dim() < 3 or not has_banks or not is_named:
            others[key] = parameter
        else:
            matched |= hits
            banks[paths[0]] = SparseBank(module, key, 0 if transposed else 1)
    return banks, matched, others


def _names_of(layer: Any, names: Mapping[nn.Module, Sequence[str]]) -> Sequence[str]:
    """Return the names by which globs find a selected layer or bank, in :func:`select_layers`."""
    if not isinstance(layer, SparseBank):
        return names[layer]
    aliases = names[layer.owner]
    paths = _paths(aliases, layer.key)
    return [*paths, *aliases] if layer.is_known else paths


def _paths(aliases: Iterable[str], key: str) -> list[str]:
    """Return the names of a Parameter of a module; the aliases of the root are "" and "."."""
    return [f"{alias}.{key}" if alias not in ("", ".") else key for alias in aliases]


def _parts_of_adapters(model: nn.Module) -> set[nn.Module]:
    """Return the modules of adapters of peft, such as ``lora_A``, without the wrapped layers.

    Globs of the layers match them too: they lie below the names of the layers.
    """
    parts: set[nn.Module] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(module, "active_adapters"):
            parts |= set(module.modules()) - set(base.modules()) - {module}
    return parts


def _matches(name: str, pattern: str) -> bool:
    """Return True if a glob names a module; brackets may be part of a name."""
    return name == pattern or fnmatchcase(name, pattern)


def _computes_weight(layer: Any) -> bool:
    """Return True if the weight that a layer uses is not its Parameter."""
    stored = layer._parameters.get("weight")
    return stored is None or layer.weight is not stored


def _is_quantized(weight: Any) -> bool:
    """Return True for tensor subclasses that hold other tensors, such as those of torchao."""
    return is_traceable_wrapper_subclass(weight) and not is_dtensor(weight)


def _described(name: str, module: nn.Module, weights: dict[str, Any]) -> str:
    """Name and shape of a module's own parameters, and its class."""
    prefix = f"{name}." if name else ""
    shapes = ", ".join(f"{prefix}{k} {tuple(weight.shape)}" for k, weight in weights.items())
    return f"{shapes} of {type(module).__name__}"


def _listed(texts: Iterable[str]) -> str:
    """Return the first three texts and the number of others."""
    every = [*texts]
    shown = every[:3]
    if len(every) > 3:
        shown.append(f"and {len(every) - 3} more")
    return "; ".join(shown)


def _parameters_like(model: nn.Module, pattern: str) -> list[str]:
    """Parameters of two or more dimensions, in no linear layer, whose names match a glob."""
    parameters = []
    for name, module in model.named_modules():
        if layer_family(type(module)) is None:
            kept = dense_weights(module).items()
            like = {k: w for k, w in kept if fnmatchcase(f".{name}.{k}", pattern)}
            parameters += [_described(name, module, like)] if like else []
    return parameters


def assign_patterns(
    model: nn.Module,
    layers: Mapping[str, Any],
    patterns: Mapping[str, str],
    roles: Mapping[str, Sequence[str]],
    default: Pattern,
) -> dict[str, Pattern | None]:
    """Return the pattern of every selected layer; None: it stays dense.

    Args:
        model: contains the layers.
        layers: selected layers and banks by name.
        patterns: glob or alias -> N:M or dense; the first that matches a layer decides.
        roles: alias -> its globs.
        default: of layers that nothing matches.

    Raises:
        ConfigError: a key matches no selected layer, or only layers of earlier keys; all layers are
            dense.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module] += name, f".{name}"
    assigned: dict[str, Pattern | None] = dict.fromkeys(layers, default)
    decided_by: dict[str, str] = {}  # layer -> key
    problems: list[str | tuple[str, str]] = []
    for key, pattern in patterns.items():
        globs = roles.get(key, [key])
        matched = [
            name
            for name, layer in layers.items()
            if any(_matches(each, glob) for each in _names_of(layer, names) for glob in globs)
        ]
        left = [name for name in matched if name not in decided_by]
        if not matched:
            near = registry.suggestion(key, [*roles, *layers][:8])
            problems.append((f"patterns.{key}", f": no layer of the targets matches{near}"))
        elif not left:
            first = decided_by[matched[0]]
            text = f": {first} comes before and decides all of its layers: put {key} first"
            problems.append((f"patterns.{key}", text))
        for name in left:
            decided_by[name] = key
            assigned[name] = pattern_in(pattern)
    if not problems and not any(assigned.values()):
        text = ": every selected layer is dense: leave a layer out, or use the method dense"
        problems.append(("patterns", text))
    if problems:
        raise ConfigError(problems)
    return assigned


def check_shapes(layers: dict[str, Any], methods: Mapping[str, Method], default: int) -> None:
    """Refuse shards, and widths that groups do not divide, one message for all of one width.

    Args:
        layers: selected layers and banks by name.
        methods: of the layers.
        default: M of layers that ``patterns`` does not name.
    """
    refuse_sharded(layers)
    problems: list[str | tuple[str, str]] = []
    for name, layer in layers.items():
        if layer.weight.dtype not in DTYPES:
            dtype = str(layer.weight.dtype).removeprefix("torch.")
            problems.append(
                f"layer {name!r} has a weight of {dtype}, expected real floating-point numbers of "
                "16 bits or more: exclude it, or train a master copy in fp32 (fp8: precision='fp8')"
            )
    odd: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        method = methods[name]
        m = method.options.m
        if torch.nn.parameter.is_lazy(layer.weight):
            problems.append(f"layer {name!r} has no shape yet: run one forward before sparsify")
            continue
        convolution = isinstance(layer, nn.Conv2d)
        groups = getattr(layer, "groups", 1)
        kind = "channels" if convolution else "features"
        layer_kind = "convolution" if convolution else "linear"
        if groups > 1:
            kind = "channels / groups"
            layer_kind = "grouped convolution"
        if isinstance(layer, SparseBank):
            layer_kind = "bank" if layer.in_dim == 1 else "transposed bank"
            sizes = layer.sizes[:2]
            if not layer.weight.is_contiguous():
                problems.append(f"the bank {name!r} is not contiguous in memory: exclude it")
        else:
            inputs = replacement_of(layer).in_dim
            sizes = layer.weight.shape[inputs], layer.weight.shape[1 - inputs] // groups
        for axis, size, multiple in zip(("in", "out"), sizes, method.multiples[::-1], strict=True):
            if size % multiple:
                problem = f"{axis}_{kind} = {size} is not a multiple of {multiple}"
                key = ("m" if m == default else "patterns") if multiple == m else ""
                odd[key, f"{problem}; change the width", m].append(name)
        method_name = method.options.name
        if layer_kind not in method.layer_kinds:
            known = ", ".join(method.layer_kinds)
            odd["", f"{method_name} supports {known}, not {layer_kind}", m].append(name)
    for (key, problem, m), names in odd.items():
        shown = ", ".join(map(repr, names[:3]))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        s, them = ("s", "them") if len(names) > 1 else ("", "it")
        text = f"layer{s} {shown}{more}: {problem} or exclude {them} from targets"
        value = f" = {m}" if key == "m" else ""
        problems.append((key, f"{value}: {text}") if key else text)
    if problems:
        raise ConfigError(problems)


def refuse_sharded(layers: Mapping[str, nn.Module]) -> None:
    """Refuse weights that are DTensors (ConfigError): masks need whole weights."""
    if names := [name for name, layer in layers.items() if is_dtensor(layer.weight)]:
        more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
        raise ConfigError(
            f"the weight of {names[0]!r}{more} is sharded (DTensor): sparsify the model before "
            "fully_shard and call sparsifier.prepare_sharding() in between; tensor parallelism is "
            "not supported"
        )
