"""The mask rule that T-SR-STE trains with and a dense run may log flips by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsepretrain import kernels

if TYPE_CHECKING:
    from torch import Tensor


def transposable(weight: Tensor) -> Tensor:
    """The best transposable mask (arXiv:2404.01847 section 5.1), per kernel position.

    Args:
        weight: features along the first two axes, in any order: the mask serves both.
    """
    matrices = weight.movedim((0, 1), (-2, -1))
    mask = kernels.transposable_mask(matrices.flatten(0, -2))
    return mask.view(matrices.shape).movedim((-2, -1), (0, 1))
