"""Sparse-BitNet: N:M masks and ternary weights, with the straight-through estimator."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState

LEAST_MEAN = 1e-5
"""Lower bound of mean|W|, as in the published code: a zero weight has a finite s."""


@register("method", "ternary")
class Ternary(Method):
    """A = clip(round(s·(M∘W)), -1, 1)/s with s = 1/mean|W|; all weights receive the full gradient.

    Sparse-BitNet (arXiv:2603.05168). The mean is over all weights of the layer, pruned ones
    included; every slice of a bank has its own. A kept weight with s·|W| ≤ ½ becomes zero, so a
    group has at most N non-zeros.
    """

    summary = "magnitude mask, then {-1, 0, 1} times mean|W|; gradient straight through"
    paper = "arXiv:2603.05168"
    needs_whole = True  # for mean|W|

    @property
    def sparse_row(self) -> Row:
        return Row(A=self.nm("T(M∘W)"))

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        """Return A and M: flips are those of the mask of W, also where A has a zero."""
        pruned, mask = kernels.nm_prune(weight, *self.pattern, dim=state.dim)
        slices = weight.reshape(state.slices, -1)
        # summed in fp64: the order of summation must not reach the border of two values
        mean = slices.abs().mean(1, keepdim=True, dtype=torch.float64).clamp_min(LEAST_MEAN)
        s = mean.reciprocal().to(weight.dtype)
        ternary = (pruned.reshape(slices.shape) * s).round_().clamp_(-1, 1)
        forward = ternary.div_(s).add_(0.0)  # -0.0 is not an exact zero
        return Projection(forward.view(weight.shape), mask)
