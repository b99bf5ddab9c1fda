"""How far a suite is."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from sparsepretrain.data.preparation import Progress
from sparsepretrain.tracking.console import Console, clock


@dataclass
class Phase:
    """Shows on the standard error how far one part of a suite is."""

    name: str
    total: int
    unit: str
    console: Console = field(default_factory=lambda: Console(sys.stderr))
    started: float = field(default_factory=time.monotonic)

    def __call__(self, done: int) -> None:
        """Show that so many of the units are complete."""
        unit = self.unit
        if 0 < done < self.total:
            left = (time.monotonic() - self.started) * (self.total - done) / done
            unit += f", {clock(left)} left"
        self.console.progress(Progress(self.name, done, self.total, unit, 0.0))
