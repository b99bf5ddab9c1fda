"""The two masks of Bi-Mask (Zhang et al., ICML 2023, arXiv:2302.06058)."""

from __future__ import annotations

from torch import Tensor

from sparsepretrain.kernels.groups import apply_mask, choose_backend
from sparsepretrain.kernels.nm import nm_mask


def bimask_masks(
    w: Tensor, permutation: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Forward mask along in_features, backward mask along the permuted out_features.

    The backward mask keeps the two largest of every four rows of |W∘Mf| in permuted order and
    lies inside the forward mask.

    Args:
        w: (out_features, in_features), both multiples of 4.
        permutation: (out_features) int: row ``permutation[k]`` stands at place k.
        backend: None, ``"reference"`` or ``"triton"``.

    Returns:
        (forward, backward), bool, shape of ``w``.

    Raises:
        ValueError: sizes that do not divide, or a permutation of another length.
    """
    choose_backend("bimask_masks", backend, w)
    if permutation.shape != w.shape[:1]:
        length = tuple(permutation.shape)
        raise ValueError(f"bimask_masks: permutation must have {w.shape[0]} entries, got {length}")
    order = permutation.to(w.device).long()
    forward = nm_mask(w, dim=1, backend=backend)
    permuted = apply_mask(w, forward)[order]
    kept = nm_mask(permuted, dim=0, backend=backend)
    backward = kept.new_empty(kept.shape)
    backward[order] = kept
    return forward, backward & forward
