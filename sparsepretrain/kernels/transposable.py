"""Transposable masks: 2:4 along both axes at once (Hu et al., ICML 2024, arXiv:2404.01847)."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from sparsepretrain.kernels.common import PAIRS
from sparsepretrain.kernels.dispatch import kernel_of

PATTERNS_90 = [
    choice
    for choice in itertools.product(range(6), repeat=4)
    if all(sum(column in PAIRS[row] for row in choice) == 2 for column in range(4))
]
"""The 90 masks that are 2:4 along both axes of a 4×4 block: an index into PAIRS for each row; in
descending order of row-major bits."""


def transposable_mask(w: Tensor, *, backend: str | None = None) -> Tensor:
    """Return the best of the 90 masks with two ones in every row and column of each 4×4 block.

    Best is the largest sum of kept magnitudes; equal sums: the first pattern in descending order
    of its row-major bits. Sums are formed in fp32 in one fixed order (pairs, rows, halves), so
    every device chooses the same mask. NaN counts as infinite, infinities as the largest number.

    Args:
        w: (out_features, in_features), both multiples of 4; any floating dtype and strides.

    Returns:
        bool mask of the shape of ``w``.

    Raises:
        ValueError: not two-dimensional, or a size that is not a multiple of 4.
    """
    kernel = kernel_of("transposable_mask", backend, w)
    if w.dim() != 2 or w.shape[0] % 4 or w.shape[1] % 4:
        size = tuple(w.shape)
        raise ValueError(f"transposable_mask: both sizes must be multiples of 4, got {size}")
    if kernel:
        return kernel(w.detach())
    rows, columns = w.shape[0] // 4, w.shape[1] // 4
    magnitude = w.detach().float().abs().nan_to_num(nan=torch.inf)
    blocks = magnitude.reshape(rows, 4, columns, 4).permute(0, 2, 1, 3).reshape(-1, 4, 4)
    most = torch.finfo(torch.float32).max
    # eight of the largest numbers overflow: such blocks are compared at a sixteenth
    huge = (blocks > most / 16).any(-1).any(-1)[:, None, None]
    blocks = torch.where(huge, blocks.clamp(max=most) / 16, blocks)
    top, bottom, bits = _patterns(w.device)
    pairs = torch.stack([blocks[:, :, i] + blocks[:, :, j] for i, j in PAIRS], -1)
    upper = (pairs[:, 0, :, None] + pairs[:, 1, None, :]).flatten(1)
    lower = (pairs[:, 2, :, None] + pairs[:, 3, None, :]).flatten(1)
    best = (upper[:, top] + lower[:, bottom]).argmax(-1)  # argmax returns the first of equals
    mask = bits[best].view(rows, columns, 4, 4).permute(0, 2, 1, 3)
    return mask.reshape(w.shape)


@functools.lru_cache(maxsize=8)
def _patterns(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices of the upper and lower row pairs, and the (90, 16) bits, by pattern."""
    bits = [[column in PAIRS[row] for row in p for column in range(4)] for p in PATTERNS_90]
    return (
        torch.tensor([p[0] * 6 + p[1] for p in PATTERNS_90], device=device),
        torch.tensor([p[2] * 6 + p[3] for p in PATTERNS_90], device=device),
        torch.tensor(bits, device=device),
    )
