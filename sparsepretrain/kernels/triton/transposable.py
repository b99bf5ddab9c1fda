"""Triton kernel of :mod:`sparsepretrain.kernels.transposable`: the search stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import PAIRS
from sparsepretrain.kernels.triton.launch import INTERPRETED, StridedRows, Tile, operator
from sparsepretrain.kernels.triton.tiles import load_groups4, program_tile

_PAIR_BITS: tl.constexpr = tl.constexpr(
    sum(1 << 4 * i + column for i, pair in enumerate(PAIRS) for column in pair)
)
"""Columns of every pair in PAIRS, four bits each."""
_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_TILE_SHAPE = (16, 128) if INTERPRETED else (4, 32)
"""Rows and columns of 4×4 blocks per program: one block per thread with 4 warps."""


@triton.jit
def _clamped_abs(x):
    """Return |x| clamped to the largest finite number; NaN becomes that number too."""
    return tl.minimum(tl.abs(x), _FP32_MAX)  # tl.minimum drops NaN


@triton.jit
def _pair_sums(a, b, c, d):
    """Return a row's kept magnitude for each of the six PAIRS."""
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def _add_each(v, row):
    return v + row[0], v + row[1], v + row[2], v + row[3], v + row[4], v + row[5]


@triton.jit
def _half_sums(a, b):
    """Return the kept magnitude of two rows for all 36 choices of pairs."""
    return (
        _add_each(a[0], b), _add_each(a[1], b), _add_each(a[2], b),
        _add_each(a[3], b), _add_each(a[4], b), _add_each(a[5], b),
    )  # fmt: skip


@triton.jit
def _max4(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _max6(v):
    return tl.maximum(
        tl.maximum(tl.maximum(v[0], v[1]), v[2]), tl.maximum(tl.maximum(v[3], v[4]), v[5])
    )


@triton.jit
def _total(upper, lower, opposite, X: tl.constexpr, Y: tl.constexpr):
    """Return the best sum of a block whose upper rows keep the pairs X and Y.

    Pair 5 - X is the complement of X. The lower rows keep 5 - X and 5 - Y, in either order; if X
    and Y are complements, any two complements: 36 choices of 19 kinds, 90 in all.
    """
    if X + Y == 5:
        return upper[X][Y] + opposite
    elif X < Y:
        return upper[X][Y] + tl.maximum(lower[5 - Y][5 - X], lower[5 - X][5 - Y])
    else:
        return upper[X][Y] + tl.maximum(lower[5 - X][5 - Y], lower[5 - Y][5 - X])


@triton.jit
def _totals(upper, lower, opposite, X: tl.constexpr):
    return (
        _total(upper, lower, opposite, X, 0), _total(upper, lower, opposite, X, 1),
        _total(upper, lower, opposite, X, 2), _total(upper, lower, opposite, X, 3),
        _total(upper, lower, opposite, X, 4), _total(upper, lower, opposite, X, 5),
    )  # fmt: skip


@triton.jit
def _argmax6(values, best):
    """Return the index of the first of six values that equals ``best``."""
    index = tl.where(values[4] == best, 4, 5)
    index = tl.where(values[3] == best, 3, index)
    index = tl.where(values[2] == best, 2, index)
    index = tl.where(values[1] == best, 1, index)
    return tl.where(values[0] == best, 0, index)


@triton.jit
def _select(index, v):
    """Return the value at ``index``."""
    odd, middle = (index & 1) != 0, (index & 2) != 0
    low = tl.where(middle, tl.where(odd, v[3], v[2]), tl.where(odd, v[1], v[0]))
    return tl.where(index >= 4, tl.where(odd, v[5], v[4]), low)


@triton.jit
def _to_bytes(bits):
    """Spread four bits over four bytes."""
    return (bits * 0x204081) & 0x01010101


@triton.jit
def _pair_bits(pair):
    """Return the kept columns of a pair as four bits."""
    return (tl.full([], _PAIR_BITS, tl.int32) >> (4 * pair)) & 15


@triton.jit
def _transposable_mask_kernel(w, out, n_rows, n_cols, TILE: tl.constexpr, BY_COLUMNS: tl.constexpr):
    row, start = program_tile(n_rows, n_cols, TILE)
    row_mask = row < n_rows
    row_start = row * 4 * w.outer_stride
    a0, a1, a2, a3 = load_groups4(w, row_start, start, row_mask, n_cols, TILE)
    row_start += w.outer_stride
    b0, b1, b2, b3 = load_groups4(w, row_start, start, row_mask, n_cols, TILE)
    row_start += w.outer_stride
    c0, c1, c2, c3 = load_groups4(w, row_start, start, row_mask, n_cols, TILE)
    row_start += w.outer_stride
    d0, d1, d2, d3 = load_groups4(w, row_start, start, row_mask, n_cols, TILE)
    a0, a1, a2, a3 = _clamped_abs(a0), _clamped_abs(a1), _clamped_abs(a2), _clamped_abs(a3)
    b0, b1, b2, b3 = _clamped_abs(b0), _clamped_abs(b1), _clamped_abs(b2), _clamped_abs(b3)
    c0, c1, c2, c3 = _clamped_abs(c0), _clamped_abs(c1), _clamped_abs(c2), _clamped_abs(c3)
    d0, d1, d2, d3 = _clamped_abs(d0), _clamped_abs(d1), _clamped_abs(d2), _clamped_abs(d3)
    # a sum of eight large numbers overflows: scale such fp32 blocks by 1/16, and all 16-bit
    # blocks, where scaling is exact
    s = 0.0625
    if w.ptr.dtype.element_ty == tl.float32:
        ab = tl.maximum(_max4(a0, a1, a2, a3), _max4(b0, b1, b2, b3))
        cd = tl.maximum(_max4(c0, c1, c2, c3), _max4(d0, d1, d2, d3))
        s = tl.where(tl.maximum(ab, cd) > _FP32_MAX / 16, 0.0625, 1.0)
    a0, a1, a2, a3 = a0 * s, a1 * s, a2 * s, a3 * s
    b0, b1, b2, b3 = b0 * s, b1 * s, b2 * s, b3 * s
    c0, c1, c2, c3 = c0 * s, c1 * s, c2 * s, c3 * s
    d0, d1, d2, d3 = d0 * s, d1 * s, d2 * s, d3 * s
    if BY_COLUMNS:
        row0, row1 = _pair_sums(a0, b0, c0, d0), _pair_sums(a1, b1, c1, d1)
        row2, row3 = _pair_sums(a2, b2, c2, d2), _pair_sums(a3, b3, c3, d3)
    else:
        row0, row1 = _pair_sums(a0, a1, a2, a3), _pair_sums(b0, b1, b2, b3)
        row2, row3 = _pair_sums(c0, c1, c2, c3), _pair_sums(d0, d1, d2, d3)
    upper, lower = _half_sums(row0, row1), _half_sums(row2, row3)
    # rounding is monotonic, so the best sum is among the best sums of each kind
    opposites = (lower[0][5], lower[1][4], lower[2][3], lower[3][2], lower[4][1], lower[5][0])
    most = _max6(opposites)
    t0, t1 = _totals(upper, lower, most, 0), _totals(upper, lower, most, 1)
    t2, t3 = _totals(upper, lower, most, 2), _totals(upper, lower, most, 3)
    t4, t5 = _totals(upper, lower, most, 4), _totals(upper, lower, most, 5)
    first = (_max6(t0), _max6(t1), _max6(t2), _max6(t3), _max6(t4), _max6(t5))
    best = _max6(first)
    # ties go to the first pattern, row by row; sums tie after rounding, as in the reference
    x = _argmax6(first, best)
    y = _argmax6(
        (
            _select(x, (t0[0], t1[0], t2[0], t3[0], t4[0], t5[0])),
            _select(x, (t0[1], t1[1], t2[1], t3[1], t4[1], t5[1])),
            _select(x, (t0[2], t1[2], t2[2], t3[2], t4[2], t5[2])),
            _select(x, (t0[3], t1[3], t2[3], t3[3], t4[3], t5[3])),
            _select(x, (t0[4], t1[4], t2[4], t3[4], t4[4], t5[4])),
            _select(x, (t0[5], t1[5], t2[5], t3[5], t4[5], t5[5])),
        ),
        best,
    )
    half = _select(x, row0) + _select(y, row1)
    small, large = 5 - tl.maximum(x, y), 5 - tl.minimum(x, y)
    in_order = half + (_select(small, row2) + _select(large, row3)) == best
    opposite = _argmax6(_add_each(half, opposites), best)
    z = tl.where(x + y == 5, opposite, tl.where(in_order, small, large))
    last = tl.where(x + y == 5, 5, small + large) - z
    k0, k1, k2, k3 = _pair_bits(x), _pair_bits(y), _pair_bits(z), _pair_bits(last)
    if BY_COLUMNS:  # the memory axis holds columns: transpose the bits
        f = _to_bytes(k0) | (_to_bytes(k1) << 1) | (_to_bytes(k2) << 2) | (_to_bytes(k3) << 3)
        k0, k1, k2, k3 = f & 15, (f >> 8) & 15, (f >> 16) & 15, f >> 24
    offsets = (row * 4 * out.outer_stride)[:, None] + (start + tl.arange(0, TILE.GROUPS))[None, :]
    mask = row_mask[:, None] & ((start + tl.arange(0, TILE.GROUPS)) < n_cols)[None, :]
    tl.store(out.ptr + offsets, _to_bytes(k0), mask)
    tl.store(out.ptr + offsets + out.outer_stride, _to_bytes(k1), mask)
    tl.store(out.ptr + offsets + 2 * out.outer_stride, _to_bytes(k2), mask)
    tl.store(out.ptr + offsets + 3 * out.outer_stride, _to_bytes(k3), mask)


@operator("transposable_mask", fake=lambda w: torch.empty_like(w, dtype=torch.bool))
def transposable_mask(w: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.transposable_mask`."""
    mask = torch.empty_like(w, dtype=torch.bool)
    if not w.numel():
        return mask
    # the 90 patterns are closed under transposition, but their order is not: BY_COLUMNS tells the
    # kernel which axis is contiguous
    by_columns = mask.stride(0) < mask.stride(1)
    source, target = (w.t(), mask.t()) if by_columns else (w, mask)
    target = target.view(torch.int32)  # four entries of a row in one word
    n_rows, n_cols = source.shape[0] // 4, source.shape[1] // 4
    grid = (-(-n_rows // _TILE_SHAPE[0]) * -(-n_cols // _TILE_SHAPE[1]),)
    max_offset = max(
        sum(n * abs(s) for n, s in zip(t.shape, t.stride(), strict=True)) for t in (source, mask)
    )
    rows, out = (StridedRows(t, 1, t.stride(0), 0, t.stride(1)) for t in (source, target))
    tile = Tile(*_TILE_SHAPE, rows.stride == 1, max_offset >= 2**31)
    with torch.cuda.device_of(w):
        _transposable_mask_kernel[grid](
            rows, out, n_rows, n_cols, TILE=tile, BY_COLUMNS=by_columns, enable_fp_fusion=False
        )
    return mask
