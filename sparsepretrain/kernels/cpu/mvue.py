"""Unbiased 2:4 estimates in loops, the names and the order of :mod:`sparsepretrain.kernels.mvue24`.

A group of four is a tuple; the neighbours in memory, one per feature, are what is vectorised.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.cpu.launch import compiled, inlined, run
from sparsepretrain.kernels.cpu.noise import counters, fill
from sparsepretrain.kernels.noise import NoiseKey


def estimate(
    four: Tensor, estimator: str, given: Tensor | None, key: NoiseKey, saturation: float
) -> Tensor:
    """The estimate of ``four`` (groups, 4, features), contiguous fp32 or fp64, under ``key``, or
    with ``given`` uniforms of its dtype (2 or 1, groups, features); no larger than ``saturation``.
    """
    groups, _, features = four.shape
    out = torch.empty_like(four)
    kernel, draws = (_approximate, 2) if estimator == "approximate" else (_exact, 1)
    uniforms = four.new_empty(0, draws, features) if given is None else given.transpose(0, 1)
    x = four.numpy()
    real, info = x.dtype.type, numpy.finfo(x.dtype)
    tokens, *parts = counters(key, groups)
    arrays = x, out.numpy(), tokens, uniforms.contiguous().numpy()
    numbers = real(info.tiny), real(float(info.tiny) * 2**30), real(saturation)
    run(kernel, groups, arrays, *parts, *numbers)
    return out


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


@compiled
def _approximate(four, out, tokens, given, k0, k1, tiny, floor, saturation):
    groups, _, features = four.shape
    zero, one = four.dtype.type(0), four.dtype.type(1)
    drawn = numpy.empty((2, features), four.dtype)
    for g in range(groups):
        fill(drawn, tokens[g], k0, k1)
        r = given[g] if len(given) else drawn
        for f in range(features):
            x = four[g, 0, f], four[g, 1, f], four[g, 2, f], four[g, 3, f]
            b, scale, smallest = _normalise(x, tiny)
            # first draw
            c1 = b[0] + b[1]
            c2 = c1 + b[2]
            total = c2 + b[3]
            h = _one_hot(r[0, f] * total, b[0], c1, c2, zero, one)
            # second draw: the same among the other three
            rest = b[0] - b[0] * h[0], b[1] - b[1] * h[1], b[2] - b[2] * h[2], b[3] - b[3] * h[3]
            c1 = rest[0] + rest[1]
            c2 = c1 + rest[2]
            a = _one_hot(r[1, f] * (c2 + rest[3]), rest[0], c1, c2, zero, one)
            selected = h[0] + a[0], h[1] + a[1], h[2] + a[2], h[3] + a[3]
            # p_i = b_i/S·(1 + Q_i), Q_i = Σ_{j≠i} b_j/(S - b_j); hence |x_i|/p_i = S/(1 + Q_i)
            o = _others(b)
            q = _others((b[0] / o[0], b[1] / o[1], b[2] / o[2], b[3] / o[3]))
            q = q[0] + one, q[1] + one, q[2] + one, q[3] + one
            value = total / q[0], total / q[1], total / q[2], total / q[3]
            y = _finish(x, b, selected, value, scale, smallest, floor, saturation, zero)
            out[g, 0, f], out[g, 1, f], out[g, 2, f], out[g, 3, f] = y


@compiled
def _exact(four, out, tokens, given, k0, k1, tiny, floor, saturation):
    groups, _, features = four.shape
    zero, one = four.dtype.type(0), four.dtype.type(1)
    two, drawn = one + one, numpy.empty((1, features), four.dtype)
    for g in range(groups):
        fill(drawn, tokens[g], k0, k1)
        r = given[g] if len(given) else drawn
        for f in range(features):
            x = four[g, 0, f], four[g, 1, f], four[g, 2, f], four[g, 3, f]
            b, scale, smallest = _normalise(x, tiny)
            o = _others(b)
            rest = numpy.minimum(numpy.minimum(o[0], o[1]), numpy.minimum(o[2], o[3]))
            # the largest is certain when it outweighs the rest; what remains is shared either way
            share = numpy.minimum(rest, (b[0] + o[0]) / two)
            p0, p1, p2 = b[0] / share, b[1] / share, b[2] / share
            p0 = one if p0 > one else p0
            p1 = one if p1 > one else p1
            p2 = one if p2 > one else p2
            # systematic sampling: intervals of length p_i end to end on [0, 2), hit by u and u + 1
            c1 = p0 + p1
            c2 = two if b[3] == zero else c1 + p2  # no room for a zero by rounding
            h = _one_hot(r[0, f], p0, c1, c2, zero, one)
            a = _one_hot(r[0, f], p0 - one, c1 - one, c2 - one, zero, one)
            selected = max(h[0], a[0]), max(h[1], a[1]), max(h[2], a[2]), max(h[3], a[3])
            value = share, share, share, share
            y = _finish(x, b, selected, value, scale, smallest, floor, saturation, zero)
            out[g, 0, f], out[g, 1, f], out[g, 2, f], out[g, 3, f] = y
