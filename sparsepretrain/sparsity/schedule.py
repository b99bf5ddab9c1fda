"""Schedule of a sparse model: its window in steps, and the phase of the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.sparsity.operand_table import Row


@dataclass(slots=True, kw_only=True)
class Window:
    """Part of the run in which the layers are sparse, as fractions."""

    start: float = 0.0
    """First sparse step = ⌊start·steps + ½⌋."""
    stop: float = 1.0
    """First dense step after it; 1: sparse to the end, and afterwards."""

    def problems(self) -> Problems:
        """Yield range errors as (key, message)."""
        if not 0 <= self.start < self.stop <= 1:
            yield "start", f"and stop need 0 ≤ start < stop ≤ 1, got {self.start} and {self.stop}"


class Phase(NamedTuple):
    """Phase of the next step, for the whole model."""

    training: bool = True  # training matmuls see the operands of `row`, not W, X and G
    evaluation: bool = True  # evaluation, `densify` and proofs use A(W), not W
    reason: str = ""  # why training is dense: until or since which step, by which option
    row: Row = Row()  # operands of training matmuls
    stage: int = 0  # of the method; compiled graphs may branch on it, as it changes rarely


class Schedule:
    """Sparse part of a run, counted in completed optimizer steps.

    Args:
        window: as fractions of the run.
        total_steps: length of the run; None: unknown, fractions cannot be used.
        refresh: steps between two comparisons of masks, counted from the first sparse step.

    Raises:
        ConfigError: no step is sparse, or a fraction needs ``total_steps``.
    """

    def __init__(self, window: Window, total_steps: int | None, refresh: int = 1) -> None:
        self.total_steps = total_steps
        self.refresh = refresh
        self.step = 0
        """Completed optimizer steps."""
        self.start = self.steps_of(window.start, "window.start")
        """First sparse step."""
        self.earliest = self.start
        """Earliest step that can be sparse; later than `start` if the optimizer decides."""
        self.stop: float = math.inf
        """First dense step after it; ∞: none."""
        self._stop_key = ""
        self.stop_at(window.stop, "window.stop")

    def steps_of(self, fraction: float, key: str) -> int:
        """Return ⌊fraction·total_steps + ½⌋; ConfigError with ``key`` if total_steps is None."""
        if not fraction:
            return 0
        if self.total_steps is None:
            raise ConfigError([(key, " is a fraction of the run: sparsify needs total_steps")])
        return math.floor(fraction * self.total_steps + 0.5)

    def begin_of(self, fraction: float, key: str) -> int:
        """Return the first sparse step that is not before ``fraction`` of the run."""
        return max(self.steps_of(fraction, key), self.start)

    def stop_at(self, fraction: float, key: str) -> None:
        """Train dense from ``fraction`` of the run on, unless the window ends earlier; 1: never."""
        stop = math.inf if fraction == 1 else self.steps_of(fraction, key)
        if stop < self.stop:
            self.stop = stop
            self._stop_key = key
        if self.start >= self.stop:
            span = f"from {self.start} to {self.stop} of {self.total_steps}"
            raise ConfigError([("window", f": no step is sparse ({span})")])

    def dense_reason(self, step: int) -> str:
        """Return why the next step is outside the window; "" if it is inside."""
        if step < self.start:
            return f"until step {self.start} (window.start)"
        return f"since step {self.stop} ({self._stop_key})" if step >= self.stop else ""

    def compares_after(self, step: int) -> bool:
        """Return True if masks are compared after ``step``; between refreshes nothing can flip."""
        return (step - self.start) % self.refresh == 0
