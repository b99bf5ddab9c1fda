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
from sparsepretrain.kernels.triton.nm import magnitude_bits, top_n_mask
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

_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _threshold(dropped, kept, w_dropped, w_kept, INTERPOLATE: tl.constexpr):
    """Return (1 - γ)·dropped + γ·kept; infinities and rounding are handled as in the reference."""
    if INTERPOLATE:
        t = w_dropped * minimum(dropped, _FP32_MAX)
        t += w_kept * minimum(kept, _FP32_MAX)
        return maximum(t, dropped)
    return dropped


@triton.jit
def _shrink(x, t, scale, HAS_SCALE: tl.constexpr):
    """Return scale·sign(x)·(|x| - t) where |x| > t, else +0.0; propagates NaN."""
    magnitude = tl.abs(x)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    shrunk = ((magnitude - t).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    result = tl.where(magnitude <= t, 0.0, shrunk)
    return result * scale if HAS_SCALE else result


@triton.jit
def _soft_24_kernel(
    x, out, n_rows, n_groups, scale_ptr, code_ptr, w_dropped, w_kept, TILE: tl.constexpr,
    HAS_SCALE: tl.constexpr, INTERPOLATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    x0, x1, x2, x3 = load_groups4(x, row_offsets(x, row), start, row < n_rows, n_groups, TILE)
    # a 4-element sorting network without its outer comparators
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    low, high = minimum(a0, a1), maximum(a0, a1)
    low2, high2 = minimum(a2, a3), maximum(a2, a3)
    inner, outer = maximum(low, low2), minimum(high, high2)
    t = _threshold(minimum(inner, outer), maximum(inner, outer), w_dropped, w_kept, INTERPOLATE)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    y0, y1 = _shrink(x0, t, scale, HAS_SCALE), _shrink(x1, t, scale, HAS_SCALE)
    y2, y3 = _shrink(x2, t, scale, HAS_SCALE), _shrink(x3, t, scale, HAS_SCALE)
    if PACKED:
        k0, k1, k2, k3 = y0 != 0, y1 != 0, y2 != 0, y3 != 0
        store_packed_mask(code_ptr, row, start, n_rows, n_groups, k0, k1, k2, k3, TILE)
    store_groups4(out, row_offsets(out, row), start, row < n_rows, n_groups, y0, y1, y2, y3, TILE)


@triton.jit
def _soft_nm_kernel(
    x, out, n_rows, n_groups, scale_ptr, w_dropped, w_kept, TILE: tl.constexpr,
    HAS_SCALE: tl.constexpr, INTERPOLATE: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    group, group_mask, pos, element, mask = group_indices(row, start, n_rows, n_groups, TILE, M)
    values = load_groups(x, row, element, mask)
    bits = magnitude_bits(values)
    keep = top_n_mask(bits, x, row, group, group_mask, N, M, False)
    # largest dropped and smallest kept, compared as integers: NaN sorts above infinity
    dropped = tl.max(tl.where(keep | (pos >= M), 0, bits), 2)[:, :, None]
    kept = tl.min(tl.where(keep, bits, 0x7FFFFFFF), 2)[:, :, None]
    nan = tl.max(bits, 2)[:, :, None] > 0x7F800000
    dropped = tl.where(nan, 0x7FC00000, dropped).to(tl.float32, bitcast=True)
    kept = tl.where(nan, 0x7FC00000, kept).to(tl.float32, bitcast=True)
    t = _threshold(dropped, kept, w_dropped, w_kept, INTERPOLATE)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    store_groups(out, row, element, mask, _shrink(values, t, scale, HAS_SCALE))


@operator("soft_threshold", fake=lambda x, n, m, gamma, dim, scale, dtype: empty_out(x, dim, dtype))
def soft_threshold(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return scale·S(x) in ``dtype``; see :func:`sparsepretrain.kernels.soft_threshold`."""
    out = empty_out(x, dim, dtype)
    weights = (1.0 - gamma, gamma)
    meta: Any = {"HAS_SCALE": scale is not None, "INTERPOLATE": gamma != 0.0}
    beta = x if scale is None else scale  # unused pointer without a scale
    if (n, m) == (2, 4):
        launch_groups(_soft_24_kernel, m, dim, x, out, beta, beta, *weights, PACKED=False, **meta)
    else:
        launch_groups(_soft_nm_kernel, m, dim, x, out, beta, *weights, N=n, M=m, **meta)
    return out


def soft_prune(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`sparsepretrain.kernels.soft_prune`; the mask is packed if one pass can do it."""
    if (n, m) != (2, 4) or not can_pack_mask(x, out):
        soft = soft_threshold(x, n, m, gamma, dim, scale, torch.float32)
        return out.copy_(soft), soft != 0
    code, aligned = empty_packed_mask(x), x.shape[1] % 8 == 0
    meta: Any = {"HAS_SCALE": scale is not None, "INTERPOLATE": gamma != 0.0, "PACKED": True}
    tensors = x if scale is None else scale, code
    weights = (1.0 - gamma, gamma)
    launch_groups(_soft_24_kernel, m, dim, x, out, *tensors, *weights, indexed=not aligned, **meta)
    torch.autograd.graph.increment_version(out)
    return out, code
