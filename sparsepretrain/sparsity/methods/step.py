"""STEP: dense AdamW until its second moments settle, then N:M masks with frozen ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.optim import StepAdamW
from sparsepretrain.optim.adamw import adamw_arguments
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Phase, Row
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.srste import MaskedDecay
from sparsepretrain.sparsity.methods.ste import STE


@dataclass(slots=True, kw_only=True)
class STEPOptions(MethodOptions):
    """Options of STEP; those of the optimizer are explained at ``StepAdamW``."""

    option: Literal[1, 2] = 1
    """AutoSwitch: arithmetic (1) or geometric (2) mean of the change of the second moment."""
    clipping: tuple[float | None, float | None] = (0.1, 0.5)
    """Earliest and latest switch, fractions of the run; null: no bound."""
    window_length: Annotated[int | None, "≥ 1"] = None
    """Steps that the change is averaged over; null: round(1/(1 - beta2))."""
    decay: Annotated[float, "≥ 0"] = 0.0
    """λ of masked decay on gradients in the sparse phase; the paper has none."""
    frozen_bias_correction: bool = False
    """Divide the frozen second moment by 1 - beta2^t0; the authors' code does not."""
    denominator: Literal["sqrt_v_plus_eps34", "sqrt_of_v_plus_eps"] = "sqrt_v_plus_eps34"
    """√v* + ε^¾ (authors' code) or √(v* + ε) (paper)."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        bounds = [b for b in self.clipping if b is not None]
        if any(not 0 <= b <= 1 for b in bounds) or bounds != sorted(bounds):
            yield "clipping", f"needs 0 ≤ earliest ≤ latest ≤ 1, got {list(self.clipping)}"


@register("method", "step")
class STEP(MaskedDecay, STE):
    """Two phases that the optimizer decides; evaluation is N:M in both."""

    Options = STEPOptions
    options: STEPOptions
    summary = "dense until AutoSwitch, then STE with a frozen second moment"
    paper = "arXiv:2302.01172 (ICML 2023)"
    finetuning = FineTuning("ste")
    scalars: Mapping[str, int] = MappingProxyType({"trains_dense": 1})
    """trains_dense: 1 until AutoSwitch has switched."""

    def __init__(self, options: STEPOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self._watched: dict[str, float] = {}
        if total_steps is not None:  # else the optimizer of the caller has its own bounds
            self.schedule.earliest = max(self.schedule.start, self._bound(0) or 0)

    @property
    def sparse_row(self) -> Row:
        return Row(self.nm("M∘W"), J=self.decayed("M"))

    def phase_of(self, step: int) -> Phase:
        """Evaluate N:M weights inside the window; train them once the optimizer has switched."""
        phase = Method.phase_of(self, step)
        if phase.training and self.scalars["trains_dense"]:
            return Phase(False, True, "until AutoSwitch")
        return phase

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer:
        """StepAdamW with the AdamW options of the run and AutoSwitch's of this method."""
        given = adamw_arguments(options, "step", "it freezes its moments")
        names = ("option", "frozen_bias_correction", "denominator")
        given |= {key: getattr(self.options, key) for key in names}
        clipping = (self._bound(0), self._bound(1))
        window = self.options.window_length
        return StepAdamW(groups, **given, clipping=clipping, window=window)

    def read_optimizer(self, optimizer: Any) -> None:
        """Follow the switch; the first sparse forward is the one after the step that switched."""
        if not isinstance(optimizer, StepAdamW):
            kind = type(optimizer).__name__
            raise ConfigError(f"method step needs a sparsepretrain.optim.StepAdamW, got {kind}")
        self._watched = {}
        change = optimizer.window_mean
        if self.scalars["trains_dense"] and change is not None:
            threshold = optimizer.threshold
            self._watched = {"autoswitch_z": change, "autoswitch_threshold": threshold}
        self.scalars = {"trains_dense": int(not optimizer.sparse_phase)}

    def metrics(self) -> dict[str, float]:
        """Return Z̄ and ε of AutoSwitch at a dense step; it switches when Z̄ < ε."""
        return self._watched

    def _bound(self, place: int) -> int | None:
        fraction = self.options.clipping[place]
        return None if fraction is None else self.schedule.steps_of(fraction, "clipping")
