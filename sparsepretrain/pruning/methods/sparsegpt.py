"""SparseGPT: pruning with updates of the kept weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import CheckpointError
from sparsepretrain.pruning import InputSums, Pruned, PruningMethod, PruningOptions
from sparsepretrain.pruning.inputs import Kept
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class SparseGPTOptions(PruningOptions):
    """Options of SparseGPT."""

    damping: Annotated[float, "> 0"] = 0.01
    """Added to the diagonal of H, as a share of its mean."""
    block: Annotated[int, "≥ 1"] = 128
    """Columns between updates of all later columns; changes speed, and rounding only."""


@register("pruning", "sparsegpt")
class SparseGPT(PruningMethod):
    """Minimize ‖XWᵀ - XŴᵀ‖² column by column (Frantar and Alistarh, ICML 2023, arXiv:2301.00774).

    H = Σ x·xᵀ is damped, and U is the upper Cholesky factor of H⁻¹. At the first column of every
    group the N weights with the largest W²/U_jj² are kept. The error of column j, (w - ŵ)/U_jj, is
    spread to the later columns along row j of U, so that they make up for it. Channels without
    inputs get zeros, as in the authors' code. The arithmetic is fp64.
    """

    Options = SparseGPTOptions
    options: SparseGPTOptions
    summary = "second-order, kept weights make up for the others"
    paper = "arXiv:2301.00774 (ICML 2023)"
    reads: ClassVar[Kept] = "moments"

    def prune(self, weight: Tensor, inputs: InputSums | None) -> Pruned:
        assert inputs is not None
        n, m = self.n, self.m
        updated = weight.double().clone()
        hessian = inputs.moments.clone()
        diagonal = hessian.diagonal()
        unused = diagonal == 0
        diagonal[unused] = 1.0
        updated[:, unused] = 0.0
        diagonal += self.options.damping * diagonal.mean()
        factor = _upper_factor_of_inverse(hessian)
        mask = torch.zeros_like(weight, dtype=torch.bool)
        width = weight.shape[1]
        size = max(m, self.options.block // m * m)
        for first in range(0, width, size):
            last = min(first + size, width)
            block = updated[:, first:last]
            corner = factor[first:last, first:last]
            errors = torch.empty_like(block)
            for j in range(last - first):
                if j % m == 0:
                    group = slice(j, j + m)
                    score = (block[:, group] / corner.diagonal()[group]).square()
                    mask[:, first + j : first + j + m] = kernels.nm_mask(score, n, m)
                dropped = block[:, j].masked_fill(mask[:, first + j], 0.0)
                errors[:, j] = dropped / corner[j, j]
                block[:, j:] -= errors[:, j : j + 1] * corner[j, j:]
            updated[:, last:] -= errors @ factor[first:last, last:]
        # the update of column j leaves 0 where a weight was dropped, up to rounding
        return Pruned(kernels.apply_mask(updated.to(weight.dtype), mask), mask)


def _upper_factor_of_inverse(hessian: Tensor) -> Tensor:
    """Return the upper triangular U with UᵀU = H⁻¹."""
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:
        raise CheckpointError(
            "the inputs of a layer are linearly dependent: give more calibration text, or a larger "
            "damping="
        ) from error
