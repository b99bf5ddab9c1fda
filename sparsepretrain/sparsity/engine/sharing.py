"""Weights that share memory: which Parameters of a model would a sparse weight change too?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.engine.weights import is_dtensor


def shared_weights(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return the layers whose weight is, or overlaps, another Parameter -> names of all of them.

    A Parameter of two modules is shared, and so are Parameters made from the data of one tensor
    (``decoder.weight = nn.Parameter(encoder.weight.data.t())``). Views of one buffer without
    overlap are not.
    """
    weights = {layer.weight for layer in layers.values()}
    owners: dict[Any, list[str]] = defaultdict(list)
    spans: dict[int, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for name, module in model.named_modules():  # a module under two names appears once
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in owners and (span := _span(parameter)) is not None:
                storage, first, end = span
                spans[storage].append((first, end, parameter))
            owners[parameter].append(f"{name}.{key}" if name else key)
    overlapping: dict[Any, list[Tensor]] = defaultdict(list)
    for places in spans.values():
        for first, end, parameter in places if len(places) > 1 else ():
            if parameter in weights:
                near = [p for a, b, p in places if a < end and first < b]
                overlapping[parameter] = [p for p in near if _overlap(p, parameter)]
    found = {}
    for name, layer in layers.items():
        users = [u for p in overlapping.get(layer.weight, [layer.weight]) for u in owners[p]]
        if len(users) > 1:
            found[name] = users
    return found


def require_unshared(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Refuse weights that were tied after ``sparsify``: their masks would prune other layers."""
    for name, users in shared_weights(model, layers).items():
        raise ConfigError(
            f"layer {name!r} shares its weight since sparsify ({', '.join(users)}): tie weights "
            "before sparsify and exclude the layer, or do not tie them"
        )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one storage have an element in common."""
    if one is other:
        return True
    one, other = _local(one), _local(other)
    if one.element_size() != other.element_size():
        return True
    # columns of one matrix are apart, though their spans are not; the storage may be a whole file
    first = min(one.storage_offset(), other.storage_offset())
    size = max(_last(one), _last(other)) + 1 - first
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    place = other.storage_offset() - first
    return bool(taken.as_strided(other.shape, other.stride(), place).any())


def _last(local: Any) -> int:
    """Return the place of the last element in the storage."""
    steps = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
    return int(local.storage_offset() + steps)


def _local(parameter: Tensor) -> Any:
    """Return a tensor, or the part of a DTensor on this rank."""
    local: Any = parameter.data
    return local._local_tensor if is_dtensor(local) else local


def _span(parameter: Tensor) -> tuple[int, int, int] | None:
    """Return storage, and first and end byte of a tensor; None if it has no storage of its own."""
    local = _local(parameter)
    if (
        local.layout != torch.strided
        or local.numel() == 0
        or torch.nn.parameter.is_lazy(parameter)
        or is_traceable_wrapper_subclass(local)
    ):
        return None
    size = local.element_size()
    # the address of the storage object: tensors on the meta device have no memory
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset() * size, (_last(local) + 1) * size
