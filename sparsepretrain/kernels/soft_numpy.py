"""The soft threshold of :mod:`sparsepretrain.kernels.soft` in NumPy, for the CPU.

S(x) = x - clip(x, -t, t): the same rounding as sign(x)·(|x| - t), in three operations. Where t is
infinite the difference would be inf - inf, and where it is zero, -0.0 - 0.0; parts with such groups
take a step more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsepretrain.kernels.groups import buffers, in_chunks

Array = Any
CHUNK = 300_000
"""Elements per part."""


def shrink(xp: Any, x: Array, n: int, m: int, inner: int, gamma: float) -> Array:
    """See :func:`sparsepretrain.kernels.soft.soft_threshold`.

    Args:
        xp: numpy.
        x: contiguous fp32 or fp64.
        n, m: the pattern, n < m.
        inner: elements between neighbours of a group.
        gamma: position of the threshold.
    """
    out = xp.empty_like(x)
    width = m * inner
    shape = (x.size // max(width, 1), m, inner)
    source, target = (a.reshape(shape).swapaxes(0, 1) for a in (x, out))

    def prepare(rows: int) -> Callable[[int, int], None]:
        (both,) = buffers(xp, ((2, m, rows * inner), x.dtype))

        def work(start: int, stop: int) -> None:
            here = (m, stop - start, inner)
            value, clipped = (b[:, : here[1] * inner].reshape(here) for b in both)
            xp.copyto(value, source[:, start:stop])
            xp.abs(value, out=clipped)
            dropped, kept = boundary(xp, clipped, n)
            t = _threshold(xp, dropped, kept, gamma)
            opposite, plain = -t, t.min() > 0 and t.max() < xp.inf  # not plain: NaN, too
            xp.minimum(value, t, out=clipped)  # t may lie in it: NumPy sees to that
            xp.maximum(clipped, opposite, out=clipped)
            same = None if plain else value == clipped
            value -= clipped
            if same is not None:
                xp.copyto(value, 0, where=same)
            for place, shrunk in zip(target[:, start:stop], value, strict=True):
                xp.copyto(place, shrunk)  # all at once would run in steps of m

        return work

    in_chunks(prepare, shape[0], width, CHUNK)
    return out


def boundary(xp: Any, a: Array, n: int) -> tuple[Array, Array]:
    """Order statistics M-N and M-N+1 (from below) along axis 0; NaN spreads.

    Overwrites ``a`` and returns views of it, or of less.
    """
    m = len(a)
    if (n, m) == (2, 4):
        # a 4-element sorting network without its outer comparators
        low, high = xp.minimum(a[::2], a[1::2]), xp.maximum(a[::2], a[1::2])
        inner = xp.maximum(low[0], low[1], out=low[0])
        outer = xp.minimum(high[0], high[1], out=high[0])
        return xp.minimum(inner, outer, out=low[1]), xp.maximum(inner, outer, out=high[1])
    # n + 1 bubbles rise to the end, or m - n + 1 sink to the start
    rises = 2 * n <= m
    end, other = (xp.maximum, xp.minimum) if rises else (xp.minimum, xp.maximum)
    order = list(a) if rises else list(a[::-1])
    spare = xp.empty_like(order[0])
    for done in range(n + 1 if rises else m - n + 1):
        for j in range(m - 1 - done):
            other(order[j], order[j + 1], out=spare)
            end(order[j], order[j + 1], out=order[j + 1])
            order[j], spare = spare, order[j]
    return (order[m - n - 1], order[m - n]) if rises else (order[n], order[n - 1])


def _threshold(xp: Any, dropped: Array, kept: Array, gamma: float) -> Array:
    """(1 - γ)·dropped + γ·kept; see the reference for what keeps it exact at the edges."""
    if gamma == 0.0:
        return dropped
    most = xp.finfo(kept.dtype).max
    t = (1.0 - gamma) * xp.minimum(dropped, most)
    t += gamma * xp.minimum(kept, most)
    return xp.maximum(t, dropped, out=t)
