"""Triton kernels of :mod:`sparsepretrain.kernels.soft`: threshold, scale and cast in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import (
    can_pack_mask,
    empty_out,
    empty_packed_mask,
    launch_groups,
    operator,
)
from sparsepretrain.kernels.triton.nm import kept_by_rank, magnitude_bits
from sparsepretrain.kernels.triton.tiles import (
    group_indices,
    load_groups,
    load_groups4,
    maximum,
    minimum,
    program_tile,
    row_offsets,
    store_groups,
    store_groups4,
    store_packed_mask,
)

_MOST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@operator("soft_threshold", fake=lambda x, n, m, gamma, dim, scale, dtype: empty_out(x, dim, dtype))
def soft_threshold(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``dtype(scale · S(x))``; see :func:`sparsepretrain.kernels.soft_threshold`."""
    out = empty_out(x, dim, dtype)
    weights = (1.0 - gamma, gamma)
    constants: Any = {"SCALED": scale is not None, "BETWEEN": gamma != 0.0}
    beta = x if scale is None else scale  # any pointer, where none is read
    if (n, m) == (2, 4):
        launch_groups(_soft_24, m, dim, x, out, beta, beta, *weights, PACKED=False, **constants)
    else:
        launch_groups(_soft_nm, m, dim, x, out, beta, *weights, N=n, M=m, **constants)
    return out


def soft_prune(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`sparsepretrain.kernels.soft_prune`; the mask is packed where it can be."""
    if (n, m) != (2, 4) or not can_pack_mask(x, out):
        soft = soft_threshold(x, n, m, gamma, dim, scale, torch.float32)
        return out.copy_(soft), soft != 0
    code, whole = empty_packed_mask(x), x.shape[1] % 8 == 0
    constants: Any = {"SCALED": scale is not None, "BETWEEN": gamma != 0.0, "PACKED": True}
    pointers = x if scale is None else scale, code
    weights = (1.0 - gamma, gamma)
    launch_groups(
        _soft_24, m, dim, x, out, *pointers, *weights, uses_indices=not whole, **constants
    )
    torch.autograd.graph.increment_version(out)
    return out, code


@triton.jit
def _threshold(dropped, kept, near_dropped, near_kept, BETWEEN: tl.constexpr):
    """(1 - γ)·dropped + γ·kept, with the reference's care for infinities and rounding."""
    if BETWEEN:
        t = near_dropped * minimum(dropped, _MOST)
        t += near_kept * minimum(kept, _MOST)
        return maximum(t, dropped)
    return dropped


@triton.jit
def _shrink(x, t, scale, SCALED: tl.constexpr):
    """scale·sign(x)·(|x| - t) where |x| > t, else +0.0; NaN stays."""
    a = tl.abs(x)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    kept = ((a - t).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    result = tl.where(a <= t, 0.0, kept)
    return result * scale if SCALED else result


@triton.jit
def _soft_24(
    x, out, count, groups, scale, code, near_dropped, near_kept, TILE: tl.constexpr,
    SCALED: tl.constexpr, BETWEEN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row, first = program_tile(count, groups, TILE)
    x0, x1, x2, x3 = load_groups4(x, row_offsets(x, row), first, row < count, groups, TILE)
    # a 4-element sorting network without its outer comparators
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    low, high = minimum(a0, a1), maximum(a0, a1)
    low2, high2 = minimum(a2, a3), maximum(a2, a3)
    inner, outer = maximum(low, low2), minimum(high, high2)
    t = _threshold(minimum(inner, outer), maximum(inner, outer), near_dropped, near_kept, BETWEEN)
    beta = 1.0
    if SCALED:
        beta = tl.load(scale).to(tl.float32)
    y0, y1 = _shrink(x0, t, beta, SCALED), _shrink(x1, t, beta, SCALED)
    y2, y3 = _shrink(x2, t, beta, SCALED), _shrink(x3, t, beta, SCALED)
    if PACKED:
        keep = y0 != 0, y1 != 0, y2 != 0, y3 != 0
        store_packed_mask(code, row, first, count, groups, keep[0], keep[1], keep[2], keep[3], TILE)
    store_groups4(out, row_offsets(out, row), first, row < count, groups, y0, y1, y2, y3, TILE)


@triton.jit
def _soft_nm(
    x, out, count, groups, scale, near_dropped, near_kept, TILE: tl.constexpr,
    SCALED: tl.constexpr, BETWEEN: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    row, first = program_tile(count, groups, TILE)
    group, mask, position, element, filled = group_indices(row, first, count, groups, TILE, M)
    values = load_groups(x, row, element, filled)
    bits = magnitude_bits(values)
    keep = kept_by_rank(bits, x, row, group, mask, N, M, False)
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
    store_groups(out, row, element, filled, _shrink(values, t, beta, SCALED))
