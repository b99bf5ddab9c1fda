"""Hard threshold with the straight-through estimator."""

from __future__ import annotations

from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState


@register("method", "ste")
class STE(Method):
    """Y = X·(M∘W)ᵀ with M recomputed every step; pruned weights receive the full gradient."""

    summary = "magnitude mask in both directions, gradient straight through"
    paper = "arXiv:1308.3432; N:M: arXiv:2102.04010 section 3"

    @property
    def sparse_row(self) -> Row:
        return Row(A=self.nm("M∘W"))

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        """Return A = M∘W; a dropped weight is +0.0."""
        return Projection(*kernels.nm_prune(weight, *self.pattern, dim=state.dim, out=state.out))
