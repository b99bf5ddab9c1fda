"""Gaps to dense training against model size and data, at equal tokens and at equal cost.

For tables whose columns are sizes with amounts of data, such as ``scaling_lm``. Columns with
equally many parameters of the baseline (N, without embeddings) are one size; the tokens of a run
over N, rounded, are its data. Nothing of this is written in the table: both follow from the runs.

At equal cost, a run is compared with a dense run of the same size that trains on fewer tokens and
costs as much, if a 2:4 matmul is ``factor`` times as fast as a dense one. Its loss is interpolated
between the dense runs of this size: a polynomial through the mean losses, in logarithms of loss and
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from sparsepretrain.console import count
from sparsepretrain.reports.differences import Difference
from sparsepretrain.reports.page import markdown_table
from sparsepretrain.studies.results import TableResults
from sparsepretrain.studies.tables import Table, cell_name

DEGREE = 2
"""Most of the polynomial of dense losses; three amounts of data determine it."""
REACH = 2.0
"""Factor beyond the smallest and the largest size up to which a crossing is printed: lines through
two to four sizes say little about others."""
MEASURED = 1.064
"""Speed of 2:4 matmuls in a step: of GPT-2 124M on an H200 (docs/gpu.md) with S-STE and
``sparse_matmuls=auto``, which takes 0.984 of a dense one where 26.5 % of the FLOPs could be 2:4."""
COSTS = {
    "at equal tokens": None,
    "at equal FLOPs, if a 2:4 matmul is twice as fast": 2.0,
    f"at equal cost, if a 2:4 matmul is {MEASURED:.2f} times as fast": MEASURED,
}
"""Title of a comparison -> speed of a 2:4 matmul relative to a dense one; None: equal tokens."""

Gaps = dict[str, dict[tuple[int, int], dict[int, float]]]
"""Row -> (N, tokens per parameter) -> seed -> percent above dense."""


class Place(NamedTuple):
    """Column of a table."""

    column: str
    parameters: int  # of the baseline, without embeddings
    data: int  # tokens per parameter, rounded
    tokens: float  # of the baseline
    flops: float  # of the baseline


@dataclass(frozen=True, slots=True)
class Line:
    """Least-squares line of gaps over ln N."""

    slope: float
    """Change of the gap, in percentage points, when the size doubles."""
    half: float
    """Half of its 95 % interval."""
    crossing: tuple[float, float, float] | None
    """N at which the gap is zero and the limits of its 95 % interval (Fieller 1954); None: that
    interval has no end, as the slope may be 0."""


def places(results: TableResults, table: Table) -> list[Place]:
    """Return the columns with a counted run of the baseline."""
    found: dict[str, Place] = {}
    for cell in results.cells:
        if cell.row == table.baseline and cell.entries and cell.flops:
            data = round(cell.tokens / cell.entries)
            place = Place(cell.column, cell.entries, data, cell.tokens, cell.flops)
            found.setdefault(cell.column, place)
    return [found[column] for column in table.columns if column in found]


def gaps(results: TableResults, table: Table, factor: float | None) -> Gaps:
    """Return how far runs are above dense ones.

    Args:
        results: of a table with columns.
        table: the first metric is a loss.
        factor: speed of a 2:4 matmul relative to a dense one; the dense run costs as much. None: it
            has as many tokens.
    """
    values = results.values(next(iter(table.metrics)))
    base = table.baseline or ""
    by_row: Gaps = {}
    for place in places(results, table):
        at_base = values.get(cell_name(base, place.column), {})
        for row in table.rows:
            if row == base or row in table.match:
                continue
            own = values.get(cell_name(row, place.column), {})
            share = cost_share(results, row, place, factor)
            shorter = None if share is None else shortened(results, table, place, share)
            if shorter is None:
                continue
            seeds = {s: 100 * (own[s] / (at_base[s] * shorter) - 1) for s in own if s in at_base}
            if seeds:
                by_row.setdefault(row, {})[place.parameters, place.data] = seeds
    return by_row


def over_sizes(
    by_place: Mapping[tuple[int, int], Mapping[int, float]], data: int
) -> dict[int, Difference]:
    """Return N -> gaps of the seeds, of one row with ``data`` tokens per parameter, ascending."""
    return {
        n: Difference("", [*seeds.values()])
        for (n, amount), seeds in sorted(by_place.items())
        if amount == data
    }


def cost_share(results: TableResults, row: str, place: Place, factor: float | None) -> float | None:
    """Return the cost of a row's run relative to the baseline in its column; None: not counted."""
    cells = [c for c in results.cells if (c.row, c.column) == (row, place.column) and c.flops]
    if not cells:
        return None
    if factor is None:
        return 1.0
    saved = 1 - (cells[0].flops or 0) / place.flops  # flops: a 2:4 matmul costs half
    return 1 - saved * (2 * (1 - 1 / factor) if cells[0].sparse_matmuls else 1)


def shortened(results: TableResults, table: Table, place: Place, share: float) -> float | None:
    """Return the loss of a dense run with ``share`` of the tokens, relative to that with all.

    It is interpolated between the dense runs of the same size, with the seeds that all of them
    have; None: there is only one amount of data.
    """
    if share == 1:
        return 1.0
    values = results.values(next(iter(table.metrics)))
    same = [other for other in places(results, table) if other.parameters == place.parameters]
    losses = [values.get(cell_name(table.baseline or "", other.column), {}) for other in same]
    measured = [(p, loss) for p, loss in zip(same, losses, strict=True) if loss]
    common = set.intersection(*(set(loss) for _, loss in measured)) if measured else set()
    if len(measured) < 2 or not common:
        return None
    x = [math.log(p.tokens) for p, _ in measured]
    y = [math.log(np.mean([loss[seed] for seed in common])) for _, loss in measured]
    curve = np.polynomial.Polynomial.fit(x, y, min(DEGREE, len(x) - 1))
    here = math.log(place.tokens)
    return math.exp(float(curve(here + math.log(share)) - curve(here)))


def line_of(points: Sequence[tuple[float, float]]) -> Line | None:
    """Fit gaps over ln N by least squares; None with fewer than three points or two sizes.

    Args:
        points: (N, gap) of every run.
    """
    x, y = np.log([n for n, _ in points]), np.array([gap for _, gap in points])
    if len(points) < 3 or len({*x.tolist()}) < 2:
        return None
    center = x.mean()
    square = ((x - center) ** 2).sum()
    slope, mean = ((x - center) @ y) / square, y.mean()
    free = len(points) - 2
    variance = ((y - mean - slope * (x - center)) ** 2).sum() / free
    t = stats.t.ppf(0.975, free)
    half = float(t * math.sqrt(variance / square))
    crossing = None
    if abs(slope) > half:  # else the interval of the root has no end
        # N where mean + slope·(ln N - center) may be zero: a quadratic inequality in ln N
        a = slope**2 - t**2 * variance / square
        b = mean * slope
        c = mean**2 - t**2 * variance / len(points)
        middle, spread = -b / a, math.sqrt(max(b * b - a * c, 0.0)) / a
        at, low, high = (
            math.exp(min(center + root, 700.0))  # exp(710) overflows
            for root in (-mean / slope, middle - spread, middle + spread)
        )
        crossing = at, low, high
    return Line(float(slope * math.log(2)), half * math.log(2), crossing)


def crossing_text(line: Line, smallest: int, largest: int) -> str:
    """Return where the line is zero, with its interval, or why there is no number.

    Args:
        line: of gaps over ln N.
        smallest, largest: N of the runs.
    """
    if line.crossing is None:
        return "not determined: no trend with size"
    at, low, high = line.crossing
    if high < smallest / REACH:
        side = "below" if line.slope < 0 else "above"
        return f"none: the line is {side} zero at all sizes here"
    if low > largest * REACH:
        side = "above" if line.slope < 0 else "below"
        return f"none up to {count(largest)}: the line is {side} zero at all sizes here"
    if low < smallest / REACH or high > largest * REACH:
        return f"not determined: between {_size(low)} and {_size(high)}"
    return f"{_size(at)} ({_size(low)} to {_size(high)})"


def _size(n: float) -> str:
    return count(round(n)) if n < 1e12 else "10¹² and more"


def interpolation_check(results: TableResults, table: Table) -> str:
    """Compare interpolated dense losses with the rows of ``table.match`` that ran; empty: none."""
    values = results.values(next(iter(table.metrics)))
    errors = []
    for place in places(results, table):
        base = values.get(cell_name(table.baseline or "", place.column), {})
        for row, match in table.match.items():
            own = values.get(cell_name(row, place.column), {})
            common = own.keys() & base.keys()
            share = cost_share(results, match.to, place, 2.0)
            if share is None or match.equal != "flops" or not common:
                continue
            expected = shortened(results, table, place, match.factor * share)
            if expected is not None:
                trained = np.mean([own[s] for s in common]) / np.mean([base[s] for s in common])
                errors.append(100 * abs(expected / trained - 1))
    if not errors:
        return ""
    return (
        f"In {len(errors)} cells a dense run of equal FLOPs was trained as well: the interpolated "
        f"loss differs from its mean by {np.mean(errors):.2f} % in the mean and at most "
        f"{max(errors):.2f} %."
    )


def section(results: TableResults, table: Table) -> list[str]:
    """Return Markdown lines: gaps by size and data, how they change, and where they are zero."""
    lines: list[str] = []
    for title, factor in COSTS.items():
        found = gaps(results, table, factor)
        if not found:
            continue
        every = sorted({n for by_place in found.values() for n, _ in by_place})
        rows = [
            (row, str(data), *_cells(over_sizes(by_place, data), every))
            for row, by_place in found.items()
            for data in sorted({data for _, data in by_place})
        ]
        header = (
            *(table.row_label, "tokens per parameter"),
            *(f"{n:,} parameters" for n in every),
            *("per doubling", "equal to dense at"),
        )
        lines += [f"**Percent above dense, {title}**", "", *markdown_table(header, rows), ""]
    if not lines:
        return []
    about = [
        "Means over seeds with 95 % intervals, relative to dense with the same seed. Parameters: "
        "without embeddings. Per doubling: change of the gap, in points, when the size doubles, by "
        "a line through all runs of a row over ln N; equal to dense at: where this line is zero, "
        "with Fieller's 95 % interval. Lines through two to four sizes say little beyond them.",
        "At equal cost, dense runs have fewer tokens and a schedule of their own length. Their "
        "loss is interpolated between the dense runs of the same size. "
        + interpolation_check(results, table),
    ]
    return [*lines, about[0], "", about[1].strip(), ""]


def _cells(by_size: Mapping[int, Difference], every: Sequence[int]) -> list[str]:
    """Return the gap at every size, its change per doubling, and where it is zero."""
    measured = [_percent(by_size[n]) if n in by_size else "–" for n in every]
    line = line_of([(n, gap) for n, seeds in by_size.items() for gap in seeds.values])
    if line is None:
        return [*measured, "–", "–"]
    slope = f"{line.slope:+.2f} ± {line.half:.2f}"
    return [*measured, slope, crossing_text(line, min(by_size), max(by_size))]


def _percent(d: Difference) -> str:
    low, high = d.interval()
    return f"{d.mean:+.1f}" + (f" ± {(high - low) / 2:.1f}" if d.n > 1 else "")
