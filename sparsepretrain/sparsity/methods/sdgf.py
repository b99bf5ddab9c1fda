"""SDGF: the pattern is tightened in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Phase, Row
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.ste import STE


@dataclass(slots=True, kw_only=True)
class SDGFOptions(MethodOptions):
    """Options of the progressive pattern; n:m is the last one."""

    until: Annotated[float, "[0, 1]"] = 0.5
    """Fraction of the run at which the last stage, n:m, begins; the others share the time before
    it equally."""


def stages(n: int, m: int) -> list[int]:
    """Elements kept of every m, stage by stage: m-1, then m/2, m/4, …, and n at last."""
    halves = [m >> k for k in range(1, m.bit_length())]
    return [kept for kept in dict.fromkeys([m - 1, *halves]) if kept > n] + [n]


@register("method", "sdgf")
class SDGF(STE):
    """STE under (m-1):m, then m/2:m, m/4:m, … and n:m at last.

    Structure Decay Gradient Flow, stepwise (Bambhaniya et al., arXiv:2402.04744). The authors
    divide all sparse epochs equally; here the last stage begins at ``until``. The masks of
    evaluation, ``densify`` and the flip rate are those of the current stage.
    """

    Options = SDGFOptions
    options: SDGFOptions
    summary = "STE with a pattern that tightens from (m-1):m to n:m"
    paper = "arXiv:2402.04744"
    finetuning = FineTuning("ste", zero="until")

    def __init__(self, options: SDGFOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self.stages = stages(options.n, options.m)
        self._until = self.schedule.begin_of(options.until, "until")

    def phase_of(self, step: int) -> Phase:
        """Return the elements kept of every m as the stage."""
        phase = super().phase_of(step)
        start = self.schedule.start
        done = max(step - start, 0) * (len(self.stages) - 1) // max(self._until - start, 1)
        kept = self.options.n if step >= self._until else self.stages[done]
        row = Row(Operand("M∘W", (kept, self.options.m), "in")) if phase.training else phase.row
        return phase._replace(row=row, stage=kept)

    @property
    def pattern(self) -> tuple[int, int]:
        return self.phase.stage, self.options.m

    @property
    def sparse_row(self) -> Row:
        return Row(A=self.nm("M∘W, M by stages"))
