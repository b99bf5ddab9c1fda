"""Triton kernel of :mod:`sparsepretrain.kernels.mvue24`: the same operations in the same order.

Division rounds to nearest and multiply-adds are not fused, so fp32 results equal the reference bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.keys import AnyKey
from sparsepretrain.kernels.triton.launch import INTERPRETED, empty_out, launch_groups, operator
from sparsepretrain.kernels.triton.noise import (
    KEY_ARGUMENTS,
    draw_bits,
    key_arguments,
    key_parts,
    key_words,
    to_uniform,
)
from sparsepretrain.kernels.triton.tiles import (
    load_groups4,
    maximum,
    minimum,
    program_tile,
    row_offsets,
    store_groups4,
)

_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-126)
_SMALLEST_SUBNORMAL: tl.constexpr = tl.constexpr(2.0**-149)
_MIN_RATIO: tl.constexpr = tl.constexpr(2.0**-96)
"""Entries below this fraction of the largest are dropped; see ``mvue24._normalize``."""
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def refine_quotient(a, b, start):
    """Return a/b rounded to nearest; ``start`` is 1/b within one unit in the last place."""
    inverse = tl.fma(start, tl.fma(-b, start, 1.0), start)
    q = a * inverse
    return tl.fma(inverse, tl.fma(-b, q, a), q)


@triton.jit
def divide(a, b):
    """Return a/b rounded to nearest, for b in [2⁻⁷⁰, 2¹²) and a in [2⁻⁹⁵, b].

    These are the instructions of ``div_rn`` without its branch for numbers near the ends of the
    range: in the ranges above both remainders are exact.
    """
    if _INTERPRETED:  # the interpreter has no inline assembly, and its fma rounds twice
        return tl.div_rn(a, b)
    start = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
    )
    return refine_quotient(a, b, start)


@triton.jit
def _kept_value(v, b, scale, cutoff, max_value):
    """Return the magnitude of a kept entry; v is |x|/p over the scale."""
    value = minimum(maximum(v, b) * scale, max_value)
    return tl.where(cutoff < float("inf"), 0.0, value)


@triton.jit
def _signed(magnitude, x, cutoff):
    """Copy the sign of x to ``magnitude``; return x itself where |x| ≥ ``cutoff``."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    y = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) >= cutoff, x, y)


@triton.jit
def _normalize(a0, a1, a2, a3):
    """Return magnitudes over a power of two, that power, and the cutoff of unchanged entries."""
    low, high, low2, high2 = minimum(a0, a1), maximum(a0, a1), minimum(a2, a3), maximum(a2, a3)
    second = minimum(maximum(low, low2), minimum(high, high2))
    largest = maximum(high, high2)
    floor = maximum(largest * _MIN_RATIO, _SMALLEST_SUBNORMAL)
    cutoff = tl.where(second < floor, tl.where(second == 0, 0.0, floor), float("inf"))
    exponent = maximum(largest, 2 * _SMALLEST_NORMAL).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F800000 - exponent).to(tl.float32, bitcast=True)
    scale = (exponent - 0x00800000).to(tl.float32, bitcast=True)
    return a0 * inverse, a1 * inverse, a2 * inverse, a3 * inverse, scale, cutoff


@triton.jit
def _approximate(b0, b1, b2, b3, r0, r1, scale, cutoff, max_value):
    """Return the magnitudes of the estimates; two draws without replacement."""
    c1 = b0 + b1
    c2 = c1 + b2
    total = c2 + b3
    u = r0 * total
    at0, to1, to2 = u < b0, u < c1, u < c2
    first = tl.where(at0, b0, tl.where(to1, b1, tl.where(to2, b2, b3)))
    e0, e1, e2 = tl.where(at0, b1, b0), tl.where(to1, b2, b1), tl.where(to2, b3, b2)
    d1 = e0 + e1
    others = d1 + e2
    u = r1 * others
    near, nearer = u < d1, u < e0
    second = tl.where(nearer, e0, tl.where(near, e1, e2))
    k, m = tl.where(nearer, e1, e0), tl.where(near, e2, e1)
    remaining, product = k + m, k * m
    d = (first + second) * total + product
    n = remaining * total - product - product
    whole, without_second = total * d, first + remaining
    value = without_second * divide(whole, n * without_second + whole)
    value2 = others * divide(whole, n * others + whole)
    y = _kept_value(value, first, scale, cutoff, max_value)
    y2 = _kept_value(value2, second, scale, cutoff, max_value)
    zero = total * 0  # propagates NaN
    h0, h2 = tl.where(nearer, y2, zero), tl.where(near, zero, y2)
    h1 = tl.where(nearer, zero, tl.where(near, y2, zero))
    out0, out1 = tl.where(at0, y, h0), tl.where(at0, h0, tl.where(to1, y, h1))
    out2, out3 = tl.where(to1, h1, tl.where(to2, y, h2)), tl.where(to2, h2, y)
    return out0, out1, out2, out3


@triton.jit
def _exact(b0, b1, b2, b3, r, scale, cutoff, max_value):
    """Return the magnitudes of the estimates; systematic sampling with one draw."""
    head, tail = b0 + b1, b2 + b3
    o0, o1, o2, o3 = b1 + tail, b0 + tail, head + b3, head + b2
    step = minimum(minimum(minimum(o0, o1), minimum(o2, o3)), (b0 + o0) * 0.5)
    q0, q1, q2 = minimum(b0, step), minimum(b1, step), minimum(b2, step)
    c1 = q0 + q1
    c2 = tl.where(b3 == 0, float("inf"), c1 + q2)
    u = r * step
    again = u + step
    at0, to1, again1, again2 = u < q0, u < c1, again < c1, again < c2
    zero = step * 0  # propagates NaN
    y0 = tl.where(at0, _kept_value(step, b0, scale, cutoff, max_value), zero)
    y1 = tl.where((to1 & ~at0) | again1, _kept_value(step, b1, scale, cutoff, max_value), zero)
    y2 = tl.where(~to1 | (again2 & ~again1), _kept_value(step, b2, scale, cutoff, max_value), zero)
    y3 = tl.where(again2, zero, _kept_value(step, b3, scale, cutoff, max_value))
    return y0, y1, y2, y3


@triton.jit
def _estimate(x0, x1, x2, x3, r0, r1, max_value, EXACT: tl.constexpr):
    b0, b1, b2, b3, scale, cutoff = _normalize(tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3))
    if EXACT:
        y0, y1, y2, y3 = _exact(b0, b1, b2, b3, r0, scale, cutoff, max_value)
    else:
        y0, y1, y2, y3 = _approximate(b0, b1, b2, b3, r0, r1, scale, cutoff, max_value)
    y0, y1 = _signed(y0, x0, cutoff), _signed(y1, x1, cutoff)
    y2, y3 = _signed(y2, x2, cutoff), _signed(y3, x3, cutoff)
    return y0, y1, y2, y3


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _mvue_kernel(
    x, out, n_rows, n_groups, uniforms_ptr, clock_ptr, k0, k1, layer, matmul, offset, max_value,
    TILE: tl.constexpr, EXACT: tl.constexpr, HAS_UNIFORMS: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    group = start + tl.arange(0, TILE.GROUPS)
    x0, x1, x2, x3 = load_groups4(x, row_offsets(x, row), start, row < n_rows, n_groups, TILE)
    if HAS_UNIFORMS:
        DRAWS: tl.constexpr = 1 if EXACT else 2
        ptrs = uniforms_ptr + (row[:, None] * n_groups + group[None, :]) * DRAWS
        mask = (row < n_rows)[:, None] & (group < n_groups)[None, :]
        r0 = tl.load(ptrs, mask, 0)
        r1 = tl.load(ptrs + (DRAWS - 1), mask, 0)
    else:
        words = key_words(clock_ptr, k0, k1, layer, matmul, offset)
        first, second = draw_bits(group[None, :], row[:, None], words)
        r0, r1 = to_uniform(first), to_uniform(second)
    y0, y1, y2, y3 = _estimate(x0, x1, x2, x3, r0, r1, max_value, EXACT)
    store_groups4(out, row_offsets(out, row), start, row < n_rows, n_groups, y0, y1, y2, y3, TILE)


def _empty_mvue(x: Tensor, dim: int, last: bool) -> Tensor:
    """Empty result; ``dim`` is contiguous if ``last``."""
    if not last:
        return empty_out(x, dim, x.dtype)
    moved = x.movedim(dim, -1)
    return torch.empty(moved.shape, dtype=x.dtype, device=x.device).movedim(-1, dim)


@operator("mvue", fake=lambda x, dim, last, *_: _empty_mvue(x, dim, last))
def mvue_op(
    x: Tensor,
    dim: int,
    last: bool,
    exact: bool,
    uniforms: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
) -> Tensor:
    """Operator of :func:`mvue`; ``tensors`` and ``numbers`` come from :func:`key_parts`."""
    length, out = x.shape[dim], _empty_mvue(x, dim, last)
    if length % 4:  # rare, so a copy is acceptable
        padded = torch.nn.functional.pad(x.movedim(dim, -1), (0, -length % 4))
        pruned = mvue_op(padded, -1, False, exact, uniforms, tensors, numbers)
        return out.copy_(pruned[..., :length].movedim(-1, dim))
    draws = x  # unused pointer
    if uniforms is not None:  # (rows, groups, draws)
        draws = uniforms.reshape(uniforms.shape[:-2].numel(), *uniforms.shape[-2:])
        draws = draws.float().contiguous()
    key, max_value = key_arguments(tensors, numbers), torch.finfo(x.dtype).max
    meta: Any = {"EXACT": exact, "HAS_UNIFORMS": uniforms is not None}
    launch_groups(_mvue_kernel, 4, dim, x, out, draws, *key, max_value, indexed=True, **meta)
    return out


def mvue(
    x: Tensor,
    dim: int,
    estimator: str,
    uniforms: Tensor | None,
    key: AnyKey | int | None,
    order: str | None,
) -> Tensor:
    """See :func:`sparsepretrain.kernels.mvue`, which checks the arguments."""
    flags = order is not None, estimator == "exact"
    return mvue_op(x, dim, *flags, uniforms, *key_parts(key, x.device))
