"""Triton kernel of :mod:`sparsepretrain.kernels.transposable`: the search stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import PAIRS, PATTERNS_90
from sparsepretrain.kernels.triton.launch import (
    INTERPRETED,
    Rows,
    Tile,
    load_fours,
    operator,
    store_fours,
    tile_of,
)

_CHOICES: tl.constexpr = tl.constexpr(tuple(PATTERNS_90))
_COUNT: tl.constexpr = tl.constexpr(len(PATTERNS_90))


def _bits(pattern: tuple[int, ...], *, by_columns: bool) -> int:
    """Kept positions of a block: bit 4·line + place."""
    kept = [(row, column) for row, pair in enumerate(pattern) for column in PAIRS[pair]]
    return sum(1 << (4 * c + r if by_columns else 4 * r + c) for r, c in kept)


_BITS: tl.constexpr = tl.constexpr(tuple(_bits(p, by_columns=False) for p in PATTERNS_90))
_BITS_BY_COLUMNS: tl.constexpr = tl.constexpr(tuple(_bits(p, by_columns=True) for p in PATTERNS_90))
_MOST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_BLOCKS = (16, 128) if INTERPRETED else (4, 32)
"""Blocks of 4×4 per program: one per thread with 4 warps."""


@operator("transposable_mask", fake=lambda w: torch.empty_like(w, dtype=torch.bool))
def transposable_mask(w: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.transposable_mask`."""
    mask = torch.empty_like(w, dtype=torch.bool)
    if not w.numel():
        return mask
    # the 90 patterns are closed under transposition, but not their order: the kernel is told
    # which axis lies along memory and reads the block accordingly
    by_columns = w.stride(0) < w.stride(1)
    source, target = (w.t(), mask.t()) if by_columns else (w, mask)
    lines, length = source.shape[0] // 4, source.shape[1] // 4
    grid = (-(-lines // _BLOCKS[0]) * -(-length // _BLOCKS[1]),)
    reach = max(
        sum(n * abs(s) for n, s in zip(t.shape, t.stride(), strict=True)) for t in (source, target)
    )
    rows, out = (Rows(t, 1, t.stride(0), 0, t.stride(1)) for t in (source, target.view(torch.int8)))
    tile = Tile(*_BLOCKS, rows.stride == 1 and out.stride == 1, reach >= 2**31)
    with torch.cuda.device_of(w):
        _search[grid](
            rows, out, lines, length, TILE=tile, BY_COLUMNS=by_columns, enable_fp_fusion=False
        )
    return mask


@triton.jit
def _comparable(x0, x1, x2, x3, huge):
    """Magnitudes as the reference compares them: NaN is infinite, infinity the largest number."""
    x0, x1, x2, x3 = _bounded(x0, huge), _bounded(x1, huge), _bounded(x2, huge), _bounded(x3, huge)
    return x0, x1, x2, x3


@triton.jit
def _bounded(x, huge):
    a = tl.where(x != x, float("inf"), tl.abs(x))
    return tl.where(huge, tl.minimum(a, _MOST) * 0.0625, a)


@triton.jit
def _is_huge(x0, x1, x2, x3):
    """Whether eight such numbers could overflow (NaN included)."""
    limit: tl.constexpr = _MOST / 16
    small = (tl.abs(x0) <= limit) & (tl.abs(x1) <= limit)
    return ~(small & (tl.abs(x2) <= limit) & (tl.abs(x3) <= limit))


@triton.jit
def _pair_sums(a, b, c, d):
    """Kept magnitude of a row for each of the six ways to keep two, in the order of PAIRS."""
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def _search(w, out, lines, length, TILE: tl.constexpr, BY_COLUMNS: tl.constexpr):
    line, block = tile_of(lines, length, TILE)
    mask = line < lines
    starts = line * 4 * w.outer_stride
    a0, a1, a2, a3 = load_fours(w, starts, block, mask, length, TILE)
    starts += w.outer_stride
    b0, b1, b2, b3 = load_fours(w, starts, block, mask, length, TILE)
    starts += w.outer_stride
    c0, c1, c2, c3 = load_fours(w, starts, block, mask, length, TILE)
    starts += w.outer_stride
    d0, d1, d2, d3 = load_fours(w, starts, block, mask, length, TILE)
    huge = _is_huge(a0, a1, a2, a3) | _is_huge(b0, b1, b2, b3)
    huge |= _is_huge(c0, c1, c2, c3) | _is_huge(d0, d1, d2, d3)
    a0, a1, a2, a3 = _comparable(a0, a1, a2, a3, huge)
    b0, b1, b2, b3 = _comparable(b0, b1, b2, b3, huge)
    c0, c1, c2, c3 = _comparable(c0, c1, c2, c3, huge)
    d0, d1, d2, d3 = _comparable(d0, d1, d2, d3, huge)
    if BY_COLUMNS:
        row0, row1 = _pair_sums(a0, b0, c0, d0), _pair_sums(a1, b1, c1, d1)
        row2, row3 = _pair_sums(a2, b2, c2, d2), _pair_sums(a3, b3, c3, d3)
    else:
        row0, row1 = _pair_sums(a0, a1, a2, a3), _pair_sums(b0, b1, b2, b3)
        row2, row3 = _pair_sums(c0, c1, c2, c3), _pair_sums(d0, d1, d2, d3)
    best = tl.full(huge.shape, -1.0, tl.float32)
    kept = tl.zeros(huge.shape, tl.int32)
    for p in tl.static_range(_COUNT):
        upper = row0[_CHOICES[p][0]] + row1[_CHOICES[p][1]]
        lower = row2[_CHOICES[p][2]] + row3[_CHOICES[p][3]]
        score = upper + lower
        better = score > best  # strictly: the first of equals stays
        best = tl.where(better, score, best)
        kept = tl.where(better, _BITS_BY_COLUMNS[p] if BY_COLUMNS else _BITS[p], kept)
    starts = line * 4 * out.outer_stride
    for r in tl.static_range(4):
        m0, m1 = (kept >> (4 * r)) & 1, (kept >> (4 * r + 1)) & 1
        m2, m3 = (kept >> (4 * r + 2)) & 1, (kept >> (4 * r + 3)) & 1
        store_fours(out, starts, block, mask, length, m0, m1, m2, m3, TILE)
        starts += out.outer_stride
