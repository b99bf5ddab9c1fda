"""Helpers of the Triton kernels: offsets, loads and stores of groups, packed masks, casts."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsepretrain.kernels.triton.launch import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def widen(x):
    """Cast to fp32; by bits in Triton's interpreter, which converts bf16 subnormals wrongly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, ptr):
    """Round ``x`` to nearest even in the element type of ``ptr``.

    By bits in Triton's interpreter, which truncates to bf16.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x != x, bits | 0x400000, rounded) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def minimum(a, b):
    """Elementwise minimum; propagates NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """Elementwise maximum; propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_offsets(BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Element offsets of this program; see :func:`launch_elements`."""
    pid = tl.program_id(0)
    if INT64_OFFSETS:
        pid = pid.to(tl.int64)
    return pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)


@triton.jit
def program_tile(n_rows, n_groups, TILE: tl.constexpr):
    """Return the (row indices, index of the first group) of this program."""
    tiles_per_row = tl.cdiv(n_groups, TILE.GROUPS)
    pid = tl.program_id(0)
    if TILE.INT64_OFFSETS:
        pid = pid.to(tl.int64)
    row = (pid // tiles_per_row) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    start = (pid % tiles_per_row) * TILE.GROUPS
    return row, start


@triton.jit
def row_offsets(x, row):
    """Offsets of the first element of each row; see :class:`StridedRows`."""
    return (row // x.inner) * x.outer_stride + (row % x.inner) * x.inner_stride


@triton.jit
def element_offsets(x, row, element):
    """Offsets of a (rows, elements) tile."""
    return row_offsets(x, row)[:, None] + (element * x.stride)[None, :]


@triton.jit
def group_indices(row, start, n_rows, n_groups, TILE: tl.constexpr, M: tl.constexpr):
    """Index a (rows, groups, M rounded up to a power of two) tile of groups of any M.

    Returns the group indices, their mask, positions in a group, element indices along the row,
    and the mask of elements.
    """
    group = start + tl.arange(0, TILE.GROUPS)
    group_mask = (row < n_rows)[:, None] & (group < n_groups)[None, :]
    pos = tl.arange(0, triton.next_power_of_2(M))[None, None, :]
    element = (group * M)[None, :, None] + pos
    return group, group_mask, pos, element, group_mask[:, :, None] & (pos < M)


@triton.jit
def load_groups(x, row, element, mask):
    """Load a tile of :func:`group_indices` as fp32, zeros outside ``mask``."""
    return widen(tl.load(x.ptr + row_offsets(x, row)[:, None, None] + element * x.stride, mask, 0))


@triton.jit
def store_groups(x, row, element, mask, values):
    """Round a tile of :func:`group_indices` to the type of ``x`` and store it."""
    offsets = row_offsets(x, row)[:, None, None] + element * x.stride
    tl.store(x.ptr + offsets, narrow(values, x.ptr), mask)


@triton.jit
def load_groups4(x, row_start, start, row_mask, n_groups, TILE: tl.constexpr):
    """Load the four positions of groups as four fp32 (rows, groups) tiles, zeros out of bounds.

    ``row_start`` holds the offsets of the rows. Contiguous groups take one vectorized load that is
    split in registers, strided groups four loads that coalesce over rows.
    """
    if TILE.CONTIGUOUS:
        offsets = start * 4 + tl.arange(0, TILE.GROUPS * 4)
        mask = row_mask[:, None] & (offsets < tl.cast(n_groups, offsets.dtype) * 4)[None, :]
        tile = tl.load(x.ptr + row_start[:, None] + offsets[None, :], mask, 0)
        even, odd = tl.split(tl.reshape(tile, (TILE.ROWS, TILE.GROUPS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        group = start + tl.arange(0, TILE.GROUPS)
        mask = row_mask[:, None] & (group < n_groups)[None, :]
        ptrs = x.ptr + row_start[:, None] + (group * 4)[None, :] * x.stride
        x0 = tl.load(ptrs, mask, 0)
        ptrs += x.stride  # added three times: 3·stride may need 64 bits
        x1 = tl.load(ptrs, mask, 0)
        ptrs += x.stride
        x2 = tl.load(ptrs, mask, 0)
        ptrs += x.stride
        x3 = tl.load(ptrs, mask, 0)
    return widen(x0), widen(x1), widen(x2), widen(x3)


@triton.jit
def store_groups4(x, row_start, start, row_mask, n_groups, x0, x1, x2, x3, TILE: tl.constexpr):
    """Round the tiles of :func:`load_groups4` to the type of ``x`` and store them."""
    x0, x1, x2, x3 = narrow(x0, x.ptr), narrow(x1, x.ptr), narrow(x2, x.ptr), narrow(x3, x.ptr)
    if TILE.CONTIGUOUS or TILE.OUT_CONTIGUOUS:
        # join makes the new axis the fastest: (x0, x2) then (x1, x3) give 0, 1, 2, 3
        tile = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (TILE.ROWS, TILE.GROUPS * 4))
        offsets = start * 4 + tl.arange(0, TILE.GROUPS * 4)
        mask = row_mask[:, None] & (offsets < tl.cast(n_groups, offsets.dtype) * 4)[None, :]
        tl.store(x.ptr + row_start[:, None] + offsets[None, :], tile, mask)
    else:
        group = start + tl.arange(0, TILE.GROUPS)
        mask = row_mask[:, None] & (group < n_groups)[None, :]
        ptrs = x.ptr + row_start[:, None] + (group * 4)[None, :] * x.stride
        tl.store(ptrs, x0, mask)
        ptrs += x.stride
        tl.store(ptrs, x1, mask)
        ptrs += x.stride
        tl.store(ptrs, x2, mask)
        ptrs += x.stride
        tl.store(ptrs, x3, mask)


@triton.jit
def store_packed_mask(
    code_ptr, row, start, n_rows, n_groups, keep0, keep1, keep2, keep3, TILE: tl.constexpr
):  # fmt: skip
    """Pack four (rows, groups) masks into bits, eight neighbors in memory per byte.

    With contiguous groups a byte holds two groups. With strided groups ``row`` indexes columns,
    and a byte holds one position of eight neighboring columns.
    """
    group = start + tl.arange(0, TILE.GROUPS)
    mask = (row < n_rows)[:, None] & (group < n_groups)[None, :]
    if TILE.CONTIGUOUS:
        nibble = keep0.to(tl.int32) | (keep1.to(tl.int32) << 1)
        nibble |= (keep2.to(tl.int32) << 2) | (keep3.to(tl.int32) << 3)
        nibble = tl.where(mask, nibble, 0)
        low, high = tl.split(tl.reshape(nibble, (TILE.ROWS, TILE.GROUPS // 2, 2)))
        byte = start // 2 + tl.arange(0, TILE.GROUPS // 2)
        ptrs = code_ptr + row[:, None] * ((n_groups + 1) // 2) + byte[None, :]
        byte_mask = (row < n_rows)[:, None] & (byte * 2 < n_groups)[None, :]
        tl.store(ptrs, (low | (high << 4)).to(tl.uint8), byte_mask)
    else:
        # min over eight equal values: Triton cannot index a tensor
        byte = tl.min(tl.reshape(row // 8, (TILE.ROWS // 8, 8)), 1)
        row_bytes = (n_rows + 7) // 8
        bit = (row % 8).to(tl.int32)[:, None]
        byte_mask = (byte < row_bytes)[:, None] & (group < n_groups)[None, :]
        ptrs = code_ptr + (group * 4 * row_bytes)[None, :] + byte[:, None]
        for k in tl.static_range(4):
            keep = keep0 if k == 0 else (keep1 if k == 1 else (keep2 if k == 2 else keep3))
            bits = tl.where(mask, keep.to(tl.int32), 0) << bit
            packed = tl.sum(tl.reshape(bits, (TILE.ROWS // 8, 8, TILE.GROUPS)), 1)
            tl.store(ptrs + k * row_bytes, packed.to(tl.uint8), byte_mask)
