"""The masks of :mod:`sparsepretrain.kernels.nm` in NumPy, for the CPU.

Every element is compared with those 1, 2, … M - 1 places later in its group and is kept when it
beats at least M - N others: nothing is sorted, nothing is transposed. Where the places of a group
lie next to each other, all groups are compared with themselves shifted, and the pairs that straddle
two groups are struck out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sparsepretrain.kernels.groups import in_chunks

Array = Any
CHUNK = 66_000
"""Elements per part; most of the work is on bytes."""
SHORT = 32
"""Below this distance between the places of a group, shifting beats comparing rows."""


def largest(
    xp: Any, bits: Array, n: int, m: int, inner: int, ties: str, pruned: Array | None = None
) -> Array:
    """Mask of the n largest of every m integers that lie ``inner`` apart.

    Args:
        xp: numpy.
        bits: contiguous signed integers; the sign bit is ignored.
        n, m: the pattern, m ≤ 127.
        inner: elements from one place of a group to the next.
        ties: ``high`` or ``low``: which of two equals is kept.
        pruned: filled with ``bits`` where the mask is true, else 0; shape and type of ``bits``.
    """
    kept = xp.empty(bits.shape, xp.bool_)
    width = m * inner
    shape = (bits.size // max(width, 1), width)
    source, target = bits.reshape(shape), kept.reshape(shape)
    values = None if pruned is None else pruned.reshape(shape)
    later_wins = xp.greater_equal if ties == "high" else xp.greater
    magnitude = xp.array(xp.iinfo(bits.dtype).max, bits.dtype)
    count_wins = _by_shifts if inner < SHORT else _by_rows

    def prepare(rows: int) -> Callable[[int, int], None]:
        keys = xp.empty((rows, width), bits.dtype)
        flags, wins = xp.empty((2, rows, width), xp.int8)

        def work(start: int, stop: int) -> None:
            here = slice(stop - start)
            xp.bitwise_and(source[start:stop], magnitude, out=keys[here])
            count_wins(xp, keys[here], flags[here], wins[here], m, inner, later_wins)
            mask = xp.greater_equal(wins[here], m - n, out=target[start:stop])
            if values is not None:
                all_ones = xp.negative(mask.view(xp.int8), out=wins[here])  # or all zeros
                xp.copyto(keys[here], all_ones)
                xp.bitwise_and(source[start:stop], keys[here], out=values[start:stop])

        return work

    in_chunks(prepare, len(source), width, CHUNK)
    return kept


def _by_rows(
    xp: Any, keys: Array, flags: Array, wins: Array, m: int, inner: int, later_wins: Any
) -> None:
    """Set ``wins`` to the number of others in the group that each key beats; (groups, width)."""
    key, flag, win = (a.reshape(-1, m, inner) for a in (keys, flags, wins))
    # as if a place beat all later ones; corrected by each that does better
    win[:] = xp.arange(m - 1, -1, -1, dtype=xp.int8)[:, None]
    for shift in range(1, m):
        later = flag[:, shift:]
        later_wins(key[:, shift:], key[:, :-shift], out=later.view(xp.bool_))
        win[:, :-shift] -= later
        win[:, shift:] += later


def _by_shifts(
    xp: Any, keys: Array, flags: Array, wins: Array, m: int, inner: int, later_wins: Any
) -> None:
    """The same with all groups in one row."""
    key, flag, win = (a.reshape(-1) for a in (keys, flags, wins))
    before, within = _patterns(xp, m, inner, len(keys))
    unit = before.dtype  # bytes, or a whole group of them
    words = flag.view(unit)
    win.view(unit)[:] = before
    for shift in range(1, m):
        step = shift * inner
        later = flag[:-step]
        later_wins(key[step:], key[:-step], out=later.view(xp.bool_))
        words &= within(shift)
        win[:-step] -= later
        win[step:] += later


def _patterns(xp: Any, m: int, inner: int, groups: int) -> tuple[Array, Callable[[int], Array]]:
    """(number of later places, shift -> 1 where the place that much later is in the group).

    For every element, as bytes, or, where a group fills a word, one word that holds for all groups.
    """
    if inner == 1 and m in (2, 4, 8):
        place, unit = xp.arange(m, dtype=xp.int8), f"u{m}"
    else:
        place, unit = _places(xp, m, inner, groups), "i1"
    return (m - 1 - place).view(unit), lambda shift: (place < m - shift).view(unit)


@functools.lru_cache(maxsize=4)
def _places(xp: Any, m: int, inner: int, groups: int) -> Array:
    """Place in its group of every element; int8."""
    return xp.tile(xp.repeat(xp.arange(m, dtype=xp.int8), inner), groups)
