"""Unbiased 2:4 estimates in loops, the names and the order of :mod:`sparsepretrain.kernels.mvue24`.

A group of four is a tuple; the neighbours in memory, one per feature, are what is vectorised.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import NoiseKey, fours_of, from_fours
from sparsepretrain.kernels.cpu.launch import compiled, inlined, run
from sparsepretrain.kernels.cpu.noise import counters, fill


def mvue(
    x: Tensor, dim: int, estimator: str, uniforms: Tensor | None, key: NoiseKey | int | None
) -> Tensor:
    """The estimate of ``x`` with ``uniforms``, or those drawn under ``key``."""
    fours = fours_of(x, dim).contiguous()
    groups, _, features = fours.shape
    out, draws = torch.empty_like(fours), 1 if estimator == "exact" else 2
    given = fours.new_empty(0, draws, features)
    if uniforms is not None:
        given = uniforms.detach().reshape(features, groups, draws).to(fours.dtype).permute(1, 2, 0)
    stream = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key or 0)
    tokens, k0, k1 = counters(stream, groups)
    arrays = fours.numpy(), out.numpy(), tokens, given.contiguous().numpy()
    real, info = arrays[0].dtype.type, numpy.finfo(arrays[0].dtype)
    floor, saturation = real(float(info.tiny) * 2**30), real(torch.finfo(x.dtype).max)
    exact = True if estimator == "exact" else None  # by its type Numba compiles one of two
    run(_estimate, groups, arrays, k0, k1, real(info.tiny), floor, saturation, exact)
    return from_fours(out, x, dim)


@inlined
def _normalise(x, tiny):
    """(magnitudes divided by the group's largest, that largest, second smallest of the former)."""
    a = abs(x[0]), abs(x[1]), abs(x[2]), abs(x[3])
    low, high = numpy.minimum(a[0], a[1]), numpy.maximum(a[0], a[1])
    low2, high2 = numpy.minimum(a[2], a[3]), numpy.maximum(a[2], a[3])
    second = numpy.minimum(numpy.maximum(low, low2), numpy.minimum(high, high2))
    largest = numpy.maximum(numpy.maximum(high, high2), tiny)
    b = a[0] / largest, a[1] / largest, a[2] / largest, a[3] / largest
    return b, largest, second / largest


@inlined
def _finish(x, b, selected, value, scale, second, floor, saturation, zero):
    """sign(x)·scale·max(value, b) where selected; at most two non-zeros stay as they are."""
    few = (x[0] != 0) * 1 + (x[1] != 0) + (x[2] != 0) + (x[3] != 0) <= 2
    return (
        _entry(x[0], b[0], selected[0], value[0], scale, few, second, floor, saturation, zero),
        _entry(x[1], b[1], selected[1], value[1], scale, few, second, floor, saturation, zero),
        _entry(x[2], b[2], selected[2], value[2], scale, few, second, floor, saturation, zero),
        _entry(x[3], b[3], selected[3], value[3], scale, few, second, floor, saturation, zero),
    )


@inlined
def _entry(xi, bi, keep, v, scale, few, second, floor, saturation, zero):
    v = numpy.maximum(v, bi) * scale  # p ≤ 1
    # multiplied by 0 or 1, not a selection: a NaN must stay visible
    out = numpy.copysign(saturation if v > saturation else v, xi) * keep
    stays = xi if few | (not bi < floor) else zero
    return stays if second < floor else out


@inlined
def _others(b):
    """Sum of the three other entries, for each entry; never a difference."""
    head, tail = b[0] + b[1], b[2] + b[3]
    return b[1] + tail, b[0] + tail, head + b[3], head + b[2]


@inlined
def _one_hot(u, first, second, third, zero, one):
    """Which of the intervals ending at the three boundaries (and beyond) holds u, as 0 or 1."""
    a = one if u < first else zero
    b = one if u < second else zero
    c = one if u < third else zero
    return a, b - a, c - b, one - c


@inlined
def _approximate(b, r0, r1, zero, one):
    """(which two of four are drawn, the values they stand for over the group's largest)."""
    c1 = b[0] + b[1]
    c2 = c1 + b[2]
    total = c2 + b[3]
    h = _one_hot(r0 * total, b[0], c1, c2, zero, one)
    # second draw: the same among the other three
    rest = b[0] - b[0] * h[0], b[1] - b[1] * h[1], b[2] - b[2] * h[2], b[3] - b[3] * h[3]
    c1 = rest[0] + rest[1]
    c2 = c1 + rest[2]
    a = _one_hot(r1 * (c2 + rest[3]), rest[0], c1, c2, zero, one)
    # p_i = b_i/S·(1 + Q_i), Q_i = Σ_{j≠i} b_j/(S - b_j); hence |x_i|/p_i = S/(1 + Q_i)
    o = _others(b)
    q = _others((b[0] / o[0], b[1] / o[1], b[2] / o[2], b[3] / o[3]))
    value = total / (q[0] + one), total / (q[1] + one), total / (q[2] + one), total / (q[3] + one)
    return (h[0] + a[0], h[1] + a[1], h[2] + a[2], h[3] + a[3]), value


@inlined
def _exact(b, r0, zero, one):
    """As :func:`_approximate`, by systematic sampling."""
    two = one + one
    o = _others(b)
    rest = numpy.minimum(numpy.minimum(o[0], o[1]), numpy.minimum(o[2], o[3]))
    # the largest is certain when it outweighs the rest; what remains is shared either way
    share = numpy.minimum(rest, (b[0] + o[0]) / two)
    p0, p1, p2 = b[0] / share, b[1] / share, b[2] / share
    p0 = one if p0 > one else p0
    p1 = one if p1 > one else p1
    p2 = one if p2 > one else p2
    # intervals of length p_i end to end on [0, 2), hit by u and u + 1
    c1 = p0 + p1
    c2 = two if b[3] == zero else c1 + p2  # no room for a zero by rounding
    h = _one_hot(r0, p0, c1, c2, zero, one)
    a = _one_hot(r0, p0 - one, c1 - one, c2 - one, zero, one)
    selected = max(h[0], a[0]), max(h[1], a[1]), max(h[2], a[2]), max(h[3], a[3])
    return selected, (share, share, share, share)


@compiled
def _estimate(fours, out, tokens, given, k0, k1, tiny, floor, saturation, exact):
    zero, one = fours.dtype.type(0), fours.dtype.type(1)
    drawn = numpy.empty((2 if exact is None else 1, fours.shape[2]), fours.dtype)
    for g in range(len(fours)):
        fill(drawn, tokens[g], k0, k1)
        r = given[g] if len(given) else drawn
        for f in range(fours.shape[2]):
            x = fours[g, 0, f], fours[g, 1, f], fours[g, 2, f], fours[g, 3, f]
            b, scale, smallest = _normalise(x, tiny)
            if exact is None:
                selected, value = _approximate(b, r[0, f], r[1, f], zero, one)
            else:
                selected, value = _exact(b, r[0, f], zero, one)
            y = _finish(x, b, selected, value, scale, smallest, floor, saturation, zero)
            out[g, 0, f], out[g, 1, f], out[g, 2, f], out[g, 3, f] = y
