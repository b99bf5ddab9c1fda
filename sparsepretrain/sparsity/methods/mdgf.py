"""MDGF: pruned weights decay to zero instead of being masked at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Phase, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
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
    options: MDGFOptions
    summary = "pruned weights are scaled by d, which decays from 1 to 0"
    paper = "arXiv:2402.04744"
    finetuning = FineTuning("ste", zero="until")

    def __init__(self, options: MDGFOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self._until = self.schedule.begin_of(options.until, "until")

    def phase_of(self, step: int) -> Phase:
        """Return stage 1, whose weights are not N:M, until d is 0."""
        phase = super().phase_of(step)
        if phase.training and step < self._until:
            return phase._replace(row=Row(A=Operand("(M + d(1-M))∘W")), stage=1)
        return phase

    def factor(self, step: Any) -> Any:
        """Return the factor d of pruned weights at a step: a float, or a 0-d tensor in a graph."""
        start = self.schedule.start
        if start == self._until or (isinstance(step, int) and step >= self._until):
            return 0.0
        # Only metrics() asks before the start: a graph with stage 1 has start ≤ step < until. It
        # computes in fp64, as Python does.
        done = step - start
        done = max(done, 0) if isinstance(step, int) else done.double()
        fraction = done / (self._until - start)
        if self.options.shape == "linear":
            return 1 - fraction
        exponent = -self.options.rate * fraction
        return math.exp(exponent) if isinstance(step, int) else exponent.exp()

    def metrics(self) -> dict[str, float]:
        return {"mask_decay": self.factor(self.schedule.step)}

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        if not self.phase.stage:
            return super().project(weight, state)
        mask = self.mask(weight, state.dim)
        return Projection(weight.where(mask, weight * self.factor(state.step)), mask)
