"""The soft threshold in loops; see :mod:`sparsepretrain.kernels.soft`."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import packed_shape, widen
from sparsepretrain.kernels.cpu.launch import (
    compiled,
    groups_of,
    inlined,
    packed_flags,
    packs_groups4,
)


def soft_threshold(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return β·S(x) for n < m, computed in fp32, or fp64 for fp64; None for m ≠ 4."""
    if m != 4:
        return None
    wide = widen(x).contiguous()
    result = torch.empty_like(wide)
    source, target = groups_of(wide, m, dim), groups_of(result, m, dim)
    numbers = _numbers(source.dtype.type, n, gamma, scale)
    if source.shape[2] == 1:
        _contiguous_groups4(source.reshape(-1), target.reshape(-1), *numbers)
    else:
        _strided_groups4(source, target, *numbers)
    return result.to(dtype)


def soft_prune(
    x: Tensor, n: int, m: int, gamma: float, dim: int, scale: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Write β·S(x) to ``out`` and return it with its packed mask; None for other layouts."""
    if x.itemsize < 4 or not packs_groups4(x, m, dim, out):
        return None
    code = torch.empty(packed_shape(x.shape), dtype=torch.uint8)
    arrays = (t.detach().view(-1).numpy() for t in (x, out, code))
    _prune_contiguous_groups4(*arrays, *_numbers(x.numpy().dtype.type, n, gamma, scale))
    torch.autograd.graph.increment_version(out)  # see apply_mask
    return out, code


def _numbers(real: Any, n: int, gamma: float, scale: Tensor | None) -> tuple[Any, ...]:
    """Return N, 1 - γ, γ, the largest finite number and β, in the type of the computation."""
    beta = real(1) if scale is None else real(float(scale))
    return n, real(1 - gamma), real(gamma), real(numpy.finfo(real).max), beta


@inlined
def _boundary(x, n):
    """Return the largest dropped and the smallest kept of four magnitudes; NaN spreads."""
    a0, a1, a2, a3 = abs(x[0]), abs(x[1]), abs(x[2]), abs(x[3])
    low, high = numpy.minimum(a0, a1), numpy.maximum(a0, a1)
    low2, high2 = numpy.minimum(a2, a3), numpy.maximum(a2, a3)
    inner, outer = numpy.maximum(low, low2), numpy.minimum(high, high2)
    second, third = numpy.minimum(inner, outer), numpy.maximum(inner, outer)
    first, fourth = numpy.minimum(low, low2), numpy.maximum(high, high2)
    dropped = second if n == 2 else (third if n == 1 else first)
    kept = third if n == 2 else (fourth if n == 1 else second)
    return dropped, kept


@inlined
def _threshold(dropped, kept, weight_dropped, weight_kept, limit):
    """Return (1 - γ)·dropped + γ·kept, finite where possible and not below ``dropped``."""
    t = weight_dropped * min(dropped, limit) + weight_kept * min(kept, limit)
    return dropped if weight_kept == 0 else numpy.maximum(t, dropped)


@inlined
def _shrink(x, t, beta, zero):
    """Return β·sign(x)·(|x| - t) where |x| > t, else +0.0; NaN stays."""
    return beta * (zero if abs(x) <= t else x - numpy.copysign(t, x))


@compiled
def _contiguous_groups4(x, out, n, weight_dropped, weight_kept, limit, beta):
    zero = x.dtype.type(0)
    for r in range(len(x) // 4):
        k = 4 * r
        v = x[k], x[k + 1], x[k + 2], x[k + 3]
        dropped, kept = _boundary(v, n)
        t = _threshold(dropped, kept, weight_dropped, weight_kept, limit)
        out[k], out[k + 1] = _shrink(v[0], t, beta, zero), _shrink(v[1], t, beta, zero)
        out[k + 2], out[k + 3] = _shrink(v[2], t, beta, zero), _shrink(v[3], t, beta, zero)


@compiled
def _strided_groups4(x, out, n, weight_dropped, weight_kept, limit, beta):
    zero = x.dtype.type(0)
    for r in range(len(x)):
        for i in range(x.shape[2]):
            v = x[r, 0, i], x[r, 1, i], x[r, 2, i], x[r, 3, i]
            dropped, kept = _boundary(v, n)
            t = _threshold(dropped, kept, weight_dropped, weight_kept, limit)
            out[r, 0, i], out[r, 1, i] = _shrink(v[0], t, beta, zero), _shrink(v[1], t, beta, zero)
            out[r, 2, i], out[r, 3, i] = _shrink(v[2], t, beta, zero), _shrink(v[3], t, beta, zero)


@compiled
def _prune_contiguous_groups4(x, out, code, n, weight_dropped, weight_kept, limit, beta):
    """Two contiguous groups per byte: x and out (8·bytes), code (bytes)."""
    zero = x.dtype.type(0)
    for b in range(len(code)):
        k = 8 * b
        v = x[k], x[k + 1], x[k + 2], x[k + 3]
        w = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        dropped, kept = _boundary(v, n)
        t = _threshold(dropped, kept, weight_dropped, weight_kept, limit)
        dropped, kept = _boundary(w, n)
        u = _threshold(dropped, kept, weight_dropped, weight_kept, limit)
        v0, v1 = _shrink(v[0], t, beta, zero), _shrink(v[1], t, beta, zero)
        v2, v3 = _shrink(v[2], t, beta, zero), _shrink(v[3], t, beta, zero)
        w0, w1 = _shrink(w[0], u, beta, zero), _shrink(w[1], u, beta, zero)
        w2, w3 = _shrink(w[2], u, beta, zero), _shrink(w[3], u, beta, zero)
        out[k], out[k + 1], out[k + 2], out[k + 3] = v0, v1, v2, v3
        out[k + 4], out[k + 5], out[k + 6], out[k + 7] = w0, w1, w2, w3
        first = v0 != 0, v1 != 0, v2 != 0, v3 != 0
        second = w0 != 0, w1 != 0, w2 != 0, w3 != 0
        code[b] = packed_flags(first, second)
