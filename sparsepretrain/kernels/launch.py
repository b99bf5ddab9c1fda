"""What every Triton kernel shares: strided rows, tiles of groups, rounding, launching.

Imported only where a Triton kernel runs; the references need torch alone.
"""

from __future__ import annotations

import itertools
import os
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
"""Rows per program where the groups lie across memory: neighbouring rows are read together."""
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


def rows_of(x: Tensor, dim: int) -> Rows:
    """``x`` as rows along ``dim``; copies only what no strides of three axes describe."""
    dim %= x.dim()
    before, after = x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
    flat = x.reshape(before, x.shape[dim], after)
    outer, stride, inner = flat.stride()
    if before == 1:  # one row stride: the division by 1 vanishes when the kernel is compiled
        return Rows(flat, 1, inner, 0, stride)
    return Rows(flat, after, outer, inner, stride)


def over_groups(
    kernel: Any, m: int, dim: int, x: Tensor, out: Tensor, *args: Any, **options: Any
) -> None:
    """Launch ``kernel`` on tiles of whole groups of ``m`` along ``dim``.

    The kernel takes the geometry of ``x``, that of ``out``, the number of rows and of groups per
    row, ``args`` (a :class:`Rows` as its five parts), and the constants ``ROWS``, ``GROUPS``
    (tile), ``CONTIGUOUS`` (the groups lie along memory), ``WIDE`` (offsets need 64 bits) and
    ``options``. Elements beyond the last whole group are left alone.
    """
    length = x.shape[dim]
    count = x.numel() // max(length, 1)
    if not x.numel() or length < m:
        return
    source, target = rows_of(x, dim), rows_of(out, dim)
    contiguous = source.stride == 1 and target.stride == 1
    per_tile = TILE // triton.next_power_of_2(m)
    if contiguous:
        groups = min(max(512 // m, 1), per_tile, triton.next_power_of_2(length // m))
        rows = min(per_tile // groups, triton.next_power_of_2(count))
    else:
        rows = min(LANES, per_tile, triton.next_power_of_2(count))
        groups = min(per_tile // rows, triton.next_power_of_2(length // m))
    grid = (triton.cdiv(count, rows) * triton.cdiv(length // m, groups),)
    tensors = [source, target, *(arg for arg in args if isinstance(arg, Rows))]
    wide = max(tensor.reach(count, length) for tensor in tensors) >= 2**31
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
    if target.data.data_ptr() != out.data_ptr():  # no three strides describe it
        out.copy_(target.data.view(out.shape))


@triton.jit
def tile_of(count, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """(row indices, group indices) of this program; groups vary fastest over programs."""
    per_row = tl.cdiv(groups, GROUPS)
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = (program // per_row) * ROWS + tl.arange(0, ROWS)
    group = (program % per_row) * GROUPS + tl.arange(0, GROUPS)
    return row, group


@triton.jit
def row_starts(row, inner, outer_stride, inner_stride):
    """Offsets of the first elements of rows (see :class:`Rows`)."""
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def load_fours(data, starts, group, stride, rows_inside, groups, CONTIGUOUS: tl.constexpr):
    """The four positions of each group as fp32 tiles (rows, groups); zeros outside.

    Groups along memory: one wide load, split in registers. Otherwise four loads along the rows.
    """
    if CONTIGUOUS:
        R: tl.constexpr = starts.shape[0]
        G: tl.constexpr = group.shape[0]
        place = tl.min(group, 0) * 4 + tl.arange(0, G * 4)
        inside = rows_inside[:, None] & (place < groups * 4)[None, :]
        tile = tl.load(data + starts[:, None] + place[None, :], inside, 0)
        even, odd = tl.split(tl.reshape(tile, (R, G, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        inside = rows_inside[:, None] & (group < groups)[None, :]
        first = data + starts[:, None] + (group * 4)[None, :] * stride
        x0 = tl.load(first, inside, 0)
        x1 = tl.load(first + stride, inside, 0)
        x2 = tl.load(first + 2 * stride, inside, 0)
        x3 = tl.load(first + 3 * stride, inside, 0)
    return widen(x0), widen(x1), widen(x2), widen(x3)


@triton.jit
def store_fours(
    data, starts, group, stride, rows_inside, groups, x0, x1, x2, x3, CONTIGUOUS: tl.constexpr
):
    """Inverse of :func:`load_fours`; values already have the stored type."""
    if CONTIGUOUS:
        R: tl.constexpr = starts.shape[0]
        G: tl.constexpr = group.shape[0]
        tile = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (R, G * 4))
        # join makes the new axis the fastest: (x0, x2) then (x1, x3) give 0, 1, 2, 3
        place = tl.min(group, 0) * 4 + tl.arange(0, G * 4)
        inside = rows_inside[:, None] & (place < groups * 4)[None, :]
        tl.store(data + starts[:, None] + place[None, :], tile, inside)
    else:
        inside = rows_inside[:, None] & (group < groups)[None, :]
        first = data + starts[:, None] + (group * 4)[None, :] * stride
        tl.store(first, x0, inside)
        tl.store(first + stride, x1, inside)
        tl.store(first + 2 * stride, x2, inside)
        tl.store(first + 3 * stride, x3, inside)


@triton.jit
def widen(x):
    """``x`` as fp32. Triton's interpreter converts bf16 subnormals wrongly, hence the integers."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, data):
    """``x`` (fp32) rounded to nearest even in the type that ``data`` points to.

    Triton's interpreter truncates to bf16, hence the integers there.
    """
    dtype: tl.constexpr = data.dtype.element_ty
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x != x, bits | 0x400000, rounded) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
