"""Interleaved timing: machines are noisy, so only ratios within one round are compared."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Case:
    """One figure of a suite."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    """Limit that the project holds itself to."""
    at_least: float | None = None
    detail: dict[str, Any]
    """How it was measured: rounds, medians, spread."""

    @property
    def ok(self) -> bool | None:
        """Whether the limit is kept; None without one."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def value_text(self) -> str:
        """The figure as shown in the table."""
        return f"{self.value:.3g} {self.unit}"

    @property
    def limit_text(self) -> str:
        """The limit as shown in the table."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def interleaved(
    works: dict[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int], object] = lambda done: None,
) -> dict[str, list[float]]:
    """Seconds of every work in every round; the order rotates from round to round.

    Args:
        works: name -> what is timed.
        rounds: how often each is timed.
        warmup: rounds before those.
        clock: ``time.thread_time`` leaves out what other processes take of the core.
        on_round: called with the number of timed rounds that are complete.
    """
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-warmup, rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock()
            works[name]()
            if index >= 0:
                seconds[name].append(clock() - start)
        on_round(max(index + 1, 0))
    return seconds


def amortised(case: Case, extra: list[float], under: list[float], *, period: int) -> Case:
    """``case`` plus what one step in ``period`` takes longer.

    Args:
        case: a :func:`ratio` of steps without the rare work.
        extra: seconds of steps that all do the rare work.
        under: seconds of what ``case`` is over, in the same rounds.
        period: steps from one rare work to the next.
    """
    rare = statistics.median(a / b for a, b in zip(extra, under, strict=True))
    detail = {**case.detail, "without": case.value, "every_step": rare, "period": period}
    value = case.value + (rare - case.value) / period
    return dataclasses.replace(case, value=value, detail=detail)


def ratio(name: str, over: list[float], under: list[float], **limits: float | None) -> Case:
    """Median over rounds of ``over / under``, with the quartiles and both medians."""
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    quarter = len(ratios) // 4
    return Case(
        name=name,
        value=statistics.median(ratios),
        unit="×",
        detail={
            "rounds": len(ratios),
            "quartiles": [ratios[quarter], ratios[-1 - quarter]],
            "median_seconds": [statistics.median(over), statistics.median(under)],
        },
        **limits,
    )
