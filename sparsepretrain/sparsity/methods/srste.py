"""SR-STE: straight-through estimation plus a pull of pruned weights towards zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Operand, Row
from sparsepretrain.sparsity.methods.ste import STE


@dataclass(slots=True, kw_only=True)
class RampedDecayOptions(MethodOptions):
    """Options of methods with masked decay that may be ramped."""

    decay: Annotated[float, "≥ 0"] = 2.0e-4
    """λ of the masked decay (authors' default)."""
    decay_ramp: Annotated[float, "[0, 1]"] = 0.0
    """λ rises linearly from 0 over this fraction of the run; 0: constant."""


class RampedDecay(Method):
    """Masked decay whose λ of the current step is :attr:`decay`.

    The optional linear ramp is the annealed decay of AST (Huang et al., AAAI 2025,
    arXiv:2407.20584); the published SR-STE and T-SR-STE have none.
    """

    options: Any  # with `decay`, and in some methods `decay_ramp`

    def __init__(self, options: MethodOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        ramp = getattr(options, "decay_ramp", 0.0)
        self._ramp_steps = self.schedule.steps_of(ramp, "decay_ramp")

    @property
    def decay(self) -> float:
        """λ·min(1, k/r): k sparse steps are complete, r is the length of the ramp in steps."""
        decay: float = self.options.decay
        done = self.schedule.step - self.schedule.start
        return decay * done / self._ramp_steps if done < self._ramp_steps else decay


class MaskedDecay(RampedDecay):
    """Masked decay on gradients."""

    reads_packed_masks = True

    def decayed(self, mask: str) -> Operand:
        """Return the operand J for the mask of this name; dW if λ is 0."""
        return Operand(f"dW + λ(1-{mask})∘W" if self.options.decay else "dW")

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """J = dW + λ(1-M)∘W (arXiv:2102.04010 eq. 7; arXiv:2404.01847 section 4)."""
        kernels.masked_decay_(grad, weight, mask, self.decay * scale)


@dataclass(slots=True, kw_only=True)
class SRSTEOptions(RampedDecayOptions):
    """Options of SR-STE."""

    decay_on: Literal["gradient", "weight"] = "gradient"
    """gradient: dW + λ(1-M)∘W before the optimizer; weight: W -= lr·λ(1-M)∘W after it."""


@register("method", "srste")
class SRSTE(MaskedDecay, STE):
    """STE with masked decay, added once per optimizer step after clipping."""

    Options = SRSTEOptions
    options: SRSTEOptions
    summary = "STE plus masked decay λ on pruned weights"
    paper = "arXiv:2102.04010 (ICLR 2021)"

    @property
    def sparse_row(self) -> Row:
        row = super().sparse_row
        return row._replace(J=self.decayed("M")) if self.options.decay_on == "gradient" else row

    def adjust_weight_(self, weight: Tensor, mask: Tensor, lr: float) -> None:
        """Masked decay on weights, outside the moments as AdamW treats weight decay."""
        kernels.masked_decay_(weight, weight, mask, -lr * self.decay)
