"""Triton kernels of :mod:`sparsepretrain.kernels.soft`: threshold, scale and cast in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import (
    any_groups,
    empty_rows,
    load_fours,
    narrow,
    over_groups,
    row_starts,
    store_fours,
    tile_of,
    widen,
)
from sparsepretrain.kernels.triton.nm import kept_by_rank, magnitude_bits

_ALL: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)
_MOST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@torch.library.custom_op("sparsepretrain::soft_threshold", mutates_args=())
def soft_threshold(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``dtype(scale · S(x))``; see :func:`sparsepretrain.kernels.soft_threshold`."""
    out = empty_rows(x, dim, dtype)
    weights = (1.0 - gamma, gamma)
    constants = {"SCALED": scale is not None, "BETWEEN": gamma != 0.0}
    beta = x if scale is None else scale  # any pointer, where none is read
    if (n, m) == (2, 4):
        over_groups(_soft_24, m, dim, x, out, beta, *weights, **constants)
    else:
        over_groups(_soft_nm, m, dim, x, out, beta, *weights, N=n, M=m, **constants)
    return out


soft_threshold.register_fake(lambda x, n, m, gamma, dim, scale, dtype: empty_rows(x, dim, dtype))


@triton.jit
def _threshold(dropped, kept, near_dropped, near_kept, BETWEEN: tl.constexpr):
    """(1 - γ)·dropped + γ·kept, with the reference's care for infinities and rounding."""
    if BETWEEN:
        t = near_dropped * tl.minimum(dropped, _MOST, propagate_nan=_ALL)
        t += near_kept * tl.minimum(kept, _MOST, propagate_nan=_ALL)
        return tl.maximum(t, dropped, propagate_nan=_ALL)
    return dropped


@triton.jit
def _shrink(x, t):
    """sign(x)·(|x| - t) where |x| > t, else +0.0; NaN stays."""
    a = tl.abs(x)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    kept = ((a - t).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(a <= t, 0.0, kept)


@triton.jit
def _store_value(value, scale, data, SCALED: tl.constexpr):
    if SCALED:
        value = value * scale
    return narrow(value, data)


@triton.jit
def _soft_24(
    x, x_inner, x_outer_stride, x_inner_stride, x_stride,
    out, out_inner, out_outer_stride, out_inner_stride, out_stride,
    count, groups, scale, near_dropped, near_kept,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, CONTIGUOUS: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(count, groups, ROWS, GROUPS, WIDE)
    inside = row < count
    starts = row_starts(row, x_inner, x_outer_stride, x_inner_stride)
    x0, x1, x2, x3 = load_fours(x, starts, first, x_stride, inside, groups, GROUPS, CONTIGUOUS)
    # a 4-element sorting network without its outer comparators
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    low, high = _min(a0, a1), _max(a0, a1)
    low2, high2 = _min(a2, a3), _max(a2, a3)
    inner, outer = _max(low, low2), _min(high, high2)
    t = _threshold(_min(inner, outer), _max(inner, outer), near_dropped, near_kept, BETWEEN)
    beta = 1.0
    if SCALED:
        beta = tl.load(scale).to(tl.float32)
    y0 = _store_value(_shrink(x0, t), beta, out, SCALED)
    y1 = _store_value(_shrink(x1, t), beta, out, SCALED)
    y2 = _store_value(_shrink(x2, t), beta, out, SCALED)
    y3 = _store_value(_shrink(x3, t), beta, out, SCALED)
    starts = row_starts(row, out_inner, out_outer_stride, out_inner_stride)
    store_fours(
        out, starts, first, out_stride, inside, groups, y0, y1, y2, y3, GROUPS, CONTIGUOUS
    )  # fmt: skip


@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=_ALL)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=_ALL)


@triton.jit
def _soft_nm(
    x, x_inner, x_outer_stride, x_inner_stride, x_stride,
    out, out_inner, out_outer_stride, out_inner_stride, out_stride,
    count, groups, scale, near_dropped, near_kept,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, CONTIGUOUS: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, BETWEEN: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(count, groups, ROWS, GROUPS, WIDE)
    group, inside, position, element, filled = any_groups(row, first, count, groups, GROUPS, M)
    starts = row_starts(row, x_inner, x_outer_stride, x_inner_stride)
    values = widen(tl.load(x + starts[:, None, None] + element * x_stride, filled, 0))
    bits = magnitude_bits(values)
    keep = kept_by_rank(bits, x, starts, group, x_stride, inside, N, M, False)
    # largest dropped and smallest kept, compared as integers: NaN is above infinity
    dropped = tl.max(tl.where(keep | (position >= M), 0, bits), 2)[:, :, None]
    kept = tl.min(tl.where(keep, bits, 0x7FFFFFFF), 2)[:, :, None]
    nan = tl.max(bits, 2)[:, :, None] > 0x7F800000
    dropped = tl.where(nan, 0x7FC00000, dropped).to(tl.float32, bitcast=True)
    kept = tl.where(nan, 0x7FC00000, kept).to(tl.float32, bitcast=True)
    t = _threshold(dropped, kept, near_dropped, near_kept, BETWEEN)
    beta = 1.0
    if SCALED:
        beta = tl.load(scale).to(tl.float32)
    result = _store_value(_shrink(values, t), beta, out, SCALED)
    starts = row_starts(row, out_inner, out_outer_stride, out_inner_stride)
    tl.store(out + starts[:, None, None] + element * out_stride, result, filled)
