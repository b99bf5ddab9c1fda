"""The two masks of Bi-Mask (Zhang et al., ICML 2023, arXiv:2302.06058)."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from sparsepretrain.kernels.nm import nm_prune


def bimask_masks(
    w: Tensor, permutation: Tensor, n: int = 2, m: int = 4, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Forward mask along in_features, backward mask along the permuted out_features.

    The backward mask keeps the N largest of every M rows of |W∘Mf| in permuted order and lies
    inside the forward mask.

    Args:
        w: (out_features, in_features), both multiples of ``m``.
        permutation: (out_features) int: row ``permutation[k]`` stands at place k.
        n: elements kept of every m, 1 ≤ n ≤ m.
        m: group size.

    Returns:
        (forward, backward), bool, shape of ``w``.

    Raises:
        ValueError: impossible pattern, sizes that do not divide, permutation of another length.
    """
    order = _order("bimask_masks", w, permutation)
    pruned, forward = nm_prune(w, n, m, dim=1, backend=backend)
    kept = nm_prune(pruned.index_select(0, order), n, m, dim=0, backend=backend)[1]
    return forward, _put_back(kept, order) & forward


def bimask_prune(
    w: Tensor, permutation: Tensor, n: int = 2, m: int = 4, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(W∘Mf, Mf, W∘Mb) with the masks of :func:`bimask_masks`, which says the rest."""
    order = _order("bimask_prune", w, permutation)
    pruned, forward = nm_prune(w, n, m, dim=1, backend=backend)
    twice = nm_prune(pruned.index_select(0, order), n, m, dim=0, backend=backend)[0]
    return pruned, forward, _put_back(twice, order)


def bimask_ones(
    w: Tensor, permutations: Tensor, n: int = 2, m: int = 4, *, backend: str | None = None
) -> Tensor:
    """Count the ones in the backward mask of :func:`bimask_masks` under each permutation.

    M rows hold N ones in a column wherever the forward mask has N or more there, so that counting
    decides and nothing is compared, unless the forward mask had to keep zeros.
    ``permutations`` are (candidates, out_features) int, the counts int64.
    """
    orders = _order("bimask_ones", w, permutations)
    pruned, forward = nm_prune(w, n, m, dim=1, backend=backend)
    if bool(((pruned == 0) & forward).any()):  # equal to what lies outside the mask
        found = (bimask_masks(w, order, n, m, backend=backend)[1] for order in orders)
        return torch.stack([backward.sum() for backward in found])
    flags = forward.view(torch.uint8) if m < 256 else forward.int()
    groups = (flags.index_select(0, order).unflatten(0, (-1, m)).unbind(1) for order in orders)
    return torch.stack([reduce(torch.add, parts).clamp(max=n).sum() for parts in groups])


def _order(name: str, w: Tensor, permutations: Tensor) -> Tensor:
    """Return the permutations as indices into the rows of ``w``."""
    if permutations.shape[-1:] != w.shape[:1]:
        length = tuple(permutations.shape)
        raise ValueError(f"{name}: permutation must have {w.shape[0]} entries, got {length}")
    return permutations.to(w.device).long()


def _put_back(rows: Tensor, order: Tensor) -> Tensor:
    """Row k of ``rows`` at place ``order[k]``."""
    return rows.index_select(0, order.argsort())  # gathering is five times as fast as scattering
