"""Order statistics of groups of any size, a tile of groups at a time."""

from __future__ import annotations

import numpy

from sparsepretrain.kernels.cpu.launch import inlined

TILE = 64
"""Most groups in a tile; their loops are what is vectorised."""


@inlined
def tile_at(x, r, i):
    """Up to TILE groups of x (rows, m, inner), from x[r, :, i] on, as (m, groups)."""
    return x[r : r + TILE, :, 0].T if x.shape[2] == 1 else x[r, :, i : i + TILE]


@inlined
def copy(source, target):
    """Copy (m, groups) to the beginning of another; other work on strides would not vectorise."""
    for p in range(len(source)):
        for t in range(source.shape[1]):
            target[p, t] = source[p, t]


@inlined
def count_wins(keys, count, wins, high):
    """How many others of its group each key beats; of equals the later if ``high``."""
    m = len(keys)
    zero, one = numpy.int32(0), numpy.int32(1)
    for i in range(m):
        for t in range(count):
            wins[i, t] = m - 1 - i  # as if it beat all later ones, corrected below
    for i in range(m):
        for j in range(i + 1, m):
            for t in range(count):
                a, b = keys[i, t], keys[j, t]
                later = one if (b > a) | (high & (b == a)) else zero
                wins[i, t] -= later
                wins[j, t] += later
