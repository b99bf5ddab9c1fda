"""What every Triton kernel shares: strided rows, tiles of groups, rounding, launching.

Imported only where a Triton kernel runs; the references need torch alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import packed_shape

P = ParamSpec("P")
T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on CPU tensors, for tests: Triton reads this variable when it is imported."""
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
BLOCK = 2048
"""Elements per program of the streaming kernels: 16 per thread with 4 warps."""
LANES = 128
"""Rows per program where groups lie across memory: neighbouring rows are read together."""
if INTERPRETED:  # it costs milliseconds per program, whatever the size
    BLOCK, LANES = BLOCK * 32, LANES * 32


class Tile(NamedTuple):
    """What one program of a kernel over groups works on; known when it is compiled."""

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
    """Of several axes taken as one; None: they are not."""
    axes = [axis for axis in zip(shape, stride, strict=True) if axis[0] != 1]
    if any(outer != n * inner for (_, outer), (n, inner) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 1


class Tiling(NamedTuple):
    """What a launch over groups comes to."""

    rows: int
    groups: int
    """Per row."""
    tile: Tile
    programs: int
    joined: Strides | None
    """Of all rows as one, where they follow each other in memory."""


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
    """Whether the rows follow each other in memory without gaps, in order."""
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


@triton.jit
def block_offsets(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets of this program in :func:`over_elements`."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    return program * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def tile_of(count, groups, TILE: tl.constexpr):
    """(rows, first group) of this program; groups vary fastest over programs."""
    per_row = tl.cdiv(groups, TILE.GROUPS)
    program = tl.program_id(0)
    if TILE.WIDE:
        program = program.to(tl.int64)
    row = (program // per_row) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    first = (program % per_row) * TILE.GROUPS
    return row, first


@triton.jit
def starts_of(x, row):
    """Offsets of the first elements of rows (see :class:`Rows`)."""
    return (row // x.inner) * x.outer_stride + (row % x.inner) * x.inner_stride


@triton.jit
def element_offsets(x, row, element):
    """Offsets of elements of rows, each a vector, as a tile."""
    return starts_of(x, row)[:, None] + (element * x.stride)[None, :]


@triton.jit
def any_groups(row, first, count, groups, TILE: tl.constexpr, M: tl.constexpr):
    """Geometry of tiles (rows, groups, M rounded up to a power of two) of groups of any M.

    Returns the groups, which of them exist, the position in a group, the index of each element
    along the axis, and which elements exist.
    """
    group = first + tl.arange(0, TILE.GROUPS)
    mask = (row < count)[:, None] & (group < groups)[None, :]
    position = tl.arange(0, triton.next_power_of_2(M))[None, None, :]
    element = (group * M)[None, :, None] + position
    return group, mask, position, element, mask[:, :, None] & (position < M)


@triton.jit
def load_groups(x, row, element, mask):
    """The elements that exist in tiles of :func:`any_groups`, as fp32."""
    return widen(tl.load(x.data + starts_of(x, row)[:, None, None] + element * x.stride, mask, 0))


@triton.jit
def store_groups(x, row, element, mask, values):
    """Inverse of :func:`load_groups`; rounds to the stored type."""
    offsets = starts_of(x, row)[:, None, None] + element * x.stride
    tl.store(x.data + offsets, narrow(values, x.data), mask)


@triton.jit
def load_fours(x, starts, first, rows_mask, groups, TILE: tl.constexpr):
    """The four positions of groups ``first``… as fp32 tiles (rows, groups); zeros outside.

    ``starts``: offsets of the rows. Groups along memory: one wide load, split in registers.
    Otherwise four loads along the rows.
    """
    if TILE.CONTIGUOUS:
        offsets = first * 4 + tl.arange(0, TILE.GROUPS * 4)
        mask = rows_mask[:, None] & (offsets < tl.cast(groups, offsets.dtype) * 4)[None, :]
        tile = tl.load(x.data + starts[:, None] + offsets[None, :], mask, 0)
        even, odd = tl.split(tl.reshape(tile, (TILE.ROWS, TILE.GROUPS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        group = first + tl.arange(0, TILE.GROUPS)
        mask = rows_mask[:, None] & (group < groups)[None, :]
        pointers = x.data + starts[:, None] + (group * 4)[None, :] * x.stride
        x0 = tl.load(pointers, mask, 0)
        pointers += x.stride  # three times, for 3·stride may need 64 bits
        x1 = tl.load(pointers, mask, 0)
        pointers += x.stride
        x2 = tl.load(pointers, mask, 0)
        pointers += x.stride
        x3 = tl.load(pointers, mask, 0)
    return widen(x0), widen(x1), widen(x2), widen(x3)


@triton.jit
def store_fours(x, starts, first, rows_mask, groups, x0, x1, x2, x3, TILE: tl.constexpr):
    """Inverse of :func:`load_fours`; rounds to the stored type."""
    x0, x1, x2, x3 = narrow(x0, x.data), narrow(x1, x.data), narrow(x2, x.data), narrow(x3, x.data)
    if TILE.CONTIGUOUS or TILE.TURNED:
        # join makes the new axis the fastest: (x0, x2) then (x1, x3) give 0, 1, 2, 3
        tile = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (TILE.ROWS, TILE.GROUPS * 4))
        offsets = first * 4 + tl.arange(0, TILE.GROUPS * 4)
        mask = rows_mask[:, None] & (offsets < tl.cast(groups, offsets.dtype) * 4)[None, :]
        tl.store(x.data + starts[:, None] + offsets[None, :], tile, mask)
    else:
        group = first + tl.arange(0, TILE.GROUPS)
        mask = rows_mask[:, None] & (group < groups)[None, :]
        pointers = x.data + starts[:, None] + (group * 4)[None, :] * x.stride
        tl.store(pointers, x0, mask)
        pointers += x.stride
        tl.store(pointers, x1, mask)
        pointers += x.stride
        tl.store(pointers, x2, mask)
        pointers += x.stride
        tl.store(pointers, x3, mask)


def packs(x: Tensor, out: Tensor) -> bool:
    """Whether :func:`store_code` can pack what a kernel over fours of ``x`` keeps."""
    matrices = x.dim() == 2 and x.is_contiguous() and out.is_contiguous()
    return matrices and x.shape[1] >= 8 and x.numel() > 0


def packed_rows(x: Tensor) -> Tensor:
    """Room for a mask of ``x`` packed by rows (:func:`sparsepretrain.kernels.pack_rows`)."""
    return torch.empty(packed_shape(x.shape), dtype=torch.uint8, device=x.device)


@triton.jit
def store_code(
    code, row, first, count, groups, keep0, keep1, keep2, keep3, TILE: tl.constexpr
):  # fmt: skip
    """Flags (rows, groups) of fours in bits, eight of a row of memory to a byte.

    Groups along memory: two groups are a byte. Otherwise (``row`` counts columns) eight
    neighbouring columns are, for each of the four.
    """
    group = first + tl.arange(0, TILE.GROUPS)
    mask = (row < count)[:, None] & (group < groups)[None, :]
    if TILE.CONTIGUOUS:
        nibble = keep0.to(tl.int32) | (keep1.to(tl.int32) << 1)
        nibble |= (keep2.to(tl.int32) << 2) | (keep3.to(tl.int32) << 3)
        nibble = tl.where(mask, nibble, 0)
        low, high = tl.split(tl.reshape(nibble, (TILE.ROWS, TILE.GROUPS // 2, 2)))
        place = first // 2 + tl.arange(0, TILE.GROUPS // 2)
        pointers = code + row[:, None] * ((groups + 1) // 2) + place[None, :]
        exists = (row < count)[:, None] & (place * 2 < groups)[None, :]
        tl.store(pointers, (low | (high << 4)).to(tl.uint8), exists)
    else:
        octet = tl.min(tl.reshape(row // 8, (TILE.ROWS // 8, 8)), 1)
        width = (count + 7) // 8
        bit = (row % 8).to(tl.int32)[:, None]
        exists = (octet < width)[:, None] & (group < groups)[None, :]
        pointers = code + (group * 4 * width)[None, :] + octet[:, None]
        for k in tl.static_range(4):
            keep = keep0 if k == 0 else (keep1 if k == 1 else (keep2 if k == 2 else keep3))
            bits = tl.where(mask, keep.to(tl.int32), 0) << bit
            byte = tl.sum(tl.reshape(bits, (TILE.ROWS // 8, 8, TILE.GROUPS)), 1)
            tl.store(pointers + k * width, byte.to(tl.uint8), exists)


@triton.jit
def widen(x):
    """``x`` as fp32. Triton's interpreter converts bf16 subnormals wrongly, hence the bits."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, data):
    """``x`` rounded to nearest even in the type that ``data`` points to.

    Triton's interpreter truncates to bf16, hence the bits there.
    """
    dtype: tl.constexpr = data.dtype.element_ty
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x != x, bits | 0x400000, rounded) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def minimum(a, b):
    """The smaller one; NaN spreads."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """The larger one; NaN spreads."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
