"""Constants and checks that references and kernels share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a floating dtype -> integer dtype of the same size."""
PAIRS = list(itertools.combinations(range(4), 2))
"""The six ways to keep two of four, as column pairs."""


def functions_of(package: str, path: Iterable[str]) -> dict[str, Any]:
    """Return name -> public callable of all files of a package, imported names included."""
    modules = [import_module(f"{package}.{m.name}") for m in iter_modules(path) if not m.ispkg]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }


def check_pattern(name: str, x: Tensor, n: int, m: int, dim: int) -> None:
    """Refuse patterns and shapes that have no exact N:M answer."""
    if not 1 <= n <= m:
        raise ValueError(f"{name}: N:M needs 1 ≤ N ≤ M, got {n}:{m}")
    if x.dim() == 0 or x.shape[dim] % m:
        size = tuple(x.shape)
        raise ValueError(f"{name}: axis {dim} of shape {size} is not a multiple of M = {m}")


def check_out(name: str, x: Tensor, out: Tensor | None) -> None:
    """Refuse an ``out`` of another shape than ``x``, which kernels would write beyond."""
    if out is not None and out.shape != x.shape:
        raise ValueError(f"{name}: out must have shape {tuple(x.shape)}, got {tuple(out.shape)}")


def check_draws(name: str, shape: Sequence[int], uniforms: Tensor | None, key: object) -> None:
    """Refuse draws given twice or not at all, and uniforms of another shape than ``shape``."""
    if (uniforms is None) == (key is None):
        raise ValueError(f"{name}: give either uniforms or key")
    if uniforms is not None and uniforms.shape != tuple(shape):
        got = tuple(uniforms.shape)
        raise ValueError(f"{name}: uniforms must have shape {tuple(shape)}, got {got}")


def packed_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Shape of a packed mask of ``shape``: (rows, ⌈entries of a row / 8⌉)."""
    return shape[0], -(-math.prod(shape[1:]) // 8)


def widen(x: Tensor) -> Tensor:
    """Cast to fp32, which holds every narrower value exactly; fp64 is returned as it is."""
    return x if x.dtype == torch.float64 else x.float()


def to_groups(x: Tensor, dim: int, m: int = 4) -> Tensor:
    """Return groups of M along ``dim`` for sampling: (groups, M, other axes), fp32 or fp64.

    The last group is padded with zeros.
    """
    rows = widen(x.detach()).movedim(dim, 0)
    rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    if rows.shape[0] % m:  # pad copies even where it adds nothing
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % m))
    return rows.view(rows.shape[0] // m, m, rows.shape[1])


def from_groups(groups: Tensor, x: Tensor, dim: int, order: str | None = None) -> Tensor:
    """Inverse of :func:`to_groups`: shape and dtype of ``x``; ``order``: see :func:`mvue`."""
    rows = groups.flatten(0, 1)[: x.shape[dim]]
    out = rows.view(x.movedim(dim, 0).shape).movedim(0, dim).to(x.dtype)
    return out if order is None else out.movedim(dim, -1).contiguous().movedim(-1, dim)
