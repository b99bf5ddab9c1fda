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

from sparsepretrain.kernels.groups import buffers, in_chunks

Array = Any
CHUNK = 2**19
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

    def prepare(rows: int) -> Callable[[int, int], None]:
        choice = Choice(xp, (rows, width), bits.dtype, n, m, inner, ties)

        def work(start: int, stop: int) -> None:
            choice.among(source[start:stop])
            xp.less(choice.lack, 0, out=target[start:stop])
            if values is not None:
                xp.copyto(choice.keys, choice.ones())  # -1 as a byte is -1 as a word
                xp.bitwise_and(source[start:stop], choice.keys, out=values[start:stop])

        return work

    in_chunks(prepare, len(source), width, CHUNK)
    return kept


class Choice:
    """The n largest of every m in parts of at most ``shape``: (rows, multiple of m·inner)."""

    keys: Array
    """Magnitudes of the last part."""
    lack: Array
    """By how many wins each misses being kept; negative: none, it is kept. int8."""

    def __init__(
        self, xp: Any, shape: tuple[int, int], dtype: Any, n: int, m: int, inner: int, ties: str
    ) -> None:
        self.xp, self.n, self.m, self.inner = xp, n, m, inner
        self.later_wins = xp.greater_equal if ties == "high" else xp.greater
        self.magnitude = xp.array(xp.iinfo(dtype).max, dtype)
        byte = (shape, xp.int8)
        self._keys, self._flags, self._lack = buffers(xp, (shape, dtype), byte, byte)

    def among(self, bits: Array) -> None:
        """Set ``keys`` and ``lack`` for integers ``bits``."""
        rows = len(bits)
        self.keys, self.lack, flags = self._keys[:rows], self._lack[:rows], self._flags[:rows]
        self.xp.bitwise_and(bits, self.magnitude, out=self.keys)
        if self.inner < SHORT:
            self._by_shifts(flags)
        else:
            self._by_rows(flags)

    def ones(self) -> Array:
        """-1, all ones, where an element is kept, else 0; int8, in the place of ``lack``."""
        self.lack >>= self.xp.array(7, self.xp.int8)
        return self.lack

    def _by_rows(self, flags: Array) -> None:
        xp, m = self.xp, self.m
        key, flag, lack = (a.reshape(-1, m, self.inner) for a in (self.keys, flags, self.lack))
        # as if a place beat all later ones; corrected by each that does better
        lack[:] = xp.arange(-self.n, m - self.n, dtype=xp.int8)[:, None]
        for shift in range(1, m):
            later = flag[:, shift:]
            self.later_wins(key[:, shift:], key[:, :-shift], out=later.view(xp.bool_))
            lack[:, :-shift] += later
            lack[:, shift:] -= later

    def _by_shifts(self, flags: Array) -> None:
        """The same with all groups in one row."""
        xp = self.xp
        key, flag, lack = (a.reshape(-1) for a in (self.keys, flags, self.lack))
        first, within = _patterns(xp, self.n, self.m, self.inner, len(key))
        unit = first.dtype  # bytes, or a whole group of them
        words = flag.view(unit)
        lack.view(unit)[:] = first
        for shift in range(1, self.m):
            step = shift * self.inner
            later = flag[:-step]
            self.later_wins(key[step:], key[:-step], out=later.view(xp.bool_))
            words &= within(shift)
            lack[:-step] += later
            lack[step:] -= later


def _patterns(
    xp: Any, n: int, m: int, inner: int, size: int
) -> tuple[Array, Callable[[int], Array]]:
    """(place - n, shift -> 1 where the place that much later is in the group).

    For every element, as bytes, or, where a group fills a word, one word that holds for all groups.
    """
    if inner == 1 and m in (2, 4, 8):
        place, unit = xp.arange(m, dtype=xp.int8), f"u{m}"
    else:
        place, unit = _places(xp, m, inner, size), "i1"
    return (place - xp.int8(n)).view(unit), lambda shift: (place < m - shift).view(unit)


@functools.lru_cache(maxsize=4)
def _places(xp: Any, m: int, inner: int, size: int) -> Array:
    """Place in its group of every element; int8."""
    return xp.tile(xp.repeat(xp.arange(m, dtype=xp.int8), inner), size // (m * inner))
