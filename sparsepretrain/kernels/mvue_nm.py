"""Minimum-variance unbiased estimates of any N:M, and what all patterns share.

With magnitudes a and Σp = N, the variance Σa²(1/p - 1) is least for p_i = min(1, a_i/c). The level
c is found by water-filling: values above c are certain, and the others share what is left of N.
The sample is systematic: intervals of length p_i lie end to end, and those that hold u, u+1, …,
u+N-1 are kept. An interval of length 1 always holds one of them and shifts the rest by 1, so
certain values are left out of the row. A kept value becomes a_i/p_i = max(a_i, c).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepretrain.kernels.common import INTEGER_OF_SIZE


def water_filled(x: Sequence[Tensor], n: int, u: Tensor, max_value: float) -> list[Tensor]:
    """Return the estimates of the M values of each group.

    Args:
        x: M tensors of one shape and dtype, fp32 or fp64.
        n: values kept of every M.
        u: draws in [0, 1), of the same shape.
        max_value: largest number of the dtype of the result.
    """
    b, scale, cutoff = _normalize(x, n)
    c = _water_level(b, n)
    is_certain = [v >= c for v in b]
    is_free = [(v < c) & (v > 0) for v in b]
    left = n - _count(is_certain, c)  # values to draw, among so many:
    among = _count(is_free, c)
    point = u * c
    nothing = c * 0  # propagates NaN
    end = nothing
    magnitudes = []
    for v, certain, free in zip(b, is_certain, is_free, strict=True):
        end = end + torch.where(free, v, 0.0)
        # Rounding may let a point fall behind the last interval, or two into one. One is taken by
        # each interval at most, and by all of the last ones if they are as many as the points.
        hit = free & (left > 0) & ((point < end) | (left == among))
        left = left - hit.to(c.dtype)
        among = among - free.to(c.dtype)
        point = point + torch.where(hit, c, 0.0)
        value = kept_value(c, v, scale, cutoff, max_value)
        magnitudes.append(torch.where(certain | hit, value, nothing))
    return signed(x, magnitudes, cutoff)


def _water_level(b: Sequence[Tensor], n: int) -> Tensor:
    """Return c with Σ min(1, b_i/c) = N. It falls from Σb/N as values above it become certain.

    The sum of the others is never formed as "total minus own". Where rounding makes N values
    certain, c stays: nothing is left to share.
    """
    c = _total(b) / n
    for _ in range(n - 1):
        above = [v > c for v in b]
        rest = _total([torch.where(is_above, 0.0, v) for v, is_above in zip(b, above, strict=True)])
        left = n - _count(above, c)
        c = torch.where(left > 0, rest / left.clamp(min=1), c)
    return c


def _normalize(x: Sequence[Tensor], n: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return magnitudes over a power of two, that power, the cutoff of unchanged entries.

    Entries stay as they are, and the others are dropped, in groups with at most N that are not tiny
    relative to the largest; elsewhere that magnitude is infinite.
    """
    a = [v.abs() for v in x]
    largest = a[0]
    for v in a[1:]:
        largest = torch.maximum(largest, v)
    info = torch.finfo(largest.dtype)
    floor = (largest * (info.tiny * 2.0**30)).clamp(min=info.tiny * info.eps)
    few = torch.where(_count([v >= floor for v in a], floor) <= n, floor, torch.inf)
    cutoff = torch.where(_count([v != 0 for v in a], floor) <= n, 0.0, few)
    power, inverse = power_of_two(largest)
    return [v * inverse for v in a], power, cutoff


def power_of_two(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return a power of two that brings the largest magnitude to [2, 4), and its inverse."""
    info = torch.finfo(largest.dtype)
    one = round(1 / info.eps)  # in the field of exponents, whose largest is that of infinity
    infinite = 2 ** (info.bits - 1) - one
    # that of a subnormal or zero is replaced by one with which both powers are normal numbers
    exponent = largest.clamp(min=info.tiny * 2).view(INTEGER_OF_SIZE[largest.itemsize]) & infinite
    inverse = (infinite - exponent).view(largest.dtype)  # of infinity and NaN: 0, which makes NaN
    return (exponent - one).view(largest.dtype), inverse


def signed(x: Sequence[Tensor], magnitudes: Sequence[Tensor], cutoff: Tensor) -> list[Tensor]:
    """Copy the signs of x to ``magnitudes``; return x itself where |x| ≥ ``cutoff``."""
    return [
        torch.where(xi.abs() >= cutoff, xi, torch.copysign(v, xi))
        for xi, v in zip(x, magnitudes, strict=True)
    ]


def kept_value(v: Tensor, b: Tensor, scale: Tensor, cutoff: Tensor, max_value: float) -> Tensor:
    """Return the magnitude of a kept entry; v is |x|/p over the scale."""
    value = (torch.maximum(v, b) * scale).clamp(max=max_value)  # p ≤ 1
    return torch.where(cutoff < torch.inf, 0.0, value)


def _total(parts: Sequence[Tensor]) -> Tensor:
    """Add in order, as the loops do; `torch.sum` orders additions by shape and device."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _count(flags: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the number of true flags, in the dtype of ``like``."""
    return _total([flag.to(like.dtype) for flag in flags])
