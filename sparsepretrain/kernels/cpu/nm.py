"""Hard N:M masks in loops; see :mod:`sparsepretrain.kernels.nm`."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import INTEGER_OF_SIZE, packed_shape
from sparsepretrain.kernels.cpu.launch import (
    compiled,
    groups_of,
    inlined,
    run,
)

TILE = 64
"""Most groups in a tile; their loops are what is vectorised."""


def nm_mask(x: Tensor, n: int, m: int, dim: int, low: bool, packed: bool = False) -> Tensor:
    """Mask of the n < m largest; ``low``: the smaller index wins ties.

    ``packed``: in bits, where groups of four lie along memory in rows of whole bytes.
    """
    bits = x.detach().contiguous().view(INTEGER_OF_SIZE[x.itemsize])
    keys = groups_of(bits, m, dim)
    rows, inner = len(keys), keys.shape[2]
    word = keys.dtype.type
    numbers = not low, word(numpy.iinfo(word).max)
    if packed and m == 4 and inner == 1 and x.shape[1:].numel() % 8 == 0:
        code = torch.empty(packed_shape(x.shape), dtype=torch.uint8)
        eights = keys.reshape(-1), code.numpy().reshape(-1)
        run(_eights_along, code.numel(), eights, word(n), *numbers)
        return code
    mask = torch.empty(x.shape, dtype=torch.bool)
    flags = groups_of(mask.view(torch.uint8), m, dim)
    if m == 4 and inner == 1:
        fours = keys.reshape(-1), flags.reshape(-1).view(numpy.uint32)
        run(_fours_along, rows, fours, word(n), *numbers)
    else:
        kernel = _fours_across if m == 4 else _any
        run(kernel, rows, (keys, flags), word(n), *numbers)
    return mask


@inlined
def _kept(x, n, high, magnitude, zero, one):
    """For each of four whether fewer than n others beat it: all pairs are compared.

    |x| as integers: NaN above infinity. On equality the later one wins, if ``high``.
    """
    k0, k1, k2, k3 = x[0] & magnitude, x[1] & magnitude, x[2] & magnitude, x[3] & magnitude
    l10 = one if (k1 > k0) | (high & (k1 == k0)) else zero
    l20 = one if (k2 > k0) | (high & (k2 == k0)) else zero
    l30 = one if (k3 > k0) | (high & (k3 == k0)) else zero
    l21 = one if (k2 > k1) | (high & (k2 == k1)) else zero
    l31 = one if (k3 > k1) | (high & (k3 == k1)) else zero
    l32 = one if (k3 > k2) | (high & (k3 == k2)) else zero
    lost0, lost1 = l10 + l20 + l30, one - l10 + l21 + l31
    lost2, lost3 = one - l20 + one - l21 + l32, one - l30 + one - l31 + one - l32
    return lost0 < n, lost1 < n, lost2 < n, lost3 < n


@compiled
def _fours_along(x, mask, n, high, magnitude):
    """Groups along memory: x (4·groups), mask (groups), four flags in a word."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    none, byte = numpy.uint32(0), numpy.uint32(1)
    for r in range(len(mask)):
        four = x[4 * r], x[4 * r + 1], x[4 * r + 2], x[4 * r + 3]
        a, b, c, d = _kept(four, n, high, magnitude, zero, one)
        head = (byte if a else none) | (byte << 8 if b else none)
        mask[r] = head | (byte << 16 if c else none) | (byte << 24 if d else none)


@inlined
def _nibble(x, n, high, magnitude, zero, one):
    """The flags of four in bits."""
    a, b, c, d = _kept(x, n, high, magnitude, zero, one)
    low = (one if a else zero) | (one << 1 if b else zero)
    return low | (one << 2 if c else zero) | (one << 3 if d else zero)


@compiled
def _eights_along(x, code, n, high, magnitude):
    """Groups along memory: x (8·bytes), code (bytes), two groups to a byte."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for r in range(len(code)):
        k = 8 * r
        first = x[k], x[k + 1], x[k + 2], x[k + 3]
        second = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        low = _nibble(first, n, high, magnitude, zero, one)
        code[r] = low | (_nibble(second, n, high, magnitude, zero, one) << 4)


@compiled
def _fours_across(x, mask, n, high, magnitude):
    """Groups across memory: both (groups, 4, inner)."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for r in range(len(x)):
        for i in range(x.shape[2]):
            four = x[r, 0, i], x[r, 1, i], x[r, 2, i], x[r, 3, i]
            a, b, c, d = _kept(four, n, high, magnitude, zero, one)
            mask[r, 0, i], mask[r, 1, i], mask[r, 2, i], mask[r, 3, i] = a, b, c, d


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


@compiled
def _any(x, mask, n, high, magnitude):
    """Groups of any size: x and mask (groups, m, inner)."""
    rows, m, inner = x.shape
    keys, wins = numpy.empty((m, TILE), x.dtype), numpy.empty((m, TILE), numpy.int32)
    for r in range(0, rows, TILE if inner == 1 else 1):
        for i in range(0, inner, TILE):
            source, target = tile_at(x, r, i), tile_at(mask, r, i)
            _tile(source, target, keys, wins, numpy.int32(m - n), high, magnitude)


@compiled
def _tile(x, mask, keys, wins, lost, high, magnitude):
    m, count = x.shape
    copy(x, keys)
    for p in range(m):
        for t in range(count):
            keys[p, t] &= magnitude
    count_wins(keys, count, wins, high)
    for p in range(m):
        for t in range(count):
            wins[p, t] = wins[p, t] >= lost
    copy(wins[:, :count], mask)
