"""The masks of :mod:`sparsepretrain.kernels.nm` in NumPy, for the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from sparsepretrain.kernels.groups import in_chunks

Array = Any
CHUNK = 96_000
"""Elements per part: most of the work is on bytes."""
ROWS = 32
"""Inner size from which on a comparison of whole rows is faster than one of shifted groups."""


def largest(xp: Any, bits: Array, n: int, m: int, inner: int, ties: str) -> Array:
    """Mask of the n largest of every m integers that lie ``inner`` apart.

    Every position is compared with those 1, 2, … m - 1 places later; it is kept when it beats at
    least m - n others. Nothing is sorted and nothing is transposed.

    Args:
        xp: numpy.
        bits: contiguous signed integers; the sign bit is ignored.
        n, m: the pattern, m ≤ 127.
        inner: elements between neighbours of a group.
        ties: ``high`` or ``low``: which of two equals is kept.
    """
    kept = xp.empty(bits.shape, xp.bool_)
    width = m * inner
    groups, out = (a.reshape(bits.size // max(width, 1), width) for a in (bits, kept))
    later_wins = xp.greater_equal if ties == "high" else xp.greater
    magnitude = xp.array(xp.iinfo(bits.dtype).max, bits.dtype)

    def prepare(rows: int) -> Callable[[int, int], None]:
        keys = xp.empty((rows, width), bits.dtype)
        flags = xp.empty(rows * width, xp.int8)
        within = xp.empty(rows * width, xp.bool_)
        wins = xp.empty((rows, width), xp.int8)
        by_rows = inner >= ROWS
        place = xp.arange(m, dtype=xp.int8)[None, :, None]
        if not by_rows:
            place = _places(xp, m, inner, rows)

        def work(start: int, stop: int) -> None:
            count = stop - start
            # axis 1: places in a group, or, where rows are short, in all groups of the part
            shape = (count, m, inner) if by_rows else (1, count * m, inner)
            key, win = keys[:count].reshape(shape), wins[:count].reshape(shape)
            xp.bitwise_and(groups[start:stop], magnitude, out=keys[:count])
            # as if a position beat all later ones; corrected by each that does better
            xp.subtract(m - 1, place[:, : shape[1]], out=win)
            for shift in range(1, m):
                size = (shape[0], shape[1] - shift, inner)
                later, valid = (a[: math.prod(size)].reshape(size) for a in (flags, within))
                later_wins(key[:, shift:], key[:, :-shift], out=later.view(xp.bool_))
                if not by_rows:  # pairs that straddle two groups do not count
                    later &= xp.less(place[:, : size[1]], m - shift, out=valid).view(xp.int8)
                win[:, :-shift] -= later
                win[:, shift:] += later
            xp.greater_equal(wins[:count], m - n, out=out[start:stop])

        return work

    in_chunks(prepare, len(groups), width, CHUNK)
    return kept


@functools.lru_cache(maxsize=8)
def _places(xp: Any, m: int, inner: int, rows: int) -> Array:
    """Place in the group, of every element of a part; (1, rows·m, inner) int8."""
    row = xp.repeat(xp.arange(m, dtype=xp.int8), inner)
    return xp.tile(row, rows).reshape(1, rows * m, inner)
