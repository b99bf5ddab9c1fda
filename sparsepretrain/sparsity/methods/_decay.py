"""A masked decay that may rise at the start of the run: what SR-STE and T-SR-STE share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparsepretrain.sparsity import checks
from sparsepretrain.sparsity.method import Method, MethodOptions


@dataclass(slots=True, kw_only=True)
class RampedDecayOptions(MethodOptions):
    """Options of methods with masked decay."""

    decay: float = 2.0e-4
    """λ of the masked decay (authors' default)."""
    decay_ramp: float = 0.0
    """λ rises linearly from 0 over this fraction of the run; 0: constant."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from MethodOptions.problems(self)
        yield from checks.at_least(0, self, "decay")
        yield from checks.fraction(self, "decay_ramp")


class RampedDecay(Method):
    """Gives :attr:`decay`, the λ of the current step.

    The linear ramp is the annealed decay of AST (Huang et al., AAAI 2025, arXiv:2407.20584),
    which the published SR-STE and T-SR-STE do not have.
    """

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        ramp = options.decay_ramp
        self._ramp_steps = self.steps_of(ramp, "decay_ramp") if ramp else 0

    @property
    def decay(self) -> float:
        """λ·min(1, k/r): k sparse steps are complete, r is the length of the ramp in steps."""
        decay: float = self.options.decay
        done = self.step - self.window[0]
        return decay * done / self._ramp_steps if done < self._ramp_steps else decay
