"""Figures of one run. Each function builds a figure from data, without files and pyplot.

Colors are those of Okabe and Ito, which color-blind readers can tell apart; runs also differ by
marker.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.reports.runs import RunData, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>ph8d"
"""Twice as many as colors, so that runs of one color differ."""
DASHES = ("-", "--", "-.", ":")
TRAIN, VALIDATION = COLORS[0], COLORS[1]
GREY = "#707070"


def loss_figure(run: RunData) -> Figure | None:
    """Draw training loss, as logged and averaged, and validation loss; None without a loss."""
    steps, loss = run.series("loss")
    evaluated, validation = run.series("loss", "validation")
    if not drawable(loss) and not drawable(validation):
        return None
    figure, axes = _single(run)
    if drawable(loss):
        _plot_smoothed(axes, steps, loss, "train, ")
    if drawable(validation):
        style: dict[str, Any] = {"color": VALIDATION, "marker": "o", "markersize": 3.5}
        axes.plot(evaluated, validation, linewidth=1.2, label="validation", **style)
    axes.set_ylabel(f"loss ({run.loss_name})")
    return _finish(figure, run)


def metric_figure(run: RunData) -> Figure | None:
    """Draw the scores of the task over evaluations, in percent; None with fewer than two."""
    name = run.metric
    if name is None or np.isfinite(run.series(name, "validation")[1]).sum() < 2:
        return None
    figure, axes = _single(run, height=3.6)
    others = [score for score in run.scores() if score != name]
    for index, metric in enumerate([name, *others[: len(COLORS) - 1]]):
        style: dict[str, Any] = {"color": COLORS[index], "marker": MARKERS[index]}
        steps, values = run.series(metric, "validation")
        width = 1.6 if metric == name else 0.9
        axes.plot(steps, values, markersize=4, linewidth=width, label=metric, **style)
    # one score needs no legend
    axes.set_ylabel("%, validation" if others else f"{name} (%, validation)")
    return _finish(figure, run)


def flip_figure(run: RunData) -> Figure | None:
    """Draw the flip rate over all sparse layers, log axis; None if all are zero."""
    steps, flips = run.series("flip_rate")
    if not drawable(flips, log=True):
        return None
    figure, axes = _single(run)
    _plot_smoothed(axes, steps, visible(flips), "")
    flip_axis(axes, [run.flip_interval()])
    return _finish(figure, run)


def lr_figure(run: RunData) -> Figure | None:
    """Draw the learning rate; None if it was not logged."""
    steps, rate = run.series("lr")
    if not drawable(rate):
        return None
    figure, axes = _single(run, height=3.6)
    axes.plot(steps, rate, color=TRAIN, linewidth=1.6, label="learning rate")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    return _finish(figure, run)


def layers_figure(run: RunData) -> Figure | None:
    """Draw the flip rate of each layer over steps, log colors; None with fewer than two steps."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    steps, names, values = run.layers()
    if not drawable(values, log=True) or len(steps) < 2:
        return None
    figure, axes = new_figure((9, min(16.0, max(3.2, 1.9 + 0.19 * len(names)))))
    map_ = colormaps["viridis"].with_extremes(bad="#dddddd")
    shown = np.ma.masked_invalid(visible(values))
    norm = LogNorm(vmin=min(shown.min(), shown.max() / 10), vmax=shown.max())
    edges = np.arange(len(names) + 1) - 0.5
    columns = np.append(2 * steps[0] - steps[1], steps)  # each column starts at the step before
    mesh = axes.pcolormesh(columns, edges, shown, cmap=map_, norm=norm, rasterized=True)
    stem, short = _shorten(names)
    every = -(-len(names) // 70)
    axes.set_yticks(range(0, len(names), every), short[::every], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_ylabel(f"layer of {stem}" if stem else "layer")
    step_axis(axes)
    none = "; grey: none" if np.any(values == 0) else ""
    figure.colorbar(mesh, ax=axes, label=f"flip rate{over(run)}{none}", fraction=0.05, pad=0.02)
    for step, _ in run.switches():
        axes.axvline(step, color="white", linewidth=1.2, linestyle=":")
    axes.set_title(f"Flip rate by layer: {title(run)}", loc="left", fontsize=10)
    return _finish(figure, run, legend=False)


def new_figure(size: tuple[float, float], columns: int = 1, rows: int = 1) -> tuple[Figure, Any]:
    """Return an empty figure and its axes as an array (rows, columns) without axes of length 1."""
    cells = [[row * columns + i for i in range(columns)] for row in range(rows)]
    figure, axes = new_mosaic(size, cells)
    grid = np.array([*axes.values()]).reshape(rows, columns).squeeze()
    return figure, grid if grid.ndim else grid.item()


def new_mosaic(
    size: tuple[float, float], rows: Any, heights: Sequence[float] | None = None
) -> tuple[Figure, dict[int, Axes]]:
    """Return an empty figure and its axes, numbered as in ``rows``; equal neighbors are merged."""
    from matplotlib.figure import Figure

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


def _single(run: RunData, height: float = 4.8) -> tuple[Figure, Axes]:
    figure, axes = new_figure((8.5, height))
    axes.set_title(title(run), loc="left", fontsize=10)
    step_axis(axes)
    return figure, axes


def step_axis(axes: Axes) -> None:
    """Label the axis; ticks are whole steps."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")


def engineering() -> Formatter:
    """Return a formatter for ticks such as 1 M and 20 k."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="\N{THIN SPACE}")


def _plot_smoothed(axes: Axes, steps: np.ndarray, values: np.ndarray, name: str) -> None:
    """Plot a curve as logged and, with enough points, its running mean on top."""
    mean, width = smooth(values)
    if axes.get_yscale() == "log":
        mean = visible(mean)
    if width > 1:
        faint: dict[str, Any] = {"color": TRAIN, "alpha": 0.35, "linewidth": 0.8}
        axes.plot(steps, values, label=f"{name}as logged", **faint)
    style: dict[str, Any] = {"color": TRAIN, "linewidth": 1.6, "marker": point_marker(mean)}
    axes.plot(steps, mean, label=name + mean_label(steps, width), **style)


def point_marker(values: np.ndarray) -> str | None:
    """Return a dot if a line would hide points: few points, or single ones between gaps."""
    known = np.pad(np.isfinite(values), 1)
    lone = known[1:-1] & ~known[:-2] & ~known[2:]
    return "." if len(values) <= 40 or lone.any() else None


def _finish(figure: Figure, run: RunData, *, legend: bool = True) -> Figure:
    axes = figure.axes[0]
    if legend:
        for step, change in run.switches():
            axes.axvline(step, color=GREY, linewidth=1, linestyle=":")
            style: dict[str, Any] = {"rotation": 90, "fontsize": 7, "color": GREY}
            style |= {"transform": axes.get_xaxis_transform(), "ha": "right", "va": "top"}
            axes.text(step, 1, f"{change} at {step} ", **style)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return footed(figure, [run])


def flip_axis(axes: Axes, every: Collection[int]) -> None:
    """Make a log axis of flip rates; ``every``: steps between compared masks, per curve."""
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
    figure.supxlabel(text, fontsize=7, color=GREY, x=0.01, ha="left")
    return figure


def mean_label(steps: np.ndarray, width: int) -> str:
    """Return the label of a smoothed curve, with the width in steps."""
    if width == 1:
        return "as logged"
    return f"running mean over {int(np.median(np.diff(steps))) * width} steps"


def visible(values: np.ndarray, log: bool = True) -> np.ndarray:
    """Return values as drawn: zeros on a log axis become gaps."""
    return np.where(values > 0, values, np.nan) if log else values


def drawable(values: np.ndarray, *, log: bool = False) -> bool:
    """True if at least one value can be drawn."""
    return bool(np.isfinite(visible(values, log)).any())


def _shorten(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split off the dotted prefix that all names share; the last part always stays."""
    parts, shared = [name.split(".") for name in names], 0
    while len(names) > 1 and len({tuple(part[: shared + 1]) for part in parts}) == 1:
        shared += 1
    return ".".join(parts[0][:shared]), [".".join(part[shared:]) for part in parts]
