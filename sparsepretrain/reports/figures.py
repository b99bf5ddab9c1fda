"""Figures of several runs: differences over the run, and curves.

Bands are 95 % intervals over seeds; a single seed has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from sparsepretrain.reports import plots
from sparsepretrain.reports.differences import Difference
from sparsepretrain.reports.plots import line_style
from sparsepretrain.reports.runs import Curve, Paired, RunData, smooth

Curves = dict[str, Curve]
Pairs = Mapping[str, Sequence[tuple[Curves, Curves | None]]]
"""Label -> curves of each seed, with those of the reference run or None."""


def of_runs(paired: Paired) -> dict[str, Figure]:
    """Return name -> figure of several runs: differences over the run, and curves."""
    runs = paired.runs
    metric = next((run.metric for run in runs if run.metric is not None), None)
    shown = {"train loss": ("loss", None), "validation loss": ("loss", "validation")}
    shown |= {f"validation {metric} (%)": (metric, "validation")} if metric is not None else {}

    def curves(run: RunData) -> Curves:
        about = shown | {"flip_rate": ("flip_rate", None)}
        return {name: c for name, at in about.items() if (c := run.curve(*at, points=None))}

    def grouped(*, minus: bool) -> Pairs:
        panels: dict[str, list[tuple[Curves, Curves | None]]] = {name: [] for name in paired.names}
        for name, run, partner in zip(paired.names, runs, paired.partners, strict=True):
            if partner is not None or not minus:
                panels[name].append((curves(run), curves(partner) if partner and minus else None))
        return panels

    labels = {
        name: f"{name}\n({runs[0].loss_name})" if key == "loss" else name
        for name, (key, _) in shown.items()
    }
    reference = paired.reference
    unit = runs[0].unit
    named = zip(paired.names, runs, strict=True)
    every = {name: run.flip_interval() for name, run in named if run.curve("flip_rate")}
    drawn = {}
    if paired.has_pairs:
        pairs = grouped(minus=True)
        drawn["difference"] = difference_figure({"": pairs}, labels, reference, unit, every)
        every = {}  # flip rates are below the differences
    drawn["overlay"] = difference_figure({"": grouped(minus=False)}, labels, None, unit, every)
    return {n: plots.footed(figure, runs) for n, figure in drawn.items() if figure is not None}


def difference_figure(
    panels: Mapping[str, Pairs],
    keys: Mapping[str, str],
    reference: str | None,
    unit: str,
    every: Mapping[str, int],
) -> Figure | None:
    """Draw curves minus those of the reference (None: themselves), and flip rates below.

    ``panels`` and, in each, ``keys`` (key of a curve -> label) are side by side. ``every``: steps
    between two compared masks, by label; empty: no flip rates.
    """
    runs = [run for pairs in panels.values() for seeds in pairs.values() for run, _ in seeds]
    panels = {title: pairs for title, pairs in panels.items() if any(pairs.values())}
    keys = {key: label for key, label in keys.items() if any(key in run for run in runs)}
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
        means = [
            draw_band(axes, seeds, styles[label] | {"label": label})
            for label, seeds in curves.items()
        ]
        if reference is not None:
            axes.axhline(0, color="black", linewidth=1)
            means.append(np.zeros(1))
        shown = np.concatenate([mean[len(mean) // 2 :] for mean in means])
        if np.isfinite(shown).any() and (room := float(np.ptp(shown[np.isfinite(shown)]))):
            # the first half of a run and wide intervals would flatten all curves
            top = np.nanmax(shown) + room / 2
            axes.set_ylim(np.nanmin(shown) - room / 2, top)
            if reference is None and not every:
                # begin where the first curve comes down to the top; flips below share this axis
                drawn = [np.array(line.get_data()) for line in axes.get_lines()]
                axes.set_xlim(left=min(float(x[y <= top][0]) for x, y in drawn if (y <= top).any()))
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(keys[key] + minus_that if len(keys) > 1 or not at else "", fontsize=9)
        axes.set_xlabel(unit)
    for at, pairs in enumerate(panels.values() if every else []):
        axes = grid[columns + at]
        plots.flip_axis(axes, every.values())
        for label, seeds in pairs.items():
            style = styles[label] | {"marker": None, "label": label}
            draw_band(axes, [run.get("flip_rate") for run, _ in seeds], style)
        axes.set_ylabel(axes.get_ylabel() if not at else "")
        axes.set_xlabel(unit)
        axes.set_xlim(grid[at * len(keys)].get_xlim())
    for axes in grid.values():
        axes.xaxis.set_major_formatter(EngFormatter(sep="\N{THIN SPACE}"))  # 1 M, 20 k
    over = {label: f" (flips over {n} steps)" for label, n in every.items() if n > 1}
    over = over if len({*every.values()}) > 1 else {}
    add_legend(figure, {label + over.get(label, ""): style for label, style in styles.items()})
    return figure


def band(curves: Sequence[Curve | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return common points of all seeds, the smoothed mean and its interval (NaN for one seed).

    Batches that are filled to a token budget hold different token counts per seed: points are then
    matched by index, at the mean number of tokens.
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


def _minus(run: Curves, partner: Curves | None, key: str) -> Curve | None:
    """Subtract the partner's curve at common points after the start; None if one is missing."""
    if partner is None or key not in run or key not in partner:
        return run.get(key) if partner is None else None
    curve = run[key]
    other = partner[key]
    at = dict(zip(*other, strict=True))
    both = [(x, y, at.get(x)) for x, y in zip(*curve, strict=True)]
    # before training, differences are those of initial weights, with intervals that hide the rest
    points = [(x, y - z) for x, y, z in both if x and y is not None and z is not None]
    return [x for x, _ in points], [y for _, y in points]


def draw_band(axes: Axes, curves: Sequence[Curve | None], style: Any) -> np.ndarray:
    """Draw the mean of the seeds with its interval; return the mean."""
    x, mean, low, high = band(curves)
    if not len(x):
        return mean
    if axes.get_yscale() == "log":
        mean = plots.visible(mean)
        low = np.maximum(low, mean / 10)  # an interval may reach zero
    axes.plot(x, mean, markevery=max(1, len(x) // 12), **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return mean


def add_legend(figure: Figure, drawn: Mapping[str, Any]) -> None:
    """Add a legend above a figure; ``drawn``: label -> style of its line."""
    handles = [Line2D([], [], label=label, **style) for label, style in drawn.items()]
    inches = 0.6 + 0.062 * max(map(len, drawn), default=0)
    columns = min(len(handles), max(1, int(figure.get_figwidth() / inches)))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8
    )
