"""The search of :mod:`sparsepretrain.kernels.transposable` in NumPy, for the CPU.

A mask is a pair of upper rows and a pair of lower rows whose column counts add up to two. There are
36 pairs of rows with 19 different counts, so the best lower half is looked up per count instead of
per mask. Rounding is monotone: the largest of the 90 sums is the largest of the 36 upper halves,
each with the best of its lower halves, to the last bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from sparsepretrain.kernels.groups import in_chunks

Array = Any
CHUNK = 96_000
"""Elements per part; each makes about ten times as many intermediate ones."""


def search(xp: Any, w: Array, columns_kept: list[tuple[int, int]]) -> Array:
    """See :func:`sparsepretrain.kernels.transposable.transposable_mask`.

    Args:
        xp: numpy.
        w: (rows, columns), multiples of 4, fp32, any strides.
        columns_kept: the six ways to keep two of four, best first among equals.
    """
    rows, columns = w.shape[0] // 4, w.shape[1] // 4
    blocks = w.reshape(rows, 4, columns, 4)
    mask = xp.empty(w.shape, xp.bool_)
    # four flags at a time
    flags = mask.view(xp.uint32).reshape(rows, 4, columns)
    halves = _halves(xp, tuple(columns_kept))

    def prepare(_: int) -> Callable[[int, int], None]:
        def work(start: int, stop: int) -> None:
            entries = xp.abs(blocks[start:stop].transpose(1, 3, 0, 2), order="C")
            top, bottom = _best(xp, _bounded(xp, entries), columns_kept, halves)
            for row, half in ((0, top), (2, bottom)):
                flags[start:stop, row] = halves.first[half]
                flags[start:stop, row + 1] = halves.second[half]

        return work

    in_chunks(prepare, rows, 16 * columns, CHUNK)
    return mask


class _Halves(NamedTuple):
    """Pairs of rows, numbered 6·first + second."""

    first: Array
    """Flags of the first row, in one uint32."""
    second: Array
    counted: list[int]
    """Number of the column counts."""
    missing: list[int]
    """Number of the column counts that complete them to two everywhere."""


@functools.lru_cache(maxsize=1)
def _halves(xp: Any, columns_kept: tuple[tuple[int, int], ...]) -> _Halves:
    flags = [[column in kept for column in range(4)] for kept in columns_kept]
    words = xp.array(flags).view(xp.uint32)[:, 0]
    pairs = list(itertools.product(range(6), repeat=2))
    counts = [tuple(a + b for a, b in zip(flags[i], flags[j], strict=True)) for i, j in pairs]
    number = {count: index for index, count in enumerate(dict.fromkeys(counts))}
    return _Halves(
        xp.array([words[i] for i, _ in pairs]),
        xp.array([words[j] for _, j in pairs]),
        [number[count] for count in counts],
        [number[tuple(2 - c for c in count)] for count in counts],
    )


def _bounded(xp: Any, entries: Array) -> Array:
    """Magnitudes whose sums of eight are finite; NaN counts as infinite."""
    most = xp.finfo(entries.dtype).max
    if entries.max(initial=0) <= most / 16:  # false for NaN
        return entries
    xp.copyto(entries, most, where=~(entries <= most))
    huge = (entries > most / 16).any((0, 1))
    return xp.where(huge, entries / 16, entries)


def _best(
    xp: Any, entries: Array, pairs: list[tuple[int, int]], halves: _Halves
) -> tuple[Array, Array]:
    """Numbers of the upper and the lower half of the best mask; (4, 4, …) -> two of (…)."""
    shape = entries.shape[2:]
    sums = xp.stack([entries[:, i] + entries[:, j] for i, j in pairs], 1)
    upper = (sums[0][:, None] + sums[1]).reshape(36, *shape)
    lower = (sums[2][:, None] + sums[3]).reshape(36, *shape)
    best_of: dict[int, Array] = {}
    for count, half in zip(halves.counted, lower, strict=True):
        known = best_of.get(count)
        best_of[count] = half if known is None else xp.maximum(known, half)
    total = xp.empty_like(upper)
    for rest, half, out in zip(halves.missing, upper, total, strict=True):
        xp.add(half, best_of[rest], out=out)
    best = total.max(axis=0)
    top = _first(xp, total == best)
    chosen = xp.take_along_axis(upper, top[None].astype(xp.intp), 0)
    fits = (
        xp.array(halves.counted, xp.uint8)[:, None, None] == xp.array(halves.missing, xp.uint8)[top]
    )
    fits &= xp.add(chosen, lower, out=lower) == best
    return top, _first(xp, fits)


def _first(xp: Any, flags: Array) -> Array:
    """Index of the first true along axis 0; each column has one."""
    index = flags.view(xp.uint8)
    index -= 1  # 0 where true, 255 elsewhere
    index |= xp.arange(len(index), dtype=xp.uint8)[:, None, None]
    return index.min(axis=0)
