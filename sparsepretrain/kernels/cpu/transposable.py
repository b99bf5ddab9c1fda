"""The search for transposable masks in loops; see :mod:`sparsepretrain.kernels.transposable`."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import PAIRS, PATTERNS_90
from sparsepretrain.kernels.cpu.launch import compiled, run

_BLOCKS = 64
"""Most that are searched at once; their loops are what is vectorised."""
_PAIRS = numpy.array(PAIRS)
_PATTERNS = numpy.array(PATTERNS_90)
_FLAGS = numpy.array([[c in pair for c in range(4)] for pair in PAIRS]).view(numpy.uint32)[:, 0]
"""A row of a mask in one word."""


def transposable_mask(w: Tensor) -> Tensor:
    """The best of the 90 masks of each 4×4 block."""
    wide = w.float().contiguous()
    mask = torch.empty(w.shape, dtype=torch.bool)
    rows, columns = w.shape[0] // 4, w.shape[1] // 4
    blocks = wide.numpy().reshape(rows, 4, columns, 4)
    flags = mask.view(torch.uint8).numpy().view(numpy.uint32).reshape(rows, 4, columns)
    most = numpy.finfo(numpy.float32).max
    run(_search, rows if columns else 0, (blocks, flags), most, most / 16)
    return mask


@compiled
def _search(w, flags, most, large):
    """Blocks w (rows, 4, columns, 4), flags (rows, 4, columns)."""
    a, pairs = numpy.empty((16, _BLOCKS), w.dtype), numpy.empty((24, _BLOCKS), w.dtype)
    halves = numpy.empty((72, _BLOCKS), w.dtype)
    best, huge = numpy.empty(_BLOCKS, w.dtype), numpy.empty(_BLOCKS, w.dtype)
    found = numpy.empty(_BLOCKS, numpy.int32)
    for r in range(len(w)):
        for first in range(0, w.shape[2], _BLOCKS):
            end = first + _BLOCKS
            some, target = w[r, :, first:end], flags[r, :, first:end]
            _search_some(some, target, a, pairs, halves, best, found, huge, most, large)


@compiled
def _search_some(w, flags, a, pairs, halves, best, found, huge, most, large):
    blocks, zero, sixteenth = w.shape[1], w.dtype.type(0), w.dtype.type(1 / 16)
    for k in range(16):
        for t in range(blocks):
            a[k, t] = w[k // 4, t, k % 4]
    huge[:] = zero
    for k in range(16):
        for t in range(blocks):
            v, h = abs(a[k, t]), huge[t]
            v = v if v <= most else most  # infinities and NaN
            a[k, t] = v
            huge[t] = v if v > large else h
    # eight of the largest numbers overflow: such blocks are compared at a sixteenth
    for k in range(16):
        for t in range(blocks):
            v, h = a[k, t], huge[t]
            a[k, t] = v * sixteenth if h > zero else v
    for row in range(4):
        for p in range(6):
            i, j = 4 * row + _PAIRS[p, 0], 4 * row + _PAIRS[p, 1]
            for t in range(blocks):
                pairs[6 * row + p, t] = a[i, t] + a[j, t]
    for half in range(2):
        for p in range(6):
            for q in range(6):
                for t in range(blocks):
                    upper, lower = pairs[12 * half + p, t], pairs[12 * half + 6 + q, t]
                    halves[36 * half + 6 * p + q, t] = upper + lower
    best[:], found[:] = -1, 0
    for k in range(len(_PATTERNS)):
        upper = halves[6 * _PATTERNS[k, 0] + _PATTERNS[k, 1]]
        lower = halves[36 + 6 * _PATTERNS[k, 2] + _PATTERNS[k, 3]]
        number = numpy.int32(k)
        for t in range(blocks):
            total, b, f = upper[t] + lower[t], best[t], found[t]
            found[t] = number if total > b else f  # the first of equals
            best[t] = total if total > b else b
    for row in range(4):
        for t in range(blocks):
            flags[row, t] = _FLAGS[_PATTERNS[found[t], row]]
