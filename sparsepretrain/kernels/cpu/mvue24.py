"""Unbiased 2:4 estimates in loops, the names and the order of :mod:`sparsepretrain.kernels.mvue24`.

A group of four is a tuple; the neighbors in memory, one per feature, are what is vectorized.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import from_groups, to_groups
from sparsepretrain.kernels.cpu.launch import compiled, inlined
from sparsepretrain.kernels.cpu.noise import fill, stream
from sparsepretrain.kernels.keys import AnyKey

_ONE, _INFINITE = 2**23, 2**31 - 2**23
_ONE_64, _INFINITE_64 = 2**52, 2**63 - 2**52
"""In the field of exponents: one, and that of infinity."""


def mvue(
    x: Tensor,
    dim: int,
    estimator: str,
    uniforms: Tensor | None,
    key: AnyKey | int | None,
    order: str | None,
) -> Tensor:
    """Return the estimate of ``x`` with ``uniforms``, or those drawn under ``key``."""
    x4 = to_groups(x, dim).contiguous()
    groups, _, features = x4.shape
    out, draws = torch.empty_like(x4), 1 if estimator == "exact" else 2
    r = x4.new_empty(0, draws, features)
    if uniforms is not None:
        r = uniforms.detach().reshape(features, groups, draws).to(x4.dtype).permute(1, 2, 0)
    arrays = x4.numpy(), out.numpy(), r.contiguous().numpy()
    real, info = arrays[0].dtype.type, numpy.finfo(arrays[0].dtype)
    factor, max_value = real(float(info.tiny) * 2**30), real(torch.finfo(x.dtype).max)
    numbers = *stream(key or 0), real(info.smallest_subnormal), real(info.tiny), factor, max_value
    # by the types of these Numba compiles one of two
    exact, wide = (True if flag else None for flag in (estimator == "exact", real(0).itemsize == 8))
    _estimate(*arrays, *numbers, exact, wide)
    return from_groups(out, x, dim, order)


@inlined
def power_of_two(largest, wide):
    """Return a power of two that brings the largest magnitude to [2, 4), and its inverse."""
    if wide is None:
        bits = numpy.float32(largest).view(numpy.int32) & _INFINITE
        power = numpy.int32(bits - _ONE).view(numpy.float32)
        return power, numpy.int32(_INFINITE - bits).view(numpy.float32)
    words = numpy.float64(largest).view(numpy.int64) & _INFINITE_64
    half = numpy.int64(words - _ONE_64).view(numpy.float64)
    return half, numpy.int64(_INFINITE_64 - words).view(numpy.float64)


@inlined
def _normalize(a, least, tiny, factor, zero, infinity, wide):
    """Return magnitudes over a power of two, that power, the cutoff of unchanged entries."""
    low, high = numpy.minimum(a[0], a[1]), numpy.maximum(a[0], a[1])
    low2, high2 = numpy.minimum(a[2], a[3]), numpy.maximum(a[2], a[3])
    second = numpy.minimum(numpy.maximum(low, low2), numpy.minimum(high, high2))
    largest = numpy.maximum(high, high2)
    floor = numpy.maximum(largest * factor, least)
    few = zero if second == zero else floor
    cutoff = few if second < floor else infinity
    power, inverse = power_of_two(numpy.maximum(largest, tiny + tiny), wide)
    return (a[0] * inverse, a[1] * inverse, a[2] * inverse, a[3] * inverse), power, cutoff


@inlined
def kept_value(v, b, scale, cutoff, max_value, zero, infinity):
    """Return the magnitude of a kept entry; v is |x|/p over the scale."""
    v = numpy.maximum(v, b) * scale  # p ≤ 1
    v = max_value if v > max_value else v
    return zero if cutoff < infinity else v


@inlined
def signed(magnitude, x, cutoff):
    """Copy the sign of x to ``magnitude``; return x itself where |x| ≥ ``cutoff``."""
    y = numpy.copysign(magnitude, x)
    return x if abs(x) >= cutoff else y


@inlined
def _approximate(b, r0, r1, scale, cutoff, max_value, zero, infinity):
    """Magnitudes of the estimates by two draws."""
    c1 = b[0] + b[1]
    c2 = c1 + b[2]
    total = c2 + b[3]
    u = r0 * total
    at0, to1, to2 = u < b[0], u < c1, u < c2
    first = b[2] if to2 else b[3]
    first = b[1] if to1 else first
    first = b[0] if at0 else first
    # the other three, in order
    e0, e1, e2 = b[1] if at0 else b[0], b[2] if to1 else b[1], b[3] if to2 else b[2]
    d1 = e0 + e1
    others = d1 + e2
    u = r1 * others
    near, nearer = u < d1, u < e0
    second = e1 if near else e2
    second = e0 if nearer else second
    k, m = e1 if nearer else e0, e2 if near else e1
    remaining, product = k + m, k * m
    d = (first + second) * total + product
    n = remaining * total - product - product
    whole, without_second = total * d, first + remaining
    value = without_second * (whole / (n * without_second + whole))
    value2 = others * (whole / (n * others + whole))
    y = kept_value(value, first, scale, cutoff, max_value, zero, infinity)
    y2 = kept_value(value2, second, scale, cutoff, max_value, zero, infinity)
    nothing = total * zero  # propagates NaN
    h0, h2 = y2 if nearer else nothing, nothing if near else y2
    h1 = y2 if near else nothing
    h1 = nothing if nearer else h1
    out1, out2 = y if to1 else h1, y if to2 else h2
    return y if at0 else h0, h0 if at0 else out1, h1 if to1 else out2, h2 if to2 else y


@inlined
def _exact(b, r, scale, cutoff, max_value, zero, infinity, half):
    """Like :func:`_approximate`, but sample systematically."""
    head, tail = b[0] + b[1], b[2] + b[3]
    o0, o1, o2, o3 = b[1] + tail, b[0] + tail, head + b[3], head + b[2]
    others = numpy.minimum(numpy.minimum(o0, o1), numpy.minimum(o2, o3))
    step = numpy.minimum(others, (b[0] + o0) * half)
    q0, q1, q2 = numpy.minimum(b[0], step), numpy.minimum(b[1], step), numpy.minimum(b[2], step)
    c1 = q0 + q1
    c2 = c1 + q2
    c2 = infinity if b[3] == zero else c2  # no room for a zero by rounding
    u = r * step
    again = u + step
    at0, to1, again1, again2 = u < q0, u < c1, again < c1, again < c2
    nothing = step * zero  # propagates NaN
    y0 = kept_value(step, b[0], scale, cutoff, max_value, zero, infinity)
    y1 = kept_value(step, b[1], scale, cutoff, max_value, zero, infinity)
    y2 = kept_value(step, b[2], scale, cutoff, max_value, zero, infinity)
    y3 = kept_value(step, b[3], scale, cutoff, max_value, zero, infinity)
    return (
        y0 if at0 else nothing,
        y1 if (to1 & (not at0)) | again1 else nothing,
        y2 if (not to1) | (again2 & (not again1)) else nothing,
        nothing if again2 else y3,
    )


@compiled
def _estimate(x4, out, uniforms, first, k0, k1, least, tiny, factor, max_value, exact, wide):
    zero, half = x4.dtype.type(0), x4.dtype.type(0.5)
    infinity = x4.dtype.type(numpy.inf)
    drawn = numpy.empty((2 if exact is None else 1, x4.shape[2]), x4.dtype)
    for g in range(len(x4)):
        fill(drawn, first + numpy.uint64(g), k0, k1)
        r = uniforms[g] if len(uniforms) else drawn
        for f in range(x4.shape[2]):
            x = x4[g, 0, f], x4[g, 1, f], x4[g, 2, f], x4[g, 3, f]
            a = abs(x[0]), abs(x[1]), abs(x[2]), abs(x[3])
            b, scale, cutoff = _normalize(a, least, tiny, factor, zero, infinity, wide)
            if exact is None:
                y = _approximate(b, r[0, f], r[1, f], scale, cutoff, max_value, zero, infinity)
            else:
                y = _exact(b, r[0, f], scale, cutoff, max_value, zero, infinity, half)
            out[g, 0, f], out[g, 1, f] = signed(y[0], x[0], cutoff), signed(y[1], x[1], cutoff)
            out[g, 2, f], out[g, 3, f] = signed(y[2], x[2], cutoff), signed(y[3], x[3], cutoff)
