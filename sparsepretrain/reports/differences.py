"""Paired differences over seeds, with t-tests and intervals."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from scipy import special

ALPHA = 0.01
SEEDS = 5
"""Least number of seeds for a verdict; the spread of fewer is too uncertain."""

POWER = 0.8
MOST_SEEDS = 1000
"""Largest number of seeds that the power analysis considers."""


class Difference:
    """One term minus another, seed by seed."""

    def __init__(self, label: str, values: Sequence[float]) -> None:
        self.label = label
        self.values = [*map(float, values)]
        self.n = len(values)
        self.mean = math.fsum(self.values) / self.n if self.n else math.nan
        """Mean over seeds; NaN without a seed."""
        squares = math.fsum((value - self.mean) ** 2 for value in self.values)
        self.sd = math.sqrt(squares / (self.n - 1)) if self.n > 1 else math.nan
        """Standard deviation over seeds; NaN for one."""

    @property
    def flat(self) -> bool:
        """True if all seeds give equal numbers up to rounding: no spread to judge by."""
        return self.n > 1 and self.sd <= 1e-12 * max(map(abs, self.values))

    def p(self, shift: float = 0.0) -> float:
        """Return the two-sided p of a mean of ``shift``; 1 if undefined."""
        if self.n < 2 or self.flat:
            return 1.0
        return float(2 * special.stdtr(self.n - 1, -abs(self.mean - shift) / self._error))

    def below(self, shift: float = 0.0) -> float:
        """Return the two-sided p of a mean below ``shift``; 1 if it is above, or for few seeds."""
        return self.p(shift) if self.n >= SEEDS and self.mean < shift else 1.0

    def above(self, shift: float = 0.0) -> float:
        """Return the two-sided p of a mean above ``shift``; 1 if it is below, or for few seeds."""
        return self.p(shift) if self.n >= SEEDS and self.mean > shift else 1.0

    def sign(self, level: float = ALPHA) -> int:
        """Return -1 or 1 if the mean is below or above zero at ``level``, else 0."""
        return int(self.above() < level) - int(self.below() < level)

    def outside(self, margin: float) -> float:
        """Return the larger p of two one-sided tests for a mean beyond ± ``margin``."""
        if self.n < SEEDS or self.flat:
            return 1.0
        room = (margin - abs(self.mean)) / self._error
        return float(special.stdtr(self.n - 1, -room))

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the mean; NaN for fewer than two seeds."""
        if self.n < 2:
            return math.nan, math.nan
        half = float(special.stdtrit(self.n - 1, 0.975)) * self._error
        return self.mean - half, self.mean + half

    def seeds_to_decide(self, margin: float | None = None, level: float = ALPHA) -> int | None:
        """Return the number of seeds that decides with power 80 % at the measured mean and spread.

        ``margin`` is that of a claim "equal"; None if the spread is unknown, or for more than 1000.
        """
        if self.n < 2 or self.flat:
            return None
        distances, level = [abs(self.mean)], level / 2
        if margin is not None and abs(self.mean) < margin:  # both one-sided tests must succeed
            distances, level = [margin - self.mean, margin + self.mean], 2 * level
        elif margin is not None:
            distances = [abs(self.mean) - margin]

        def enough(n: int) -> bool:
            return sum(1 - _power(n, d / self.sd, level) for d in distances) <= 1 - POWER

        if not enough(MOST_SEEDS):
            return None
        return bisect_left(range(SEEDS, MOST_SEEDS), True, key=enough) + SEEDS

    @property
    def _error(self) -> float:
        return self.sd / math.sqrt(self.n)

    def __str__(self) -> str:
        low, high = self.interval()
        spread = "" if self.n < 2 else f" [{low:+.3g}, {high:+.3g}], p = {self.p():.1g}"
        return f"{self.label} = {self.mean:+.3g}{spread}, n = {self.n}"


def _power(n: int, size: float, level: float) -> float:
    """Return the power of a one-sided t-test; ``size``: true mean over standard deviation."""
    shift = size * math.sqrt(n)
    critical = special.stdtrit(n - 1, 1 - level)
    # the series of the non-central t fails for larger shifts, where the power is 1
    return 1.0 if shift > 35 else float(1 - special.nctdtr(n - 1, shift, critical))
