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
from sparsepretrain.reports.plots import line_style
from sparsepretrain.reports.results import TableResults
from sparsepretrain.reports.runs import Curve, Paired, RunData, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 4
"""Side by side; of more columns the axis says more."""

Curves = dict[str, Curve]
Pairs = Mapping[str, Sequence[tuple[Curves, Curves | None]]]
"""Label -> curves of each seed, and of the run that is subtracted; None: nothing is."""


def of_runs(paired: Paired) -> dict[str, Figure]:
    """Name -> figure of several runs: differences, those of the end, and the curves themselves."""
    runs, groups = paired.runs, paired.groups()
    metric = next((run.metric for run in runs if run.metric is not None), None)
    shown = {"train loss": ("loss", None), "validation loss": ("loss", "validation")}
    shown |= {f"validation {metric} (%)": (metric, "validation")} if metric is not None else {}

    def curves(run: RunData) -> Curves:
        about = shown | {"flip_rate": ("flip_rate", None)}
        return {name: c for name, at in about.items() if (c := run.curve(*at, points=None))}

    def grouped(*, minus: bool) -> Pairs:
        found: dict[str, list[tuple[Curves, Curves | None]]] = {name: [] for name in paired.names}
        for name, run, partner in zip(paired.names, runs, paired.partners, strict=True):
            if partner is not None or not minus:
                found[name].append((curves(run), curves(partner) if partner and minus else None))
        return found

    labels, reference, unit = {name: name for name in shown}, paired.reference, runs[0].unit
    flips = [(n, r) for n, r in zip(paired.names, runs, strict=True) if r.curve("flip_rate")]
    every = {name: run.flip_interval() for name, run in flips}
    drawn = {}
    if groups:
        pairs = grouped(minus=True)
        drawn["difference"] = difference_figure({"": pairs}, labels, reference, unit, every)
        dots = {
            f"{title}\nminus that of {reference}": {
                name: d for name, both in groups.items() if (d := final(both, key, name)).n
            }
            for title, (key, split) in shown.items()
            if split is not None
        }
        drawn["final"] = dots_figure(dots, pairs)
    every = {} if groups else every  # they are below the differences
    drawn["overlay"] = difference_figure({"": grouped(minus=False)}, labels, None, unit, every)
    return {n: plots.footed(figure, runs) for n, figure in drawn.items() if figure is not None}


def compared(run: RunData, partner: RunData, key: str) -> tuple[int, float] | None:
    """Return the last step after 0 at which both evaluated ``key``, and by how much they differ."""
    first, second = (one.curve(key, "validation", None) for one in (run, partner))
    steps, values = (first and second and _minus({key: first}, {key: second}, key)) or ([], [])
    pairs = [(int(step), value) for step, value in zip(steps, values, strict=True) if step > 0]
    return pairs[-1] if pairs and pairs[-1][1] is not None else None  # type: ignore[return-value]


def final(pairs: Sequence[tuple[RunData, RunData]], key: str, label: str = "") -> Difference:
    """Compare the last validation values of pairs that ended at the same step."""
    found = [compared(*both, key) for both in pairs if both[0].end == both[1].end]
    return Difference(label, [pair[1] for pair in found if pair is not None])


def of_table(results: TableResults, table: Table) -> dict[str, tuple[Figure, str]]:
    """Name -> figure and its caption; empty where nothing was measured."""
    first, metric = next(iter(table.metrics.items()))
    measured = {cell.column for cell in results.cells if cell.curves or cell.metrics}
    baseline, columns = table.baseline, [c for c in table.columns or [""] if c in measured]
    found: dict[str, tuple[Figure | None, str]] = {}
    if baseline and 0 < len(columns) <= PANELS:
        titles = [f"{table.column_label} {column}".strip() if column else "" for column in columns]
        panels = {
            title: _pairs(results, table, column, baseline)
            for title, column in zip(titles, columns, strict=True)
        }
        name = metric.label if metric.key == "loss" else "validation loss"
        every = {c.row: c.flip_interval for c in results.cells if "flip_rate" in c.curves}
        figure = difference_figure(panels, {"loss": name}, baseline, results.unit, every)
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
    panels: Mapping[str, Pairs],
    keys: Mapping[str, str],
    reference: str | None,
    unit: str,
    every: Mapping[str, int],
) -> Figure | None:
    """Curves minus those of the reference over the run, and flip rates below them.

    Args:
        panels: title -> pairs, side by side.
        keys: of the upper curves, side by side in each panel -> what they are.
        reference: what is subtracted; None: nothing, the curves themselves.
        unit: of the horizontal axis, as ``tokens``.
        every: label -> steps between the two masks of a flip rate; empty: no flip rates.

    Returns:
        None where no run has a curve.
    """
    runs = [own for pairs in panels.values() for seeds in pairs.values() for own, _ in seeds]
    panels = {title: pairs for title, pairs in panels.items() if any(pairs.values())}
    keys = {key: label for key, label in keys.items() if any(key in own for own in runs)}
    if not panels or not keys:
        return None
    upper = [(title, pairs, key) for title, pairs in panels.items() for key in keys]
    columns = len(upper)
    mosaic = [[*range(columns)]]
    mosaic += [[columns + i // len(keys) for i in range(columns)]] if every else []
    size = (8.5 if columns == 1 else 4 + 4 * columns, 7.2 if every else 4.6)
    figure, grid = plots.new_mosaic(size, mosaic, [1.25, 1][: len(mosaic)])
    labels = dict.fromkeys(label for pairs in panels.values() for label in pairs)
    styles = {label: line_style(index) for index, label in enumerate(labels)}
    minus_that = "" if reference is None else f"\nminus that of {reference}"
    for at, (title, pairs, key) in enumerate(upper):
        axes = grid[at]
        curves = {label: [_minus(a, b, key) for a, b in pairs[label]] for label in pairs}
        curves.pop(reference or "", None)
        bands = [
            draw_band(axes, seeds, styles[label] | {"label": label})
            for label, seeds in curves.items()
        ]
        if reference is not None:
            axes.axhline(0, color="black", linewidth=1)
        _limit(axes, bands, zero=reference is not None)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(keys[key] + minus_that if len(keys) > 1 or not at else "", fontsize=9)
        axes.set_xlabel(unit)
    for at, pairs in enumerate(panels.values() if every else []):
        axes = grid[columns + at]
        plots.flip_axis(axes, every.values())
        for label, seeds in pairs.items():
            style = styles[label] | {"marker": None, "label": label}
            draw_band(axes, [own.get("flip_rate") for own, _ in seeds], style)
        axes.set_ylabel(axes.get_ylabel() if not at else "")
        axes.set_xlabel(unit)
        axes.set_xlim(grid[at * len(keys)].get_xlim())
    for axes in grid.values():
        axes.xaxis.set_major_formatter(plots.engineering())
    over = {label: f" (flips over {n} steps)" for label, n in every.items() if n > 1}
    over = over if len({*every.values()}) > 1 else {}
    _legend(figure, {label + over.get(label, ""): style for label, style in styles.items()})
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
    """Points that all seeds have, the mean there, and its interval (NaN for one seed).

    The curves of the seeds are smoothed first, where they have many points. Where batches hold
    as many tokens as fit, seeds have seen other numbers of them at the same step: points of equal
    number belong together then, at the mean of the tokens.
    """
    known = [curve for curve in curves if curve is not None and len(curve[0])]
    if not known:
        return (np.empty(0),) * 4
    shortest = min(len(t) for t, _ in known)
    x = np.array(known[0][0])
    for other, _ in known[1:]:
        x = np.intersect1d(x, other)
    places = [np.searchsorted(t, x) for t, _ in known]
    if 2 * len(x) < shortest:
        x = np.mean([t[:shortest] for t, _ in known], axis=0)
        places = [np.arange(shortest)] * len(known)
    values = [np.array(v, np.float64)[at] for (_, v), at in zip(known, places, strict=True)]
    y = np.array([smooth(value)[0] for value in values])
    columns = [Difference("", column) for column in y.T]
    low, high = np.array([d.interval() for d in columns]).reshape(-1, 2).T
    return x, np.array([d.mean for d in columns]), low, high


def _minus(own: Curves, partner: Curves | None, key: str) -> Curve | None:
    """A curve less that of the partner, at the points that both have; None: one is not there."""
    if partner is None or key not in own or key not in partner:
        return own.get(key) if partner is None else None
    curve, other = own[key], partner[key]
    at = dict(zip(*other, strict=True))
    both = [(x, y, at.get(x)) for x, y in zip(*curve, strict=True)]
    points = [(x, y - z) for x, y, z in both if y is not None and z is not None]
    return [x for x, _ in points], [y for _, y in points]


def draw_band(axes: Axes, curves: Sequence[Curve | None], style: Any) -> np.ndarray:
    """The mean of the seeds with its interval; returns both (3, points), without the first tenth.

    On a log axis an interval that reaches zero is cut at a tenth of the mean.
    """
    x, *values = band(curves)
    if not len(x):
        return np.empty((3, 0))
    mean, low, high = values
    if axes.get_yscale() == "log":
        mean = plots.visible(mean)
        low = np.maximum(low, mean / 10)
    axes.plot(x, mean, markevery=max(1, len(x) // 12), **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return np.array([part[x >= 0.1 * x[-1]] for part in (mean, low, high)])


def _limit(axes: Axes, bands: Sequence[np.ndarray], *, zero: bool) -> None:
    """Show the means and, of wide intervals, as much again to both sides.

    The first tenth of a run may leave the axis: it would press all differences together.
    """
    means, *edges = np.concatenate([*bands, np.zeros((3, int(zero)))], axis=1)
    if not np.isfinite(means).any():
        return
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    room = high - low
    known = np.concatenate([means, *(np.clip(edge, low - room, high + room) for edge in edges)])
    low, high = float(np.nanmin(known)), float(np.nanmax(known))
    if room := 0.06 * (high - low):
        axes.set_ylim(low - room, high + room)


def _legend(figure: Figure, drawn: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in drawn.items()]
    inches = 0.6 + 0.062 * max(map(len, drawn), default=0)
    columns = min(len(handles), max(1, int(figure.get_figwidth() / inches)))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8
    )
