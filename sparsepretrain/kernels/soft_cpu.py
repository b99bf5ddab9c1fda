"""The soft threshold of :mod:`sparsepretrain.kernels.soft` for the CPU, in parts.

S(x) = x - clip(x, -t, t): the same rounding as sign(x)·(|x| - t), in three operations. Where t is
infinite the difference would be inf - inf, and where it is zero, -0.0 - 0.0; parts with such groups
take a step more. The operations are torch's: each runs on all its threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import buffers

PART = 2**19
"""Elements per part: enough to be worth starting torch's threads for each operation."""


def shrink(
    xp: Any, x: Tensor, n: int, m: int, inner: int, threshold: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """See :func:`sparsepretrain.kernels.soft.soft_threshold`.

    Args:
        xp: numpy.
        x: contiguous fp32 or fp64.
        n, m: the pattern, n < m.
        inner: elements between neighbours of a group.
        threshold: t from the largest magnitude that is dropped and the smallest that is kept.
    """
    out = torch.empty_like(x)
    width = m * inner
    groups = x.numel() // max(width, 1)
    source, target = (a.view(groups, m, inner) for a in (x, out))
    rows = max(1, min(groups, PART // max(width, 1)))
    (memory,) = buffers(xp, ((3, m, rows * inner), x.numpy().dtype))
    for start in range(0, groups, rows):
        here = slice(start, min(start + rows, groups))
        size = (here.stop - start) * inner
        value, ordered, clipped = torch.from_numpy(memory)[:, :, :size].unflatten(2, (-1, inner))
        for mine, place in zip(value.unbind(), source[here].unbind(1), strict=True):
            mine.copy_(place)  # one by one, in long runs
        torch.abs(value, out=ordered)
        t = threshold(*boundary(ordered, clipped, n))
        least, most = (end.item() for end in t.aminmax())
        if least > 0 and most < torch.inf:
            value -= torch.clamp(value, -t, t, out=clipped)
        else:  # NaN, too, which clamp may lose
            torch.maximum(torch.minimum(value, t, out=clipped), -t, out=clipped)
            value = (value - clipped).masked_fill_(value == clipped, 0)
        for mine, place in zip(value.unbind(), target[here].unbind(1), strict=True):
            place.copy_(mine)
    return out


def boundary(a: Tensor, spare: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Order statistics M-N and M-N+1 (from below) along axis 0; NaN spreads.

    Overwrites ``a`` and ``spare`` of the same shape; nothing it returns lies in ``spare``.
    """
    m = len(a)
    if (n, m) == (2, 4):
        # a 4-element sorting network without its outer comparators
        low = torch.minimum(a[::2], a[1::2], out=spare[:2])
        high = torch.maximum(a[::2], a[1::2], out=spare[2:])
        inner = torch.maximum(low[0], low[1], out=a[0])
        outer = torch.minimum(high[0], high[1], out=a[1])
        return torch.minimum(inner, outer, out=a[2]), torch.maximum(inner, outer, out=a[3])
    # n + 1 bubbles rise to the end, or m - n + 1 sink to the start
    rises = 2 * n <= m
    end, other = (torch.maximum, torch.minimum) if rises else (torch.minimum, torch.maximum)
    order = list(a) if rises else list(a)[::-1]
    free = torch.empty_like(a[0])
    for done in range(n + 1 if rises else m - n + 1):
        for j in range(m - 1 - done):
            other(order[j], order[j + 1], out=free)
            end(order[j], order[j + 1], out=order[j + 1])
            order[j], free = free, order[j]
    return (order[m - n - 1], order[m - n]) if rises else (order[n], order[n - 1])
