"""The soft threshold in loops; see :mod:`sparsepretrain.kernels.soft`."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import widen
from sparsepretrain.kernels.cpu.launch import compiled, groups_of, inlined, run
from sparsepretrain.kernels.cpu.nm import TILE, copy, count_wins, tile_at


def soft_threshold(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """β·S(x), computed in fp32, or fp64 for fp64; n < m."""
    wide = widen(x).contiguous()
    result = torch.empty_like(wide)
    source, target = groups_of(wide, m, dim), groups_of(result, m, dim)
    rows, inner = len(source), source.shape[2]
    real = source.dtype.type
    beta = real(1) if scale is None else real(float(scale))
    numbers = n, real(1 - gamma), real(gamma), real(numpy.finfo(real).max), beta
    if m == 4 and inner == 1:
        run(_fours_along, rows, (source.reshape(-1), target.reshape(-1)), *numbers)
    else:
        kernel = _fours_across if m == 4 else _any
        run(kernel, rows, (source, target), *numbers)
    return result.to(dtype)


@inlined
def _boundary(v, n):
    """The largest dropped and the smallest kept of four magnitudes; NaN spreads."""
    a0, a1, a2, a3 = abs(v[0]), abs(v[1]), abs(v[2]), abs(v[3])
    low, high = numpy.minimum(a0, a1), numpy.maximum(a0, a1)
    low2, high2 = numpy.minimum(a2, a3), numpy.maximum(a2, a3)
    inner, outer = numpy.maximum(low, low2), numpy.minimum(high, high2)
    second, third = numpy.minimum(inner, outer), numpy.maximum(inner, outer)
    first, fourth = numpy.minimum(low, low2), numpy.maximum(high, high2)
    dropped = second if n == 2 else (third if n == 1 else first)
    kept = third if n == 2 else (fourth if n == 1 else second)
    return dropped, kept


@inlined
def _threshold(dropped, kept, keep, gamma, most):
    """(1 - γ)·dropped + γ·kept, finite where it can be and not below ``dropped``."""
    t = keep * min(dropped, most) + gamma * min(kept, most)
    return dropped if gamma == 0 else numpy.maximum(t, dropped)


@inlined
def _shrink(x, t, beta, zero):
    """β·sign(x)·(|x| - t) where |x| > t, else +0.0; NaN stays."""
    return beta * (zero if abs(x) <= t else x - numpy.copysign(t, x))


@compiled
def _fours_along(x, out, n, keep, gamma, most, beta):
    zero = x.dtype.type(0)
    for r in range(len(x) // 4):
        k = 4 * r
        v = x[k], x[k + 1], x[k + 2], x[k + 3]
        dropped, kept = _boundary(v, n)
        t = _threshold(dropped, kept, keep, gamma, most)
        out[k], out[k + 1] = _shrink(v[0], t, beta, zero), _shrink(v[1], t, beta, zero)
        out[k + 2], out[k + 3] = _shrink(v[2], t, beta, zero), _shrink(v[3], t, beta, zero)


@compiled
def _fours_across(x, out, n, keep, gamma, most, beta):
    zero = x.dtype.type(0)
    for r in range(len(x)):
        for i in range(x.shape[2]):
            v = x[r, 0, i], x[r, 1, i], x[r, 2, i], x[r, 3, i]
            dropped, kept = _boundary(v, n)
            t = _threshold(dropped, kept, keep, gamma, most)
            out[r, 0, i], out[r, 1, i] = _shrink(v[0], t, beta, zero), _shrink(v[1], t, beta, zero)
            out[r, 2, i], out[r, 3, i] = _shrink(v[2], t, beta, zero), _shrink(v[3], t, beta, zero)


@compiled
def _any(x, out, n, keep, gamma, most, beta):
    """Groups of any size: x and out (groups, m, inner)."""
    rows, m, inner = x.shape
    values, a = numpy.empty((m, TILE), x.dtype), numpy.empty((m, TILE), x.dtype)
    wins = numpy.empty((m, TILE), numpy.int32)
    dropped, kept = numpy.zeros(TILE, x.dtype), numpy.zeros(TILE, x.dtype)
    for r in range(0, rows, TILE if inner == 1 else 1):
        for i in range(0, inner, TILE):
            source, target = tile_at(x, r, i), tile_at(out, r, i)
            _tile(source, target, values, a, wins, dropped, kept, n, keep, gamma, most, beta)


@compiled
def _tile(x, out, values, a, wins, dropped, kept, n, keep, gamma, most, beta):
    m, count = x.shape
    zero, below, above = a.dtype.type(0), numpy.int32(m - n - 1), numpy.int32(m - n)
    copy(x, values)
    for p in range(m):
        for t in range(count):
            a[p, t] = abs(values[p, t])
    count_wins(a, count, wins, True)
    for p in range(m):
        for t in range(count):
            v, w, d, k = a[p, t], wins[p, t], dropped[t], kept[t]
            dropped[t] = v if w == below else d
            kept[t] = v if w == above else k
    for p in range(m):  # with a NaN, which beats nothing, all of that was for nothing
        for t in range(count):
            v, d = a[p, t], dropped[t]
            dropped[t] = v if v != v else d
    for t in range(count):
        dropped[t] = _threshold(dropped[t], kept[t], keep, gamma, most)
    for p in range(m):
        for t in range(count):
            values[p, t] = _shrink(values[p, t], dropped[t], beta, zero)
    copy(values[:, :count], out)
