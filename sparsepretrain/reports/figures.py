"""Figures of comparisons: differences over a run, at its end, and along an axis of a table.

Bands and bars are 95 % intervals over seeds; one seed has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.config.tables import Table, place
from sparsepretrain.reports import plots
from sparsepretrain.reports.claims import Difference, Values, minus
from sparsepretrain.reports.plots import COLOURS, DASHES, MARKERS
from sparsepretrain.reports.results import TableResults
from sparsepretrain.reports.runs import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 4
"""Side by side; of more columns the axis says more."""

Curves = dict[str, Curve]
Pairs = Mapping[str, Sequence[tuple[Curves, Curves | None]]]
"""Label -> curves of each seed, and of the run that is subtracted; None: nothing is."""


def of_table(results: TableResults, table: Table) -> dict[str, tuple[Figure, str]]:
    """Name -> figure and its caption; empty where nothing was measured."""
    first, metric = next(iter(table.metrics.items()))
    baseline, columns = table.baseline, list(table.columns) or [""]
    found: dict[str, tuple[Figure | None, str]] = {}
    if baseline and len(columns) <= PANELS:
        titles = [f"{table.column_label} {column}".strip() if column else "" for column in columns]
        panels = {
            title: _pairs(results, table, column, baseline)
            for title, column in zip(titles, columns, strict=True)
        }
        name = metric.label if metric.key == "loss" else "validation loss"
        figure = difference_figure(panels, baseline, name, results.unit)
        found["difference"] = figure, f"Difference to {baseline} over the run, and flip rates"
    values = {key: results.values(key) for key in table.metrics}
    unit = f" minus that of {baseline}" if baseline else ""
    if len(columns) < 3:
        dots = {
            " @ ".join(filter(None, (f"{table.metrics[key].label}{unit}", column))): {
                row: d
                for row in table.rows
                if row != baseline and (d := _of(values[key], row, column, baseline)).n
            }
            for key in ([*table.metrics][:PANELS] if columns == [""] else [first])
            for column in columns
        }
        found["final"] = dots_figure(dots, table.rows), f"Final values{unit}, with intervals"
    else:
        found["axis"] = axis_figure(results, table), f"Along {table.column_label}"
    return {name: (figure, text) for name, (figure, text) in found.items() if figure is not None}


def _of(values: Values, row: str, column: str, baseline: str | None) -> Difference:
    at = place(row, column)
    if baseline is None:
        return Difference(at, [*values.get(at, {}).values()])
    return minus(values, at, place(baseline, column))


def _pairs(results: TableResults, table: Table, column: str, baseline: str) -> Pairs:
    cells = {(c.row, c.seed): c for c in results.cells if c.column == column and c.curves}
    done = [c for c in cells.values() if c.state == "finished"] or [*cells.values()]
    pairs: dict[str, list[tuple[Curves, Curves | None]]] = {row: [] for row in table.rows}
    for cell in done:
        partner = cells.get((baseline, cell.seed))
        if partner is not None and (partner.state == "finished") == (cell.state == "finished"):
            pairs[cell.row].append((cell.curves, partner.curves))
    return pairs


def difference_figure(
    panels: Mapping[str, Pairs], reference: str | None, name: str, unit: str
) -> Figure | None:
    """Validation loss minus that of the reference over the run, and flip rates below it.

    Args:
        panels: title -> pairs, side by side.
        reference: what is subtracted; None: nothing, the curves themselves.
        name: of the loss.
        unit: of the horizontal axis, as ``tokens``.

    Returns:
        None where no run has a curve.
    """
    panels = {title: pairs for title, pairs in panels.items() if any(pairs.values())}
    if not panels:
        return None
    width = 8.5 if len(panels) == 1 else 4 + 4 * len(panels)
    figure, grid = plots.new_figure((width, 7.2), columns=len(panels), rows=2, heights=(1.25, 1))
    labels = list(dict.fromkeys(label for pairs in panels.values() for label in pairs))
    drawn: dict[str, Any] = {}
    for (title, pairs), (upper, lower) in zip(panels.items(), grid.T, strict=True):
        ranges = []
        for label, runs in pairs.items():
            style = line_style(labels.index(label))
            losses = [_minus(a.get("loss"), None if b is None else b.get("loss")) for a, b in runs]
            if reference is None or label != reference:
                x, *values = band(losses)
                ranges += [part[x >= 0.1 * x[-1]] for part in values] if len(x) else []
                _draw(upper, x, values, style | {"label": label})
            x, *values = band([a.get("flip_rate") for a, _ in runs])
            _draw(lower, x, [*map(plots.visible, values)], style | {"marker": None, "label": label})
            drawn[label] = style
        upper.axhline(0, color="black", linewidth=1) if reference is not None else None
        upper.set_title(title, fontsize=10, loc="left")
        _limit(upper, ranges)
        lower.set_yscale("log")
        lower.set_xlabel(unit)
        lower.set_xlim(upper.get_xlim())
        for axes in (upper, lower):
            axes.xaxis.set_major_formatter(plots.engineering())
    difference = f"{name}\nminus that of {reference}" if reference is not None else name
    grid[0, 0].set_ylabel(difference, fontsize=9)
    grid[1, 0].set_ylabel("flip rate (share of mask entries\nthat change)", fontsize=9)
    _legend(figure, drawn)
    return figure


def dots_figure(
    panels: Mapping[str, Mapping[str, Difference]], order: Sequence[str] | Mapping[str, Any]
) -> Figure | None:
    """A dot and an interval per label, the best first; faint dots are seeds.

    Args:
        panels: title -> label -> its values.
        order: of all labels: decides their colours.
    """
    panels = {title: rows for title, rows in panels.items() if rows}
    if not panels:
        return None
    first = next(iter(panels.values()))
    labels = sorted(
        dict.fromkeys(label for rows in panels.values() for label in rows),
        key=lambda label: first[label].mean if label in first else math.inf,
    )
    names = list(order)
    size = (3.5 + 3.6 * len(panels), 1.5 + 0.34 * len(labels))
    figure, grid = plots.new_figure(size, columns=len(panels))
    for index, (axes, (title, rows)) in enumerate(
        zip(np.atleast_1d(grid), panels.items(), strict=True)
    ):
        for y, label in enumerate(labels):
            if label not in rows:
                continue
            d, style = rows[label], line_style(names.index(label))
            low, high = d.interval()
            if d.n > 1:
                axes.plot(d.values, [y] * d.n, ".", color=style["color"], alpha=0.35, markersize=5)
                axes.plot([low, high], [y, y], color=style["color"], linewidth=1.8)
            axes.plot([d.mean], [y], label=label, **style | {"linestyle": " ", "markersize": 6})
        if any(min(d.values) < 0 for d in rows.values()) or "minus" in title:
            axes.axvline(0, color="black", linewidth=1)
        axes.set_title(title, fontsize=9, loc="left", wrap=True)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.tick_params(labelsize=8, labelleft=index == 0)
        axes.margins(x=0.08)
    return figure


def axis_figure(results: TableResults, table: Table) -> Figure | None:
    """Every metric along the columns of a table, and the difference of each claimed crossing."""
    first = next(iter(table.metrics))
    columns, rows = list(table.columns), list(table.rows)
    panels: list[tuple[str, list[str], list[tuple[str, list[Difference]]]]] = []
    crossed = set()
    for claim in table.claims:
        a, b = claim.of[0], claim.of[-1]
        if claim.kind == "crossing" and isinstance(a, str) and isinstance(b, str):
            key = claim.metric or first
            values = results.values(key)
            line = [minus(values, place(a, c), place(b, c)) for c in claim.along]
            panels.append((f"{table.metrics[key].label}: {a} minus {b}", claim.along, [(a, line)]))
            crossed.add((key, a, b))
    for key, metric in table.metrics.items():
        values, shown = results.values(key), [row for row in rows if row != table.baseline]
        if all((key, row, table.baseline) in crossed for row in shown):
            continue
        lines = [(row, [_of(values, row, c, table.baseline) for c in columns]) for row in shown]
        title = metric.label + (f" minus that of {table.baseline}" if table.baseline else "")
        panels.append((title, columns, lines))
    panels = [panel for panel in panels if any(d.n for _, line in panel[2] for d in line)]
    if not panels:
        return None
    size = (1.5 + 5 * len(panels), 4.6)
    figure, grid = plots.new_figure(size, columns=len(panels))
    drawn: dict[str, Any] = {}
    for axes, (title, ticks, lines) in zip(np.atleast_1d(grid), panels, strict=True):
        numbers = [value for _, line in lines for d in line for value in d.values]
        for offset, (label, line) in enumerate(lines):
            style = line_style(rows.index(label))
            at = [i + 0.06 * (offset - (len(lines) - 1) / 2) for i in range(len(ticks))]
            points = [(x, d, d.interval()) for x, d in zip(at, line, strict=True) if d.n]
            means = [d.mean for _, d, _ in points]
            axes.plot([x for x, *_ in points], means, label=label, **style)
            for x, _, (low, high) in points:
                axes.plot([x, x], [low, high], color=style["color"], linewidth=2, alpha=0.7)
            drawn[label] = style
        if min(numbers) < 0 or "minus" in title:
            axes.axhline(0, color="black", linewidth=1)
        elif min(numbers) > 0 and max(numbers) > 20 * min(numbers):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xticks(range(len(ticks)), ticks, fontsize=8)
        if sum(map(len, ticks)) > 40:
            axes.tick_params(axis="x", rotation=30)
        axes.set_xlabel(table.column_label)
    _legend(figure, drawn)
    return figure


def band(curves: Sequence[Curve | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Points that all seeds have, the mean there, and its interval (NaN for one seed)."""
    known = [curve for curve in curves if curve is not None and len(curve[0])]
    if not known:
        return (np.empty(0),) * 4
    x = np.array(known[0][0])
    for other, _ in known[1:]:
        x = np.intersect1d(x, other)
    y = np.array([np.array(v, dtype=np.float64)[np.searchsorted(t, x)] for t, v in known])
    columns = [Difference("", column) for column in y.T]
    low, high = np.array([d.interval() for d in columns]).reshape(-1, 2).T
    return x, np.array([d.mean for d in columns]), low, high


def line_style(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the n-th thing that is compared."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def _minus(curve: Curve | None, other: Curve | None) -> Curve | None:
    """A curve less another at the points that both have."""
    if curve is None or other is None:
        return curve
    at = dict(zip(*other, strict=True))
    both = [(x, y, at.get(x)) for x, y in zip(*curve, strict=True)]
    points = [(x, y - z) for x, y, z in both if y is not None and z is not None]
    return [x for x, _ in points], [y for _, y in points]


def _draw(axes: Axes, x: np.ndarray, values: Sequence[np.ndarray], style: Any) -> None:
    """A mean with the band between a low and a high one."""
    mean, low, high = values
    axes.plot(x, mean, markevery=max(1, len(x) // 12), **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _limit(axes: Axes, ranges: Sequence[np.ndarray]) -> None:
    """The first tenth of a run may leave the axis: it would press all differences together."""
    late = np.concatenate([*ranges, [0.0]] if ranges else [[0.0, 1.0]])
    late = late[np.isfinite(late)]
    low, high = float(late.min()), float(late.max())
    room = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - room, high + room)


def _legend(figure: Figure, drawn: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in drawn.items()]
    columns = min(len(handles), 6 if max(map(len, drawn), default=0) < 16 else 3)
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8
    )
