"""Unbiased N:M estimates in loops: the operations of :mod:`sparsepretrain.kernels.mvue_nm`.

The features, neighbors in memory, are what the innermost loops run over and what is vectorized.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import from_groups, to_groups
from sparsepretrain.kernels.cpu.launch import compiled
from sparsepretrain.kernels.cpu.mvue24 import kept_value, power_of_two, signed
from sparsepretrain.kernels.cpu.noise import fill, stream
from sparsepretrain.kernels.keys import AnyKey


def mvue_nm(
    x: Tensor,
    n: int,
    m: int,
    dim: int,
    uniforms: Tensor | None,
    key: AnyKey | int | None,
    order: str | None,
) -> Tensor:
    """Return the estimate of ``x`` with ``uniforms``, or those drawn under ``key``."""
    grouped = to_groups(x, dim, m).contiguous()
    groups, _, features = grouped.shape
    out = torch.empty_like(grouped)
    r = grouped.new_empty(0, 1, features)
    if uniforms is not None:
        r = uniforms.detach().reshape(features, groups, 1).to(grouped.dtype).permute(1, 2, 0)
    arrays = grouped.numpy(), out.numpy(), r.contiguous().numpy()
    real, info = arrays[0].dtype.type, numpy.finfo(arrays[0].dtype)
    factor, max_value = real(float(info.tiny) * 2**30), real(torch.finfo(x.dtype).max)
    numbers = *stream(key or 0), real(info.smallest_subnormal), real(info.tiny), factor, max_value
    wide = True if real(0).itemsize == 8 else None  # by its type Numba compiles one of two
    _estimate(*arrays, real(n), *numbers, wide)
    return from_groups(out, x, dim, order)


@compiled
def _estimate(x, out, uniforms, n, first, k0, k1, least, tiny, factor, max_value, wide):
    zero, one = x.dtype.type(0), x.dtype.type(1)
    infinity = x.dtype.type(numpy.inf)
    groups, m, features = x.shape
    drawn = numpy.empty((1, features), x.dtype)
    b = numpy.empty((m, features), x.dtype)
    c, scale, cutoff, nothing, rest, count = (
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
    )
    left, among, point, end = (
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
        numpy.empty(features, x.dtype),
    )
    for g in range(groups):
        fill(drawn, first + numpy.uint64(g), k0, k1)
        r = uniforms[g] if len(uniforms) else drawn
        # magnitudes over a power of two, and the cutoff; `rest` is the largest, `end` the floor
        for f in range(features):
            rest[f] = abs(x[g, 0, f])
        for i in range(1, m):
            for f in range(features):
                rest[f] = numpy.maximum(rest[f], abs(x[g, i, f]))
        for f in range(features):
            end[f] = numpy.maximum(rest[f] * factor, least)
            left[f] = zero
            among[f] = zero
        for i in range(m):
            for f in range(features):
                a = abs(x[g, i, f])
                left[f] += one if a >= end[f] else zero
                among[f] += one if a != zero else zero
        for f in range(features):
            few = end[f] if left[f] <= n else infinity
            cutoff[f] = zero if among[f] <= n else few
            scale[f], point[f] = power_of_two(numpy.maximum(rest[f], tiny + tiny), wide)
        for i in range(m):
            for f in range(features):
                b[i, f] = abs(x[g, i, f]) * point[f]
        # the water level
        for f in range(features):
            rest[f] = b[0, f]
        for i in range(1, m):
            for f in range(features):
                rest[f] += b[i, f]
        for f in range(features):
            c[f] = rest[f] / n
        for _ in range(int(n) - 1):
            for f in range(features):
                rest[f] = zero
                count[f] = zero
            for i in range(m):
                for f in range(features):
                    rest[f] += zero if b[i, f] > c[f] else b[i, f]
                    count[f] += one if b[i, f] > c[f] else zero
            for f in range(features):
                remaining = n - count[f]
                level = rest[f] / numpy.maximum(remaining, one)
                c[f] = level if remaining > zero else c[f]
        # the sample
        for f in range(features):
            left[f] = n
            among[f] = zero
            nothing[f] = c[f] * zero  # propagates NaN
            end[f] = nothing[f]
            point[f] = r[0, f] * c[f]
        for i in range(m):
            for f in range(features):
                v = b[i, f]
                left[f] -= one if v >= c[f] else zero
                among[f] += one if (v < c[f]) & (v > zero) else zero
        for i in range(m):
            for f in range(features):
                v = b[i, f]
                free = (v < c[f]) & (v > zero)
                end[f] += v if free else zero
                hit = free & (left[f] > zero) & ((point[f] < end[f]) | (left[f] == among[f]))
                left[f] -= one if hit else zero
                among[f] -= one if free else zero
                point[f] += c[f] if hit else zero
                value = kept_value(c[f], v, scale[f], cutoff[f], max_value, zero, infinity)
                value = value if (v >= c[f]) | hit else nothing[f]
                out[g, i, f] = signed(value, x[g, i, f], cutoff[f])
