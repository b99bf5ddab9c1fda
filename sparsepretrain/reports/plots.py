"""Figures of one run. Each function builds a figure from data, without files and pyplot.

Colors are those of Okabe and Ito, which color-blind readers can tell apart; runs also differ by
marker.
"""

from __future__ import annotations

import os.path
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsepretrain.reports.runs import RunData, smooth

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>ph8d"
"""Markers, two per color: runs of one color differ."""
DASHES = ("-", "--", "-.", ":")
GRAY = "#707070"


def loss_figure(run: RunData) -> Figure | None:
    """Draw training loss, as logged and averaged, and validation loss."""
    curves = [("loss", None, "train, "), ("loss", "validation", "validation")]
    return _curves(run, curves, f"loss ({run.loss_name})")


def metric_figure(run: RunData) -> Figure | None:
    """Draw the scores of the task over evaluations, in percent; None with fewer than two."""
    name = run.metric
    if name is None or np.isfinite(run.series(name, "validation")[1]).sum() < 2:
        return None
    names = [name, *(score for score in run.scores() if score != name)][: len(COLORS)]
    label = "%, validation" if len(names) > 1 else f"{name} (%, validation)"
    return _curves(run, [(score, "validation", score) for score in names], label)


def flip_figure(run: RunData) -> Figure | None:
    """Draw the flip rate over all sparse layers, log axis; None if all are zero."""
    return _curves(run, [("flip_rate", None, "")], "flip rate", log=True)


def lr_figure(run: RunData) -> Figure | None:
    """Draw the learning rate."""
    return _curves(run, [("lr", None, "")], "learning rate")


def _curves(
    run: RunData, curves: Sequence[tuple[str, str | None, str]], label: str, *, log: bool = False
) -> Figure | None:
    """Draw (key, split, label) curves over steps; None without a drawable value.

    Training curves are drawn as logged and, with enough points, as running means; the learning
    rate has no noise, and a running mean would lag.
    """
    figure, (axes,) = new_figure((8.5, 4.8))
    axes.set_title(title(run), loc="left", fontsize=10)
    axes.set_ylabel(label)
    step_axis(axes)
    if log:
        flip_axis(axes, [run.flip_interval()])
    for index, (key, split, name) in enumerate(curves):
        steps, values = run.series(key, split)
        if not drawable(values, log=log):
            continue
        mean, width = smooth(values) if split is None and key != "lr" else (values, 1)
        mean, color = visible(mean, log), COLORS[index]
        smoothed = "as logged"
        if width > 1:
            smoothed = f"running mean over {int(np.median(np.diff(steps))) * width} steps"
            faint: dict[str, Any] = {"color": color, "alpha": 0.35, "linewidth": 0.8}
            axes.plot(steps, visible(values, log), label=f"{name}as logged", **faint)
        few = "." if len(mean) <= 40 else None
        marker = few if split is None else MARKERS[index]
        text = name if split else name + smoothed
        axes.plot(steps, mean, color=color, marker=marker, markersize=4, label=text)
    if not axes.lines:
        return None
    for step, change in run.switches():
        axes.axvline(step, color=GRAY, linewidth=1, linestyle=":")
        style: dict[str, Any] = {"rotation": 90, "fontsize": 7, "color": GRAY}
        style |= {"transform": axes.get_xaxis_transform(), "ha": "right", "va": "top"}
        axes.text(step, 1, f"{change} at {step} ", **style)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return footed(figure, [run])


def layers_figure(run: RunData) -> Figure | None:
    """Draw the flip rate of each layer over steps, log colors; None with fewer than two steps."""
    steps, names, values = run.layers()
    if not drawable(values, log=True) or len(steps) < 2:
        return None
    figure, (axes,) = new_figure((9, min(16.0, max(3.2, 1.9 + 0.19 * len(names)))))
    map_ = colormaps["viridis"].with_extremes(bad="#dddddd")
    shown = np.ma.masked_invalid(visible(values))
    norm = LogNorm(vmin=min(shown.min(), shown.max() / 10), vmax=shown.max())
    edges = np.arange(len(names) + 1) - 0.5
    columns = np.append(2 * steps[0] - steps[1], steps)  # each column starts at the step before
    mesh = axes.pcolormesh(columns, edges, shown, cmap=map_, norm=norm, rasterized=True)
    parents = [name.rpartition(".")[0].replace(".", "/") for name in names]
    stem = os.path.commonpath(parents).replace("/", ".")
    short = [name.removeprefix(f"{stem}.") for name in names]
    every = -(-len(names) // 70)
    axes.set_yticks(range(0, len(names), every), short[::every], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_ylabel(f"layer of {stem}" if stem else "layer")
    step_axis(axes)
    none = "; gray: none" if np.any(values == 0) else ""
    figure.colorbar(mesh, ax=axes, label=f"flip rate{over(run)}{none}", fraction=0.05, pad=0.02)
    for step, _ in run.switches():
        axes.axvline(step, color="white", linewidth=1.2, linestyle=":")
    axes.set_title(f"Flip rate by layer: {title(run)}", loc="left", fontsize=10)
    return footed(figure, [run])


def new_figure(
    size: tuple[float, float], columns: int = 1, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and its axes, row by row."""
    cells = [[row * columns + i for i in range(columns)] for row in range(rows)]
    figure, axes = new_mosaic(size, cells)
    return figure, [*axes.values()]


def new_mosaic(
    size: tuple[float, float], rows: Any, heights: Sequence[float] | None = None
) -> tuple[Figure, dict[int, Axes]]:
    """Return an empty figure and its axes, numbered as in ``rows``; equal neighbors are merged."""
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    grid = figure.subplot_mosaic(rows, height_ratios=heights)
    for axes in grid.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid


def line_style(index: int) -> dict[str, Any]:
    """Return color, dashes and marker of the n-th curve."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index // len(COLORS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def step_axis(axes: Axes) -> None:
    """Label the x axis and put ticks at whole steps."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")


def flip_axis(axes: Axes, every: Collection[int]) -> None:
    """Make the y axis a log axis of flip rates; ``every``: steps between masks, per curve."""
    steps = max(every, default=1)
    interval = "per step" if steps == 1 else f"per refresh, every {steps} steps"
    if len({*every}) > 1:
        interval = "intervals differ: see legend"
    axes.set_yscale("log")
    axes.set_ylabel(f"flip rate (share of mask entries,\n{interval})", fontsize=9)


def over(run: RunData) -> str:
    """Return `` over 40 steps`` if a flip rate compares masks more than one step apart."""
    interval = run.flip_interval()
    return f" over {interval} steps" if interval > 1 else ""


def title(run: RunData) -> str:
    """Return name, method, precision and seed of a run, as far as known."""
    parts = [run.config.get("name"), run.method, run.option("precision")]
    parts = [part for part in parts if part != "fp32"]
    if "seed" in run.config:
        parts.append(f"seed {run.config['seed']}")
    return ", ".join(dict.fromkeys(str(part) for part in parts if part)) or run.path.name


def footed(figure: Figure, runs: Sequence[RunData]) -> Figure:
    """Add command, commit and hardware of the first run, as far as known."""
    command, commit, hardware = map(runs[0].environment.get, ("command", "commit", "hardware"))
    if command and any(run.environment.get("command") != command for run in runs):
        command = f"{command} (and {len(runs) - 1} more)"
    if isinstance(hardware, dict):
        hardware = ", ".join(f"{k} {v}" for k, v in hardware.items() if v is not None)
    parts = [command, f"commit {commit[:12]}" if commit else None, hardware]
    width = int(14 * figure.get_figwidth())
    text = textwrap.fill(" · ".join(part for part in parts if part), width, max_lines=3)
    figure.supxlabel(text, fontsize=7, color=GRAY, x=0.01, ha="left")
    return figure


def visible(values: np.ndarray, log: bool = True) -> np.ndarray:
    """Return values as drawn: zeros on a log axis become gaps."""
    return np.where(values > 0, values, np.nan) if log else values


def drawable(values: np.ndarray, *, log: bool = False) -> bool:
    """Return True if at least one value can be drawn."""
    return bool(np.isfinite(visible(values, log)).any())
