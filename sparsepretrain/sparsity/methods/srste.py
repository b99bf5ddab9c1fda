"""SR-STE: straight-through estimation plus a pull of pruned weights towards zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity.methods._decay import RampedDecay, RampedDecayOptions
from sparsepretrain.sparsity.methods.ste import STE
from sparsepretrain.sparsity.row import Operand, Row

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class SRSTEOptions(RampedDecayOptions):
    """Options of SR-STE."""

    decay: float = 2.0e-4
    """λ of the masked decay (authors' default)."""
    decay_on: Literal["gradient", "weight"] = "gradient"
    """gradient: dW + λ(1-M)∘W before the optimiser; weight: W -= lr·λ(1-M)∘W after it."""


@register("method", "srste")
class SRSTE(RampedDecay, STE):
    """STE with masked decay, added once per optimiser step after clipping."""

    Options = SRSTEOptions
    summary = "STE plus masked decay λ on pruned weights"
    paper = "arXiv:2102.04010 (ICLR 2021)"

    @property
    def sparse_row(self) -> Row:
        """What the products see."""
        return super().sparse_row._replace(J=Operand("dW + λ(1-M)∘W"))

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """Masked decay on gradients (arXiv:2102.04010 eq. 7; arXiv:2404.01847 section 4)."""
        if self.options.decay_on == "gradient":
            kernels.masked_decay_(grad, weight, mask, self.decay * scale)

    def adjust_weight_(self, weight: Tensor, mask: Tensor, lr: float) -> None:
        """Masked decay on weights, outside the moments as AdamW treats weight decay."""
        if self.options.decay_on == "weight":
            kernels.masked_decay_(weight, weight, mask, -lr * self.decay)
