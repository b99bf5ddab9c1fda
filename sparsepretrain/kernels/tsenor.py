"""TSENOR: transposable N:M masks of many blocks at once (Meng et al., arXiv:2505.23949).

A block's mask is the S with rows and columns that sum to N and 0 ≤ S ≤ 1 for which ⟨S, |W|⟩ is
largest. With an entropy term that problem is solved by Dykstra's projections: scale the rows, scale
the columns, clip at 1. The result is rounded greedily and completed by swaps.

Blocks lie along the last axis, so that every operation is element-wise over all of them and sums
are formed in one fixed order: the mask of a block depends on nothing but that block, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHARPNESS = 40.0
"""τ, the weight of magnitudes against entropy, relative to the largest magnitude of a block."""
ITERATIONS = 100
"""Rounds of projections. At 4:8, 300 rounds lose as much as 100, and 50 lose four times as much."""
EXPONENT_BITS = 10
"""The exponential is (1 + x/2ᵏ) to the power of 2ᵏ, by k squarings: libraries round exp
differently, and the masks of ranks and devices would differ with it."""
ENTRIES = {"cpu": 2**18, "cuda": 2**25}
"""Entries that are solved together, by device: what fits the cache of a core; few launches."""


def tsenor(magnitudes: Tensor, n: int) -> Tensor:
    """Return masks with exactly N ones in every row and column, near the largest kept sum.

    Args:
        magnitudes: (blocks, M, M), fp32, all finite and at least 0.
        n: ones per row and column, 1 ≤ n ≤ M.

    Returns:
        (blocks, M, M), bool.
    """
    size = magnitudes.shape[-1] ** 2
    chunk = max(1, ENTRIES.get(magnitudes.device.type, ENTRIES["cuda"]) // size)
    parts = [_solve(part, n) for part in magnitudes.split(chunk)]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _solve(magnitudes: Tensor, n: int) -> Tensor:
    largest = magnitudes.amax((1, 2), keepdim=True)
    # The smallest normal number, for blocks of zeros and of subnormal numbers.
    scaled = magnitudes / largest.clamp(min=torch.finfo(magnitudes.dtype).tiny)
    scaled = scaled.permute(1, 2, 0).contiguous()
    mask = _round(_relax(scaled, n), n)
    _complete_(mask, scaled, n)
    return mask.permute(2, 0, 1)


def _relax(scaled: Tensor, n: int) -> Tensor:
    """Return the optimum with entropy, (M, M, blocks), whose rows and columns sum to about N."""
    s = (scaled - 1).mul_(SHARPNESS / 2**EXPONENT_BITS).add_(1)
    for _ in range(EXPONENT_BITS):
        s.mul_(s)
    q = torch.ones_like(s)
    for _ in range(ITERATIONS):
        s.mul_(n / _sum(s.unbind(1))[:, None])
        s.mul_(n / _sum(s.unbind(0)))
        # Dykstra's correction of the clipping. It replaces the last one, which z contains.
        z = q.mul_(s)
        s = z.clamp(max=1)
        q = z / s
    return s


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Add in order; `torch.sum` orders additions by shape, strides and device."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def _round(s: Tensor, n: int) -> Tensor:
    """Take entries in descending order wherever row and column have fewer than N ones."""
    m, _, blocks = s.shape
    order = s.view(m * m, blocks).sort(dim=0, descending=True, stable=True).indices
    block = torch.arange(blocks, device=s.device)
    mask = torch.zeros(m * m, blocks, dtype=torch.bool, device=s.device)
    counts = torch.zeros(2, m, blocks, dtype=torch.int32, device=s.device)
    rows, columns = counts.view(2, m * blocks)
    row_places = (order // m).mul_(blocks).add_(block)
    column_places = (order % m).mul_(blocks).add_(block)
    places = order.mul_(blocks).add_(block)
    flat = mask.view(-1)
    for row, column, place in zip(row_places, column_places, places, strict=True):
        of_row, of_column = rows[row], columns[column]
        fits = (of_row < n) & (of_column < n)
        rows[row] = of_row + fits
        columns[column] = of_column + fits
        flat[place] = fits
    return mask.view(m, m, blocks)


def _complete_(mask: Tensor, scaled: Tensor, n: int) -> None:
    """Swap until every row and column has N ones: one of row i and one of column j for one other.

    After greedy rounding a row i and a column j that lack ones meet in a one. A column-j zero
    therefore lies in a row that is full, whose N ones cannot all lie in the fewer than N columns
    where row i has one. So there is a one at (i', j') with zeros at (i, j') and (i', j): exchange
    them. All pairs of lacking rows and columns still meet in ones afterwards.
    """
    m = mask.shape[0]
    while True:
        lacking = mask.sum(1) < n  # as many ones lack in rows as in columns
        (open_blocks,) = lacking.any(0).nonzero(as_tuple=True)
        if not len(open_blocks):
            return
        part = mask[:, :, open_blocks]
        a = scaled[:, :, open_blocks]
        i = lacking[:, open_blocks].int().argmax(0)
        j = (part.sum(0) < n).int().argmax(0)
        block = torch.arange(len(open_blocks), device=mask.device)
        by_row, by_column = a[i, :, block].t(), a[:, j, block]
        gain = by_row[None] + by_column[:, None] - a
        is_free = ~part[i, :, block].t()[None] & ~part[:, j, block][:, None]
        swap = gain.masked_fill(~(part & is_free), -torch.inf).view(m * m, -1).argmax(0)
        row, column = swap // m, swap % m
        mask[row, column, open_blocks] = False
        mask[i, column, open_blocks] = True
        mask[row, j, open_blocks] = True
