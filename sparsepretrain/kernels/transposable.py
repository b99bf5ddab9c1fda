"""Transposable masks: N:M along both axes at once (2:4: Hu et al., ICML 2024, arXiv:2404.01847)."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from sparsepretrain.kernels.common import PAIRS
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.tsenor import tsenor

PATTERNS_90 = [
    choice
    for choice in itertools.product(range(6), repeat=4)
    if all(sum(column in PAIRS[row] for row in choice) == 2 for column in range(4))
]
"""The 90 masks that are 2:4 along both axes of a 4×4 block: an index into PAIRS for each row; in
descending order of row-major bits."""


def transposable_mask(
    w: Tensor, n: int = 2, m: int = 4, *, exact: bool = False, backend: str | None = None
) -> Tensor:
    """Return a mask with exactly N ones in every row and column of each M×M block.

    2:4: the best of the 90 masks, by sum of kept magnitudes; equal sums: the first pattern in
    descending order of its row-major bits. Sums are formed in fp32 in one fixed order (pairs, rows,
    halves), so every device chooses the same mask. Other patterns: TSENOR
    (:mod:`sparsepretrain.kernels.tsenor`), less than 1 % below the largest sum on average, or the
    optimum (``exact``). NaN counts as infinite, infinities as the largest number.

    Args:
        w: (out_features, in_features), both multiples of ``m``; any floating dtype and strides.
        n: elements kept of every m, 1 ≤ n ≤ m.
        m: group size.
        exact: solve every block of other patterns than 2:4 by linear programming (scipy's HiGHS),
            which takes milliseconds per block; magnitudes that differ by less than 10⁻⁷ of the
            largest in their block count as equal.

    Returns:
        bool mask of the shape of ``w``.

    Raises:
        ValueError: impossible pattern, not two-dimensional, or a size that is not a multiple of M.
    """
    is_24 = (n, m) == (2, 4)
    kernel = kernel_of("transposable_mask", backend, w)
    if not 1 <= n <= m:
        raise ValueError(f"transposable_mask: N:M needs 1 ≤ N ≤ M, got {n}:{m}")
    if w.dim() != 2 or w.shape[0] % m or w.shape[1] % m:
        size = tuple(w.shape)
        raise ValueError(f"transposable_mask: both sizes must be multiples of {m}, got {size}")
    if is_24 and kernel:
        return kernel(w.detach())
    if backend == "triton" and not is_24:
        text = f"backend='triton' has no {n}:{m} kernel; use 'reference'"
        raise ValueError(f"transposable_mask: {text}")
    if n == m or not w.numel() or w.is_meta:  # there is nothing to search, or nothing to read
        return torch.ones(w.shape, dtype=torch.bool, device=w.device)
    rows, columns = w.shape[0] // m, w.shape[1] // m
    magnitude = w.detach().float().abs().nan_to_num(nan=torch.inf)
    blocks = magnitude.reshape(rows, m, columns, m).permute(0, 2, 1, 3).reshape(-1, m, m)
    if is_24:
        masks = _best_of_90(blocks)
    else:
        blocks = blocks.clamp(max=torch.finfo(torch.float32).max)
        masks = _optimum(blocks, n) if exact else tsenor(blocks, n)
    return masks.view(rows, columns, m, m).permute(0, 2, 1, 3).reshape(w.shape)


def _best_of_90(blocks: Tensor) -> Tensor:
    """Return the best masks of (blocks, 4, 4) magnitudes, NaN excluded."""
    most = torch.finfo(torch.float32).max
    # eight of the largest numbers overflow: such blocks are compared at a sixteenth
    huge = (blocks > most / 16).any(-1).any(-1)[:, None, None]
    blocks = torch.where(huge, blocks.clamp(max=most) / 16, blocks)
    top, bottom, bits = _patterns(blocks.device)
    pairs = torch.stack([blocks[:, :, i] + blocks[:, :, j] for i, j in PAIRS], -1)
    upper = (pairs[:, 0, :, None] + pairs[:, 1, None, :]).flatten(1)
    lower = (pairs[:, 2, :, None] + pairs[:, 3, None, :]).flatten(1)
    best = (upper[:, top] + lower[:, bottom]).argmax(-1)  # argmax returns the first of equals
    return bits[best]


def _optimum(blocks: Tensor, n: int) -> Tensor:
    """Return the masks of (blocks, M, M) finite magnitudes whose kept sums are largest.

    The constraints are totally unimodular, so the vertices, at one of which the dual simplex ends,
    are masks.
    """
    import numpy as np
    from scipy import sparse
    from scipy.optimize import linprog

    m = blocks.shape[-1]
    ones, eye = np.ones((1, m)), sparse.eye_array(m)
    sums = sparse.vstack([sparse.kron(eye, ones), sparse.kron(ones, eye)]).tocsr()
    scaled = blocks.double() / blocks.double().amax((1, 2), keepdim=True).clamp(min=1e-300)
    masks = []
    for block in scaled.flatten(1).cpu().numpy():
        found = linprog(-block, A_eq=sums, b_eq=np.full(2 * m, n), bounds=(0, 1), method="highs-ds")
        if not found.success:
            raise RuntimeError(f"transposable_mask: HiGHS failed on a block: {found.message}")
        masks.append(torch.from_numpy(found.x > 0.5))
    return torch.stack(masks).view(-1, m, m).to(blocks.device)


@functools.lru_cache(maxsize=8)
def _patterns(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices of the upper and lower row pairs, and the (90, 16) bits, by pattern."""
    bits = [[column in PAIRS[row] for row in p for column in range(4)] for p in PATTERNS_90]
    return (
        torch.tensor([p[0] * 6 + p[1] for p in PATTERNS_90], device=device),
        torch.tensor([p[2] * 6 + p[3] for p in PATTERNS_90], device=device),
        torch.tensor(bits, device=device),
    )
