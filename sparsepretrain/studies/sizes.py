"""Gaps to dense training against model size and data, at equal tokens and at equal cost.

For tables whose columns are sizes with amounts of data, such as ``scaling_lm``. Columns with
equally many parameters of the baseline (N, without embeddings) are one size; the tokens of a run
over N, rounded, are its data. Nothing of this is written in the table: both follow from the runs.

At equal cost, a run is compared with a dense run of the same size that trains on fewer tokens and
costs as much, if a 2:4 matmul is ``factor`` times as fast as a dense one. Its loss is interpolated
between the dense runs of this size: a parabola through the mean losses of three amounts of data, in
logarithms of loss and tokens. Where a size has fewer amounts, or none with as few tokens, there is
no such comparison. Dense runs of equal FLOPs that were trained need no interpolation.
"""

from __future__ import annotations

import itertools
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

AMOUNTS = 3
"""Amounts of data that determine a parabola of dense losses."""
MEASURED = 1.064
"""Speed of 2:4 matmuls that gives the measured time of a step: of GPT-2 124M on an H200
(docs/gpu.md) with S-STE and ``sparse_matmuls=auto``, which takes 0.984 of a dense one where 26.5 %
of the FLOPs could be 2:4. It ran 12 of 48 matmuls as 2:4."""
COSTS = {
    "at equal tokens": None,
    "at equal FLOPs, if a 2:4 matmul is twice as fast": 2.0,
    f"at equal cost, if a 2:4 matmul is {MEASURED:.2f} times as fast": MEASURED,
}
"""Title of a comparison -> speed of a 2:4 matmul relative to a dense one; None: equal tokens."""
TRAINED = "at equal FLOPs, against shorter dense runs that were trained"
"""Title of the comparison without interpolation; 2:4 matmuls count as twice as fast."""

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
    """Mean of the least-squares lines of gaps over ln N, one for each seed.

    Intervals are those of means over seeds, so that sizes may differ in noise.
    """

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


def trained_gaps(results: TableResults, table: Table) -> Gaps:
    """Return how far runs are above dense ones of equal FLOPs that were trained.

    Those are rows of ``table.match``: shorter dense runs with a schedule of their own length. Gaps
    are relative to the one with the same seed, and nothing is interpolated.
    """
    values = results.values(next(iter(table.metrics)))
    by_row: Gaps = {}
    for shorter, match in table.match.items():
        if match.equal != "flops" or match.factor != 1:
            continue
        for place in places(results, table):
            dense = values.get(cell_name(shorter, place.column), {})
            own = values.get(cell_name(match.to, place.column), {})
            seeds = {s: 100 * (own[s] / dense[s] - 1) for s in own if s in dense}
            if seeds:
                by_row.setdefault(match.to, {})[place.parameters, place.data] = seeds
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
    # seeds differ where a method decides when it begins to be sparse; flops: 2:4 costs half
    saved = 1 - np.mean([cell.flops or 0 for cell in cells]) / place.flops
    return float(1 - saved * (2 * (1 - 1 / factor) if cells[0].sparse_matmuls else 1))


def shortened(results: TableResults, table: Table, place: Place, share: float) -> float | None:
    """Return the loss of a dense run with ``share`` of the tokens, relative to that with all.

    It is interpolated between the dense runs of the same size, with the seeds that all of them
    have. None: there are fewer than three amounts of data, or none with so few tokens.
    """
    if share == 1:
        return 1.0
    values = results.values(next(iter(table.metrics)))
    same = [other for other in places(results, table) if other.parameters == place.parameters]
    losses = [values.get(cell_name(table.baseline or "", other.column), {}) for other in same]
    measured = [(p, loss) for p, loss in zip(same, losses, strict=True) if loss]
    common = set.intersection(*(set(loss) for _, loss in measured)) if measured else set()
    if len(measured) < AMOUNTS or not common:
        return None
    x = [math.log(p.tokens) for p, _ in measured]
    y = [math.log(np.mean([loss[seed] for seed in common])) for _, loss in measured]
    here = math.log(place.tokens)
    there = here + math.log(share)
    if there < min(x):
        return None
    curve = np.polynomial.Polynomial.fit(x, y, AMOUNTS - 1)
    return math.exp(float(curve(there) - curve(here)))


def line_of(by_size: Mapping[int, Mapping[int, float]]) -> Line | None:
    """Fit gaps over ln N for each seed; None with fewer than two seeds that have two sizes.

    Args:
        by_size: N -> seed -> gap.
    """
    center = np.mean([math.log(n) for n in by_size])
    lines = []
    for seed in sorted({seed for seeds in by_size.values() for seed in seeds}):
        x = [math.log(n) - center for n, seeds in by_size.items() if seed in seeds]
        y = [seeds[seed] for seeds in by_size.values() if seed in seeds]
        if len(x) > 1:
            lines.append(np.polyfit(x, y, 1))
    if len(lines) < 2:
        return None
    slopes, levels = np.array(lines).T  # levels: gaps at the center
    level, slope = levels.mean(), slopes.mean()
    # variances of both means and their covariance, times the square of t
    ((vl, vc), (_, vs)) = (
        np.cov(levels, slopes) / len(lines) * stats.t.ppf(0.975, len(lines) - 1) ** 2
    )
    half = math.sqrt(vs)
    crossing = None
    if abs(slope) > half:  # else the interval of the root has no end
        # ln N - center at which level + slope·(ln N - center) may be zero: a quadratic inequality
        a, b, c = slope**2 - vs, level * slope - vc, level**2 - vl
        middle, spread = -b / a, math.sqrt(max(b * b - a * c, 0.0)) / a
        at, low, high = (
            math.exp(min(center + root, 700.0))  # exp(710) overflows
            for root in (-level / slope, middle - spread, middle + spread)
        )
        crossing = at, low, high
    return Line(float(slope * math.log(2)), half * math.log(2), crossing)


def crossing_text(line: Line, by_size: Mapping[int, Difference]) -> str:
    """Return the size at which sparse runs equal dense ones, or why there is no number.

    A number needs mean gaps of both signs, with one change of sign over the sizes, and a line that
    is zero between the two sizes where it happens: lines through curved gaps may be zero elsewhere.

    Args:
        line: of the gaps over ln N.
        by_size: N -> gaps of the seeds, ascending.
    """
    limits = [d.interval() for d in by_size.values()]
    if all(low > 0 for low, _ in limits):
        return "none: worse than dense at all sizes"
    if all(high < 0 for _, high in limits):
        return "none: better than dense at all sizes"
    changes = [
        (n, larger)
        for (n, d), (larger, other) in itertools.pairwise(by_size.items())
        if (d.mean > 0) is not (other.mean > 0)
    ]
    if line.crossing is None or len(changes) != 1:
        return "not determined"
    at, low, high = line.crossing
    if not changes[0][0] <= at <= changes[0][1]:
        return "not determined: the gaps are not on a line"
    return f"{_size(at)} ({_size(low)} to {_size(high)})"


def _size(n: float) -> str:
    return count(round(n)) if n < 1e12 else "10¹² and more"


def interpolation_check(results: TableResults, table: Table) -> str:
    """Compare interpolated dense losses with the rows of ``table.match`` that ran; empty: none."""
    values = results.values(next(iter(table.metrics)))
    errors: list[float] = []
    checked: dict[str, None] = {}
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
                errors.append(float(100 * abs(expected / trained - 1)))
                checked[place.column] = None
    if not errors:
        return ""
    return (
        f"In {len(errors)} cells ({'; '.join(checked)}) a dense run of equal FLOPs was trained as "
        f"well: the interpolated loss differs from its mean by {np.mean(errors):.2f} % in the mean "
        f"and at most {max(errors):.2f} %."
    )


def section(results: TableResults, table: Table) -> list[str]:
    """Return Markdown lines: gaps by size and data, how they change, and where they are zero."""
    lines: list[str] = []
    tables = {title: gaps(results, table, factor) for title, factor in COSTS.items()}
    for title, found in {**tables, TRAINED: trained_gaps(results, table)}.items():
        if not found:
            continue
        every = sorted({n for by_place in found.values() for n, _ in by_place})
        rows = [
            (row, str(data), *_cells(by_place, data, every))
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
        "lines over ln N, one for each seed; equal to dense at: where their mean is zero, with "
        "Fieller's 95 % interval, if the gaps have both signs. Lines through two to four sizes say "
        "little beyond them.",
        "At equal cost, dense runs have fewer tokens and a schedule of their own length. Their "
        "loss is interpolated between the dense runs of the same size, where there are three "
        "amounts of data, and at least one with fewer tokens; intervals leave out the error of "
        "that.",
        interpolation_check(results, table),
        f"{MEASURED:.2f} is the speed that gives the time of a step of S-STE as it was measured on "
        "a GPU (GPT-2 124M: 0.984 of a dense step, 12 of 48 matmuls as 2:4; docs/gpu.md, which "
        "leaves differences of that size unexplained).",
        _shares(results, table),
    ]
    for text in filter(None, about):
        lines += [text, ""]
    return lines


def _shares(results: TableResults, table: Table) -> str:
    """Return a sentence on FLOPs relative to the baseline by size; empty: no row saves any.

    Larger models save more, so that a gap at equal FLOPs falls with size even if none falls at
    equal tokens.
    """
    by_row: dict[str, dict[int, float]] = {}
    for place in places(results, table):
        for row in table.rows:
            share = None if row in table.match else cost_share(results, row, place, 2.0)
            if share is not None and share < 1:
                by_row.setdefault(row, {})[place.parameters] = share
    if not by_row:
        return ""
    each = "; ".join(
        f"{row} {', '.join(f'{share:.2f}' for _, share in sorted(shares.items()))}"
        for row, shares in by_row.items()
    )
    return (
        "FLOPs relative to dense, by ascending size, if a 2:4 matmul is twice as fast: "
        f"{each}. The output layer is dense, and a smaller part of larger models."
    )


def _cells(
    by_place: Mapping[tuple[int, int], Mapping[int, float]], data: int, every: Sequence[int]
) -> list[str]:
    """Return the gap at every size, its change per doubling, and where it is zero."""
    by_size = over_sizes(by_place, data)
    measured = [gap_text(by_size[n]) if n in by_size else "–" for n in every]
    line = line_of({n: by_place[n, data] for n in by_size})
    if line is None:
        return [*measured, "–", "–"]
    return [*measured, f"{line.slope:+.2f} ± {line.half:.2f}", crossing_text(line, by_size)]


def gap_text(d: Difference) -> str:
    """Return the mean gap with half of its 95 % interval, if there are seeds for one."""
    low, high = d.interval()
    return f"{d.mean:+.1f}" + (f" ± {(high - low) / 2:.1f}" if d.n > 1 else "")
