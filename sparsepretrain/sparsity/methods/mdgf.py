"""MDGF: pruned weights fade out, instead of vanishing at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Projection, Row
from sparsepretrain.sparsity.method import FineTuning, Layer, Tensor
from sparsepretrain.sparsity.methods.ste import STE


@dataclass(slots=True, kw_only=True)
class MDGFOptions(MethodOptions):
    """Options of the decaying mask."""

    shape: Literal["linear", "exponential"] = "linear"
    """Decay of d from 1 to 0: 1 - f or e^(-rate·f), where f is the completed part of the decay."""
    rate: Annotated[float, "≥ 0"] = 5.0
    """Rate of ``exponential``: d is e^-rate just before the end."""
    until: Annotated[float, "[0, 1]"] = 0.5
    """Fraction of the run at which d becomes 0 and the weights N:M."""


@register("method", "mdgf")
class MDGF(STE):
    """Y = X·((M + d(1-M))∘W)ᵀ with d falling from 1 to 0; the gradient passes straight through.

    Mask Decay Gradient Flow (Bambhaniya et al., arXiv:2402.04744). The authors' code decays by a
    coefficient per step and makes the mask binary for its fine-tuning epochs; here both ends are
    fractions of the run (``window.start``, ``until``). Until d is 0 the weights are not N:M, and
    evaluation and ``densify`` use them as they are: densify after ``until``.
    """

    Options = MDGFOptions
    summary = "pruned weights are scaled by d, which decays from 1 to 0"
    paper = "arXiv:2402.04744"
    phases = "(M + d(1-M))∘W until d is 0"
    finetuning = FineTuning("ste")
    settles = "until"
    binary = False

    def set_step(self, step: int) -> None:
        self.binary = step >= self.settled
        super().set_step(step)

    @property
    def present_row(self) -> Row:
        """Not N:M before d is 0."""
        return self.sparse_row if self.binary else Row(A=Operand("(M + d(1-M))∘W"))

    def factor(self, step: Any) -> Any:
        """The factor d of pruned weights at a step: a float, or a 0-d tensor in a graph."""
        if self.binary or self.settled == self.window[0]:
            return 0.0
        done = step - self.window[0]
        done = max(done, 0) if isinstance(step, int) else done.double()
        part = done / (self.settled - self.window[0])
        if self.options.shape == "linear":
            return 1 - part
        left = -self.options.rate * part
        return math.exp(left) if isinstance(step, int) else left.exp()

    def metrics(self) -> dict[str, float]:
        return {"mask_decay": self.factor(self.step)}

    def project(self, weight: Tensor, layer: Layer) -> Projection:
        if self.binary:
            return super().project(weight, layer)
        mask = self.mask(weight, layer.dim)
        return Projection(weight.where(mask, weight * self.factor(layer.step)), mask)
