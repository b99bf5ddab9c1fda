"""What every Triton kernel shares: strided rows, tiles of groups, rounding, launching.

Imported only where a Triton kernel runs; the references need torch alone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on CPU tensors, for tests: Triton reads this variable when it is imported."""
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
TILE = 2048
"""Elements per program of the streaming kernels: 16 per thread with 4 warps."""
LANES = 128
"""Rows per program where groups lie across memory: neighbouring rows are read together."""
if INTERPRETED:  # it costs milliseconds per program, whatever the size
    TILE, LANES = TILE * 32, LANES * 32


class Rows(NamedTuple):
    """A tensor as rows along one axis, in place: element i of row r lies at

    ``(r // inner)·outer_stride + (r % inner)·inner_stride + i·stride``.
    """

    data: Tensor
    inner: int
    outer_stride: int
    inner_stride: int
    stride: int

    def reach(self, count: int, length: int) -> int:
        """Offset of the last element."""
        outer = count // self.inner
        return outer * self.outer_stride + self.inner * self.inner_stride + length * self.stride

    def gapless(self, count: int, length: int) -> bool:
        """Whether the rows follow each other in memory without gaps, in order."""
        outer = self.outer_stride == length * self.inner or count == self.inner
        inner = self.inner_stride == length or self.inner == 1
        return self.stride == 1 and outer and inner


def rows_of(x: Tensor, dim: int) -> Rows:
    """``x`` as rows along ``dim``; copies only what no strides of three axes describe."""
    dim %= x.dim()
    before, after = x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
    flat = x.reshape(before, x.shape[dim], after)
    outer, stride, inner = flat.stride()
    if before == 1:  # one stride from row to row: divisions by 1 vanish in the compiled kernel
        return Rows(flat, 1, inner, 0, stride)
    return Rows(flat, after, outer, inner, stride)


def over_elements(
    kernel: Any,
    pointers: Sequence[Tensor],
    count: int,
    *args: Any,
    tile: int = TILE,
    reach: int = 0,
    **options: Any,
) -> None:
    """Launch ``kernel`` on parts of ``range(count)``.

    The kernel takes ``pointers``, ``count``, ``args`` and the constants ``TILE``, ``WIDE`` (indices
    need 64 bits; the largest is ``count`` or ``reach``) and ``options``.
    """
    if not count:
        return
    with torch.cuda.device_of(pointers[0]):
        kernel[(triton.cdiv(count, tile),)](
            *pointers,
            count,
            *args,
            TILE=tile,
            WIDE=max(count, reach) >= 2**31 - tile,
            enable_fp_fusion=False,
            **options,
        )


def memory_order(x: Tensor) -> list[int]:
    """The axes of ``x``, largest stride first: in this order dense tensors are contiguous."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda axis: -strides[axis])


def empty_rows(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A result of the shape of ``x``, and its strides unless :func:`rows_of` would copy those."""
    out = torch.empty_like(x, dtype=dtype)
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
    numbered: bool = False,
    **options: Any,
) -> None:
    """Launch ``kernel`` on tiles of whole groups of ``m`` along ``dim``.

    The kernel takes the geometry of ``x``, that of ``out``, the number of rows and of groups per
    row, ``args`` (a :class:`Rows` as its five parts), and the constants ``ROWS``, ``GROUPS``
    (tile), ``CONTIGUOUS`` (the groups lie along memory), ``WIDE`` (offsets need 64 bits) and
    ``options``. ``numbered``: rows and groups keep their numbers, which the kernel uses. Elements
    beyond the last whole group of a row are left alone.
    """
    length = x.shape[dim]
    count = x.numel() // max(length, 1)
    if not x.numel() or length < m:
        return
    source, target = rows_of(x, dim), rows_of(out, dim)
    others = [arg for arg in args if isinstance(arg, Rows)]
    numbered |= bool(others)  # which need not be gapless
    contiguous = source.stride == 1 and target.stride == 1
    if not numbered and source.gapless(count, length) and target.gapless(count, length):
        # groups never straddle rows, so all of it is one row: no tile hangs over a row's end
        count, length = 1, x.numel()
        source, target = (Rows(rows.data, 1, length, 0, 1) for rows in (source, target))
    per_tile = TILE // triton.next_power_of_2(m)
    if contiguous:
        across = per_tile if count == 1 else min(per_tile, max(512 // triton.next_power_of_2(m), 1))
        groups = min(across, triton.next_power_of_2(length // m))
        rows = min(per_tile // groups, triton.next_power_of_2(count))
    else:
        rows = min(LANES, per_tile, triton.next_power_of_2(count))
        groups = min(per_tile // rows, triton.next_power_of_2(length // m))
    grid = (triton.cdiv(count, rows) * triton.cdiv(length // m, groups),)
    wide = max(t.reach(count, length) for t in (source, target, *others)) >= 2**31
    with torch.cuda.device_of(x):
        kernel[grid](
            *source,
            *target,
            count,
            length // m,
            *itertools.chain.from_iterable(a if isinstance(a, Rows) else (a,) for a in args),
            ROWS=rows,
            GROUPS=groups,
            CONTIGUOUS=contiguous,
            WIDE=wide,
            enable_fp_fusion=False,  # decisions are compared bit for bit with the reference
            **options,
        )


@triton.jit
def part_of(TILE: tl.constexpr, WIDE: tl.constexpr):
    """Element indices of this program in :func:`over_elements`."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    return program * TILE + tl.arange(0, TILE)


@triton.jit
def tile_of(count, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """(row indices, first group) of this program; groups vary fastest over programs."""
    per_row = tl.cdiv(groups, GROUPS)
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = (program // per_row) * ROWS + tl.arange(0, ROWS)
    first = (program % per_row) * GROUPS
    return row, first


@triton.jit
def row_starts(row, inner, outer_stride, inner_stride):
    """Offsets of the first elements of rows (see :class:`Rows`)."""
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def any_groups(row, first, count, groups, GROUPS: tl.constexpr, M: tl.constexpr):
    """Geometry of tiles (rows, groups, M rounded up to a power of two) of groups of any M.

    Returns the groups, which of them exist, the position in a group, the index of each element
    along the axis, and which elements exist.
    """
    group = first + tl.arange(0, GROUPS)
    inside = (row < count)[:, None] & (group < groups)[None, :]
    position = tl.arange(0, triton.next_power_of_2(M))[None, None, :]
    element = (group * M)[None, :, None] + position
    return group, inside, position, element, inside[:, :, None] & (position < M)


@triton.jit
def load_fours(
    data, starts, first, stride, rows_inside, groups, GROUPS: tl.constexpr, CONTIGUOUS: tl.constexpr
):
    """The four positions of groups ``first``… as fp32 tiles (rows, GROUPS); zeros outside.

    Groups along memory: one wide load, split in registers. Otherwise four loads along the rows.
    """
    if CONTIGUOUS:
        ROWS: tl.constexpr = starts.shape[0]
        place = first * 4 + tl.arange(0, GROUPS * 4)
        inside = rows_inside[:, None] & (place < tl.cast(groups, place.dtype) * 4)[None, :]
        tile = tl.load(data + starts[:, None] + place[None, :], inside, 0)
        even, odd = tl.split(tl.reshape(tile, (ROWS, GROUPS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        group = first + tl.arange(0, GROUPS)
        inside = rows_inside[:, None] & (group < groups)[None, :]
        place = data + starts[:, None] + (group * 4)[None, :] * stride
        x0 = tl.load(place, inside, 0)
        place += stride  # three times, for 3·stride may need 64 bits
        x1 = tl.load(place, inside, 0)
        place += stride
        x2 = tl.load(place, inside, 0)
        place += stride
        x3 = tl.load(place, inside, 0)
    return widen(x0), widen(x1), widen(x2), widen(x3)


@triton.jit
def store_fours(
    data, starts, first, stride, rows_inside, groups, x0, x1, x2, x3,
    GROUPS: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """Inverse of :func:`load_fours`; values already have the stored type."""
    if CONTIGUOUS:
        ROWS: tl.constexpr = starts.shape[0]
        tile = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (ROWS, GROUPS * 4))
        # join makes the new axis the fastest: (x0, x2) then (x1, x3) give 0, 1, 2, 3
        place = first * 4 + tl.arange(0, GROUPS * 4)
        inside = rows_inside[:, None] & (place < tl.cast(groups, place.dtype) * 4)[None, :]
        tl.store(data + starts[:, None] + place[None, :], tile, inside)
    else:
        group = first + tl.arange(0, GROUPS)
        inside = rows_inside[:, None] & (group < groups)[None, :]
        place = data + starts[:, None] + (group * 4)[None, :] * stride
        tl.store(place, x0, inside)
        place += stride
        tl.store(place, x1, inside)
        place += stride
        tl.store(place, x2, inside)
        place += stride
        tl.store(place, x3, inside)


@triton.jit
def widen(x):
    """``x`` as fp32. Triton's interpreter converts bf16 subnormals wrongly, hence the bits."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, data):
    """``x`` (fp32) rounded to nearest even in the type that ``data`` points to.

    Triton's interpreter truncates to bf16, hence the bits there.
    """
    dtype: tl.constexpr = data.dtype.element_ty
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x != x, bits | 0x400000, rounded) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
