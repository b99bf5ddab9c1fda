"""The decay factor λ of masked decay, judged on the learning-rate warm-up alone.

The flip rate of a sparse run over that of a dense one, μ = r_λ / r_dense at the end of warm-up,
falls as λ grows; a λ with μ in [0.60, 0.95] is accepted (arXiv:2404.01847 section 4). This file
decides what is run and what follows from the ratios; :mod:`.tune` runs it. It never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config import freeze, validate
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.method import Method
from sparsepretrain.studies.engine import Cell

GRID = (6.0e-6, 1.0e-3)
"""Between the smallest and the largest published λ (BERT and DeiT-base)."""

POINTS = 5
"""Grid points by default: a factor of 3.6 apart."""

INTERVAL = (0.60, 0.95)
"""Feasible μ (arXiv:2404.01847 section 4)."""

BISECTIONS = 4
"""Runs after the grid at most: on the default grid they place λ within a factor of 1.1."""

LAST = 3
"""Comparisons of masks that a flip rate is averaged over, or the last tenth if that is more."""

DEFAULT = "sparsity=tsrste"
"""The method where neither an override nor an experiment chooses one."""


@dataclass(frozen=True, slots=True)
class Search:
    """What to search: a run whose method has a ``decay``, over its first ``steps`` steps.

    Raises:
        ConfigError: the method has no λ or no known mask rule, or nothing can be compared.
    """

    run: Run
    grid: tuple[float, ...]
    """λ to try, ascending."""
    interval: tuple[float, float]
    """Feasible μ."""
    steps: int
    """Length of a segment; the learning rates are those of the whole run."""

    def __post_init__(self) -> None:
        run, name = self.run, self.run.sparsity.name
        if not hasattr(run.sparsity, "decay"):
            raise ConfigError(f"sparsity={name} has no decay to tune: choose tsrste or srste")
        if run.resume not in ("auto", "never"):
            raise ConfigError(
                f"resume={run.resume} continues one run; a search takes auto or never"
            )
        if not self.steps:
            raise ConfigError("schedule.warmup=0 leaves no segment to compare: give --steps")
        if self.steps > run.steps:
            raise ConfigError(f"--steps {self.steps} is more than the run has (steps={run.steps})")
        method = self._method()
        if method.flip_rule is None:
            raise ConfigError(
                f"sparsity={name} chooses masks by a rule of its own, which a dense run cannot log"
            )
        start, stop = method.window
        if not start < self.steps <= stop:
            raise ConfigError(
                f"the layers are not sparse at the end of the first {self.steps} steps (sparse "
                f"from step {start} to {stop}): change sparsity.window or --steps"
            )
        if not self.comparisons:
            raise ConfigError(
                f"no masks are compared in {self.steps} steps: lower sparsity.refresh "
                f"({self.refresh}) or give more --steps"
            )

    @property
    def refresh(self) -> int:
        """Optimiser steps between two comparisons of masks."""
        return int(getattr(self.run.sparsity, "refresh", 1))

    @property
    def comparisons(self) -> int:
        """Comparisons of masks in a segment."""
        method, count = self._method(), 0
        for step in range(1, self.steps + 1):
            method.set_step(step)
            count += method.compares
        return count

    @property
    def doubt(self) -> str:
        """Why μ will be noisy, or nothing."""
        if (few := self.comparisons) >= LAST:
            return ""
        rests = "a single comparison" if few == 1 else f"{few} comparisons"
        return (
            f"μ rests on {rests} of masks in {self.steps} steps: lower sparsity.refresh "
            f"({self.refresh}) or give more --steps for a firmer one"
        )

    @property
    def out(self) -> Path:
        """Where results are written by default: the same for the same search."""
        plain = self._segment(self.run.plain["sparsity"])
        del plain["sparsity"]["decay"]
        directory = freeze.run_directory(plain)
        return directory.with_name(f"search-{directory.name}")

    def reference(self) -> Cell:
        """The dense run: same data, same initial weights, flips of the same masks."""
        sparsity = self.run.plain["sparsity"]
        chosen = {key: sparsity[key] for key in ("n", "m", "targets", "window")}
        chosen |= {"name": "dense", "flip_rule": self._method().flip_rule, "refresh": self.refresh}
        return self._cell("dense", chosen)

    def sparse(self, decay: float) -> Cell:
        """The run with λ = ``decay``."""
        return self._cell(f"λ = {decay:.3g}", self.run.plain["sparsity"] | {"decay": decay})

    def _method(self) -> Method:
        method: type[Method] = registry.get("method", self.run.sparsity.name)
        return method(self.run.sparsity, self.run.steps)

    def _cell(self, label: str, sparsity: dict[str, Any]) -> Cell:
        return Cell(label, validate(self._segment(sparsity)), self.steps)

    def _segment(self, sparsity: dict[str, Any]) -> dict[str, Any]:
        """The run under its own name, with every flip recorded and nothing that costs time."""
        plain = self.run.plain | {"sparsity": sparsity}
        plain["name"] = f"tune_{plain['name']}"
        plain["eval"]["batches"] = 0
        plain["log"] = {"every": 1, "layers_every": 0, "masks_every": 0}
        plain["checkpoint"]["keep_last"] = 1
        return plain


def with_default(overrides: Sequence[str]) -> list[str]:
    """``overrides``, with T-SR-STE where they choose neither a method nor an experiment."""
    chosen = any(key_of(word) in ("sparsity", "experiment") for word in overrides)
    return [*overrides] if chosen else [DEFAULT, *overrides]


def key_of(override: str) -> str:
    """The key of ``key=value``."""
    return override.partition("=")[0].strip().lstrip("+")


def log_grid(low: float, high: float, points: int) -> tuple[float, ...]:
    """``points`` values from ``low`` to ``high``, evenly spaced in the logarithm."""
    ratio = (high / low) ** (1 / (points - 1))
    return tuple(dict.fromkeys(_rounded(low * ratio**i) for i in range(points)))


def search(
    ratio: Callable[[float], float],
    grid: Sequence[float],
    interval: tuple[float, float],
    bisections: int = BISECTIONS,
) -> dict[float, float]:
    """Evaluate μ on the grid; where it jumps over the interval, bisect in log λ.

    Args:
        ratio: μ of a λ; costs a run, and is NaN where that failed.
        grid: λ, ascending.
        interval: lowest and highest feasible μ.
        bisections: evaluations beyond the grid, at most.

    Returns:
        λ -> μ of everything evaluated, ascending in λ.
    """
    found = {decay: ratio(decay) for decay in grid}
    for _ in range(bisections):
        gap = _jump(found, interval)
        if gap is None:
            break
        middle = _rounded(math.sqrt(gap[0] * gap[1]))
        if middle in found:
            break
        found = dict(sorted([*found.items(), (middle, ratio(middle))]))
    return found


def choose(found: dict[float, float], interval: tuple[float, float]) -> float | None:
    """The λ whose μ is nearest to the middle of the interval: the largest margin on both sides.

    Of equals the smaller λ, which disturbs training less; None when no μ is inside.
    """
    middle = sum(interval) / 2
    feasible = [decay for decay, mu in found.items() if verdict(mu, interval) == "feasible"]
    return min(feasible, key=lambda decay: (abs(found[decay] - middle), decay), default=None)


def verdict(mu: float, interval: tuple[float, float]) -> str:
    """What μ says about its λ."""
    low, high = interval
    if math.isnan(mu):
        return "failed"
    if mu > high:
        return "too small"
    return "feasible" if mu >= low else "too large"


def in_order(found: dict[float, float], interval: tuple[float, float]) -> bool:
    """Whether the verdicts go from too small over feasible to too large as λ grows."""
    verdicts = [verdict(mu, interval) for _, mu in sorted(_measured(found).items())]
    return verdicts == sorted(verdicts, key=["too small", "feasible", "too large"].index)


def why_none(found: dict[float, float], interval: tuple[float, float]) -> str:
    """One line: why no λ was chosen, and what to change."""
    missed = f"no λ from {min(found):.3g} to {max(found):.3g} has μ in {list(interval)}"
    ratios = set(_measured(found).values())
    if ratios == {1.0}:
        return f"{missed}: all flip exactly like the dense run; is the method dense in these steps?"
    if (gap := _jump(found, interval)) is not None:
        ends = [f"{found[d]:.3f} at {d:.3g}".replace("nan", "failure") for d in gap]
        return (
            f"{missed}: it jumps from {' to '.join(ends)}; "
            "compare more masks (--steps, sparsity.refresh) or widen --interval"
        )
    if min(ratios) > interval[1]:
        return f"{missed}: μ falls to {min(ratios):.3f} only; raise the end of --grid"
    return f"{missed}: μ rises to {max(ratios):.3f} only; lower the start of --grid"


def _measured(found: dict[float, float]) -> dict[float, float]:
    return {decay: mu for decay, mu in found.items() if not math.isnan(mu)}


def _jump(found: dict[float, float], interval: tuple[float, float]) -> tuple[float, float] | None:
    """The first two neighbours on different sides of the interval; None when a μ is inside."""
    if choose(found, interval) is not None:
        return None
    largest = max(_measured(found), default=math.inf)
    # training diverges where the decay is too strong: a failure above all that ran is too large
    above = [
        (decay, mu > interval[1])
        for decay, mu in found.items()
        if not math.isnan(mu) or decay > largest
    ]
    return next(((a, b) for (a, x), (b, y) in pairwise(above) if x != y), None)


def _rounded(decay: float) -> float:
    """Three digits: a λ that can be typed."""
    return float(f"{decay:.3g}")
