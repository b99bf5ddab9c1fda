"""Figures of tables: differences over the run, final values, and along the columns of a table.

Bands and bars are 95 % intervals over seeds; a single seed has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sparsepretrain.console import count
from sparsepretrain.reports import plots
from sparsepretrain.reports.differences import Difference
from sparsepretrain.reports.figures import Curves, Pairs, add_legend, difference_figure
from sparsepretrain.reports.plots import line_style
from sparsepretrain.studies import sizes
from sparsepretrain.studies.claims import difference
from sparsepretrain.studies.results import TableResults
from sparsepretrain.studies.tables import Metric, Table

PANELS = 4
"""Most columns shown side by side."""
CURVES = 6
"""Most methods in one panel, besides the baseline."""


def of_table(results: TableResults, table: Table) -> dict[str, tuple[Figure, str]]:
    """Return name -> (figure, caption); empty if nothing was measured."""
    first, metric = next(iter(table.metrics.items()))
    if results.tuning:
        drawn = {
            "ranked": (ranked_figure(results, table), "Final values, ranked, with their cost"),
            "cost": (cost_figure(results, table), "Final values against the FLOPs of the run"),
        }
        return {name: (figure, text) for name, (figure, text) in drawn.items() if figure}
    if table.scaling and table.columns:
        by_size = sizes_figure(results, table)
        if by_size is None:
            return {}
        return {"sizes": (by_size, f"Percent above {table.baseline} against model size, by data")}
    measured = {cell.column for cell in results.cells if cell.curves or cell.metrics}
    baseline = table.baseline
    columns = [c for c in table.columns or [""] if c in measured]
    figures: dict[str, tuple[Figure | None, str]] = {}
    others = [row for row in table.rows if row != baseline]
    if baseline and others and 0 < len(columns) <= PANELS:
        panels = {}
        for column in columns:
            title = f"{table.column_label} {column}".strip() if column else ""
            pairs = _pairs(results, table, column, baseline)
            size = -(-len(others) // -(-len(others) // CURVES))  # parts of almost equal size
            parts = [others[i : i + size] for i in range(0, len(others), size)]
            for number, rows in enumerate(parts, 1):
                part = f"{title} ({number} of {len(parts)})".strip() if len(parts) > 1 else title
                panels[part] = {row: pairs[row] for row in (baseline, *rows)}
        name = metric.label if metric.key == "loss" else "validation loss"
        every = {c.row: c.flip_interval for c in results.cells if "flip_rate" in c.curves}
        figure = difference_figure(panels, {"loss": name}, baseline, results.unit, every)
        figures["difference"] = figure, f"Difference to {baseline} over the run, and flip rates"
    values = {key: results.compared(key, table) for key in table.metrics}
    if len(columns) < 3:
        dots = {
            " @ ".join(filter(None, (_label(table.metrics[key], table), column))): {
                row: d
                for row in table.rows
                if row != baseline and (d := difference(values[key], row, column, baseline)).n
            }
            for key in ([*table.metrics][:PANELS] if columns == [""] else [first])
            for column in columns
        }
        text = f"{_label(metric, table, 'Final values')}, with intervals"
        figures["final"] = dots_figure(dots, table.rows), text
    else:
        figures["axis"] = axis_figure(results, table), f"Along {table.column_label}"
    return {name: (figure, text) for name, (figure, text) in figures.items() if figure is not None}


def ranked_figure(results: TableResults, table: Table) -> Figure | None:
    """Draw the first metric of each row with its interval, ranked; 2:4 matmuls at the right."""
    key, metric = next(iter(table.metrics.items()))
    values = results.compared(key, table)
    cost = results.costs(table.baseline)
    rows = {
        row: d
        for row in table.rows
        if row != table.baseline and (d := difference(values, row, "", table.baseline)).n
    }
    figure = dots_figure({_label(metric, table): rows}, table.rows)
    if figure is not None:
        (axes,) = figure.axes
        names = [label.get_text() for label in axes.get_yticklabels()]
        matmuls = [f"{cost[name][0]:.2g}" if name in cost else "–" for name in names]
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(names)), matmuls, fontsize=8)
        right.tick_params(length=0)
        right.set_ylabel("2:4 matmuls per layer, of 3")
    return figure


def cost_figure(results: TableResults, table: Table) -> Figure | None:
    """Draw the first metric against FLOPs; None without shorter runs of the baseline."""
    key, metric = next(iter(table.metrics.items()))
    values = results.compared(key, table)
    cost = results.costs(table.baseline)
    size = {cell.row: cell.parameters for cell in results.cells}
    base = table.baseline or ""
    # without a common seed a row cannot be compared with the baseline
    points = {row: d for row in cost if (d := difference(values, row, "", base)).n}
    short = [row for row in points if not cost[row][0] and size[row] == size.get(base)]
    if base not in points or len(short) < 2:
        return None
    points[base] = Difference(base, [0.0])  # without an interval
    figure, (axes,) = plots.new_figure((7.5, 4.4))
    for row, d in points.items():
        flops = cost[row][1]
        low, high = d.interval()
        color = plots.COLORS[0] if row in short else plots.COLORS[1]
        axes.plot([flops, flops], [low, high], color=color, linewidth=2)
        axes.plot([flops], [d.mean], "o", color=color)
    line = sorted((cost[row][1], points[row].mean) for row in short)
    axes.plot(*zip(*line, strict=True), color=plots.COLORS[0], linewidth=1, alpha=0.6)
    axes.set_xlabel(f"FLOPs, % of {base}, if a 2:4 matmul costs half a dense one")
    axes.set_ylabel(_label(metric, table))
    axes.margins(x=0.06, y=0.06)
    # labels in a column at the right, each with a line to its point: points may coincide
    low, high = axes.get_ylim()
    above = -math.inf
    for row in sorted(points, key=lambda row: points[row].mean):
        above = max((points[row].mean - low) / (high - low), above + 0.055)
        axes.annotate(
            row,
            (cost[row][1], points[row].mean),
            (1.04, above),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": "0.75", "relpos": (0, 0.5)},
        )
    return figure


def sizes_figure(results: TableResults, table: Table) -> Figure | None:
    """Draw gaps to the baseline over model sizes: a panel for each cost and amount of data.

    Bars are 95 % intervals over seeds.
    """
    costs = [*sizes.COSTS.items()][:2]  # those of a measured speed look like those of equal tokens
    drawn = {title: sizes.gaps(results, table, factor) for title, factor in costs}
    shown = {place for by_row in drawn.values() for at in by_row.values() for place in at}
    if not shown:
        return None
    every = sorted({n for n, _ in shown})
    amounts = sorted({data for _, data in shown})
    size = (1.2 + 3.4 * len(amounts), 6.4)
    figure, grid = plots.new_figure(size, columns=len(amounts), rows=len(drawn))
    styles: dict[str, Any] = {}
    for index, axes in enumerate(grid):
        title, by_row = [*drawn.items()][index // len(amounts)]
        data = amounts[index % len(amounts)]
        axes.set_visible(any((n, d) for at in by_row.values() for n, d in at if d == data))
        for row, by_place in by_row.items():
            points = [*sizes.over_sizes(by_place, data).items()]
            if not points:
                continue
            style = styles[row] = plots.line_style([*table.rows].index(row))
            # bars side by side: rows of one size would cover each other
            shift = 1 + 0.025 * ([*table.rows].index(row) - len(table.rows) / 2)
            x = [n * shift for n, _ in points]
            axes.plot(x, [d.mean for _, d in points], **style)
            for at, (_, d) in zip(x, points, strict=True):
                axes.plot([at, at], d.interval(), color=style["color"], linewidth=1.5, alpha=0.6)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(every[0] / 1.2, every[-1] * 1.2)
        axes.set_xticks(every, [count(n) for n in every])
        axes.minorticks_off()
        axes.set_title(f"{title}\n{data} {results.unit} per parameter", fontsize=8, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlabel("parameters without embeddings", fontsize=8)
        axes.set_ylabel(f"% above {table.baseline}", fontsize=8)
    limits = [axes.get_ylim() for axes in grid if axes.get_visible()]
    for axes in grid:  # equal, so that panels compare
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    add_legend(figure, styles)
    return figure


def _label(metric: Metric, table: Table, name: str = "") -> str:
    """Return the label of compared numbers, as ``validation loss, % above that of dense``."""
    name = name or metric.label
    if metric.percent_of:
        return f"{name}, % above that of {metric.percent_of}"
    return f"{name} minus that of {table.baseline}" if table.baseline else name


def _pairs(results: TableResults, table: Table, column: str, baseline: str) -> Pairs:
    cells = {(c.row, c.seed): c for c in results.cells if c.column == column and c.curves}
    done = [c for c in cells.values() if c.state == "finished"] or [*cells.values()]
    pairs: dict[str, list[tuple[Curves, Curves | None]]] = {row: [] for row in table.rows}
    for cell in done:
        partner = cells.get((baseline, cell.seed))
        if partner is not None and (partner.state == "finished") == (cell.state == "finished"):
            pairs[cell.row].append((cell.curves, partner.curves))
    return pairs


def dots_figure(
    panels: Mapping[str, Mapping[str, Difference]], order: Sequence[str] | Mapping[str, Any]
) -> Figure | None:
    """Draw a dot and an interval per label, sorted by mean; ``order`` decides the colors."""
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
    for index, (axes, (title, rows)) in enumerate(zip(grid, panels.items(), strict=True)):
        for y, label in enumerate(labels):
            if label not in rows:
                continue
            d = rows[label]
            style = line_style(names.index(label))
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
    """Draw every metric along the columns of a table, as it is compared."""
    columns = list(table.columns)
    rows = list(table.rows)
    baseline = table.baseline
    panels = []
    for key, metric in table.metrics.items():
        values = results.compared(key, table)
        lines = {
            row: [difference(values, row, column, baseline) for column in columns]
            for row in rows
            if row != baseline
        }
        if any(d.n for line in lines.values() for d in line):
            panels.append((_label(metric, table), lines))
    if not panels:
        return None
    figure, grid = plots.new_figure((1.5 + 5 * len(panels), 4.6), columns=len(panels))
    drawn: dict[str, Any] = {}
    for axes, (title, lines) in zip(grid, panels, strict=True):
        for label, line in lines.items():
            points = [(x, d.mean, *d.interval()) for x, d in enumerate(line) if d.n]
            style = drawn[label] = line_style(rows.index(label))
            x, mean, low, high = np.array(points).reshape(-1, 4).T
            axes.plot(x, mean, label=label, **style)
            axes.vlines(x, low, high, color=style["color"], linewidth=2, alpha=0.7)
        numbers = [v for line in lines.values() for d in line for v in d.values]
        if min(numbers) < 0 or baseline:
            axes.axhline(0, color="black", linewidth=1)
        elif min(numbers) > 0 and max(numbers) > 20 * min(numbers):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        if sum(map(len, columns)) > 40:
            axes.tick_params(axis="x", rotation=30)
        axes.set_xlabel(table.column_label)
    add_legend(figure, drawn)
    return figure
