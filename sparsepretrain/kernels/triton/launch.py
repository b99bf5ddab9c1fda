"""Launch Triton kernels: strided rows, tiles of groups, operators.

Imported only if a Triton kernel runs; the references need torch alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsepretrain.kernels.common import packed_shape

P = ParamSpec("P")
T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on CPU tensors, for tests: Triton reads this variable when it is imported."""
BLOCK = 2048
"""Elements per program of the streaming kernels: 16 per thread with 4 warps."""
LANES = 128
"""Rows per program where groups lie across memory: neighboring rows are read together."""
if INTERPRETED:  # it costs milliseconds per program, whatever the size
    BLOCK, LANES = BLOCK * 32, LANES * 32


class Tile(NamedTuple):
    """Part of a tensor that one program of a kernel over groups works on; a constant."""

    ROWS: int
    GROUPS: int
    CONTIGUOUS: bool
    """The groups lie along memory."""
    WIDE: bool
    """Offsets need 64 bits."""
    TURNED: bool = False
    """The groups lie along memory in the result alone."""


class Rows(NamedTuple):
    """A tensor as rows along one axis, in place: element i of row r lies at

    ``(r // inner)·outer_stride + (r % inner)·inner_stride + i·stride``.
    """

    data: Tensor
    inner: int
    outer_stride: int
    inner_stride: int
    stride: int


def rows_of(x: Tensor, dim: int) -> Rows:
    """``x`` as rows along ``dim``; copies only what no strides of three axes describe."""
    strides = _strides(x.shape, x.stride(), dim)
    if strides is None:
        x = x.contiguous()
        strides = _strides(x.shape, x.stride(), dim)
        assert strides is not None
    return Rows(x, *strides)


# A launch costs the host time, which a GPU waits for: geometry is worked out once per shape.
Strides = tuple[int, int, int, int]
"""All of :class:`Rows` but its data."""


@lru_cache(4096)
def _strides(shape: torch.Size, stride: tuple[int, ...], dim: int) -> Strides | None:
    """A tensor as :class:`Rows`; None: only a copy of it is one."""
    dim %= len(shape)
    outer, inner = (
        _stride(shape[axes], stride[axes]) for axes in (slice(dim), slice(dim + 1, None))
    )
    if outer is None or inner is None:
        return None
    if shape[:dim].numel() == 1:  # one stride from row to row: divisions by 1 vanish when compiled
        return 1, inner, 0, stride[dim]
    return shape[dim + 1 :].numel(), outer, inner, stride[dim]


def _stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the stride of several axes taken as one, or None if they cannot be collapsed."""
    axes = [axis for axis in zip(shape, stride, strict=True) if axis[0] != 1]
    if any(outer != n * inner for (_, outer), (n, inner) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 1


class Tiling(NamedTuple):
    """Grid of a launch over groups."""

    rows: int
    groups: int
    """Per row."""
    tile: Tile
    programs: int
    joined: Strides | None
    """Strides of all rows taken as one row, if they follow each other in memory."""


@lru_cache(4096)
def _tiling(
    shape: torch.Size,
    dim: int,
    m: int,
    numbered: bool,
    source: Strides,
    target: Strides,
    others: tuple[Strides, ...],
) -> Tiling:
    length = shape[dim]
    count, every = shape.numel() // length, (source, target, *others)
    contiguous = source[3] == target[3] == 1
    turned = target[3] == 1 and not contiguous
    joined = None
    if not numbered and all(_gapless(strides, count, length) for strides in (source, target)):
        # groups never straddle rows, so all of it is one row: no tile hangs over a row's end
        count, length = 1, shape.numel()
        joined = 1, length, 0, 1
        every = (joined,)
    groups = length // m

    def power_of_two(n: int) -> int:
        return 1 << (n - 1).bit_length()

    per_tile = BLOCK // power_of_two(m)
    if contiguous:
        across = per_tile if count == 1 else min(per_tile, max(512 // power_of_two(m), 1))
        wide = min(across, power_of_two(groups))
        high = min(per_tile // wide, power_of_two(count))
    else:
        high = min(LANES // 2 if turned else LANES, per_tile, power_of_two(count))
        wide = min(per_tile // high, power_of_two(groups))
    reach = max(
        count // inner * outer + inner * within + length * stride
        for inner, outer, within, stride in every
    )
    tile = Tile(high, wide, contiguous, reach >= 2**31, turned)
    return Tiling(count, groups, tile, -(-count // high) * -(-groups // wide), joined)


def _gapless(strides: Strides, count: int, length: int) -> bool:
    """Return True if the rows follow each other in memory, in order and without gaps."""
    inner, outer, within, stride = strides
    in_order = outer == length * inner or count == inner
    return stride == 1 and in_order and (within == length or inner == 1)


_operators = torch.library.Library("sparsepretrain", "FRAGMENT")


def operator(
    name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as ``sparsepretrain::name``, without ``custom_op``'s checks of each call.

    They take 10 µs of a launch. What they would notice: a result that shares memory with an
    argument, and a backward through it.

    Args:
        name: of the operator.
        fake: what tracing computes in its place.
        mutates: arguments that are written in place, whose versions the function counts itself.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        _operators.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _operators.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sparsepretrain::{name}", fake, lib=_operators)
        overload: Callable[P, T] = getattr(torch.ops.sparsepretrain, name).default
        return overload

    return register


def over_elements(
    kernel: Any,
    pointers: Sequence[Tensor],
    count: int,
    *args: Any,
    block: int = BLOCK,
    **options: Any,
) -> None:
    """Launch ``kernel`` on parts of ``range(count)``.

    The kernel takes ``pointers``, ``count``, ``args`` and the constants ``BLOCK``, ``WIDE``
    (offsets need 64 bits) and ``options``.
    """
    if not count:
        return
    wide = count >= 2**31 - block
    with torch.cuda.device_of(pointers[0]):
        kernel[(-(-count // block),)](
            *pointers, count, *args, BLOCK=block, WIDE=wide, enable_fp_fusion=False, **options
        )


def memory_order(x: Tensor) -> list[int]:
    """The axes of ``x``, largest stride first: in this order dense tensors are contiguous."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda axis: -strides[axis])


def empty_rows(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A result of the shape of ``x``, and its strides unless :func:`rows_of` would copy those."""
    out = torch.empty_like(x, dtype=dtype)
    if x.is_contiguous():
        return out
    dim %= x.dim()
    try:
        out.view(x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel())
    except (RuntimeError, ValueError):  # the latter from fake tensors
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    return out


def over_groups(
    kernel: Any,
    m: int,
    dim: int,
    x: Tensor,
    out: Tensor,
    *args: Any,
    beside: Tensor | None = None,
    numbered: bool = False,
    **options: Any,
) -> None:
    """Launch ``kernel`` on tiles of whole groups of ``m`` along ``dim``.

    The kernel takes ``x`` and ``out`` as :class:`Rows`, the number of rows and of groups per row,
    ``beside`` (a result with the strides of ``out``) as Rows if there is one, ``args``, and the
    constants ``TILE`` (a :class:`Tile`) and ``options``. ``numbered``: rows and groups keep their
    numbers, which the kernel uses. Elements beyond the last whole group of a row are left alone.
    """
    if not x.numel() or x.shape[dim] < m:
        return
    source, target = rows_of(x, dim), rows_of(out, dim)
    others = tuple(arg[1:] for arg in args if isinstance(arg, Rows))  # which need not be gapless
    numbered |= bool(others)
    tiling = _tiling(x.shape, dim, m, numbered, source[1:], target[1:], others)
    if tiling.joined is not None:
        source, target = (Rows(rows.data, *tiling.joined) for rows in (source, target))
    if beside is not None:
        args = (target._replace(data=beside), *args)
    with torch.cuda.device_of(x):
        # no fusion: decisions are compared bit for bit with the reference
        kernel[(tiling.programs,)](
            source,
            target,
            tiling.rows,
            tiling.groups,
            *args,
            TILE=tiling.tile,
            enable_fp_fusion=False,
            **options,
        )


def packs(x: Tensor, out: Tensor) -> bool:
    """Return True if :func:`store_code` can pack the mask of a kernel over fours of ``x``."""
    matrices = x.dim() == 2 and x.is_contiguous() and out.is_contiguous()
    return matrices and x.shape == out.shape and x.shape[1] >= 8 and x.numel() > 0


def packed_rows(x: Tensor) -> Tensor:
    """Room for a mask of ``x`` packed by rows (:func:`sparsepretrain.kernels.pack_rows`)."""
    return torch.empty(packed_shape(x.shape), dtype=torch.uint8, device=x.device)
