"""Offsets of tiles, loading and storing of groups, bits and rounding in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsepretrain.kernels.triton.launch import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


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


@triton.jit
def store_code(
    code, row, first, count, groups, keep0, keep1, keep2, keep3, TILE: tl.constexpr
):  # fmt: skip
    """Flags (rows, groups) of fours in bits, eight of a row of memory to a byte.

    Groups along memory: two groups are a byte. Otherwise (``row`` counts columns) eight
    neighboring columns are, for each of the four.
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
