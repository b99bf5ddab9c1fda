"""Figures of runs. Each function builds one figure from data and touches neither files nor pyplot.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; runs also differ by marker.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.reports.runs import RunData, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>ph8d"
"""Twice as many as colours, so that runs of one colour differ."""
DASHES = ("-", "--", "-.", ":")
TRAIN, VALIDATION = COLOURS[0], COLOURS[1]
GREY = "#707070"


def loss_figure(run: RunData) -> Figure | None:
    """Training loss, as logged and averaged, and validation loss; None without a loss."""
    steps, loss = run.series("loss")
    evaluated, validation = run.series("loss", "validation")
    if not drawable(loss) and not drawable(validation):
        return None
    figure, axes = _single(run)
    if drawable(loss):
        _smoothed(axes, steps, loss, "train, ")
    if drawable(validation):
        style: dict[str, Any] = {"color": VALIDATION, "marker": "o", "markersize": 3.5}
        axes.plot(evaluated, validation, linewidth=1.2, label="validation", **style)
    axes.set_ylabel(loss_label(run))
    return _finish(figure, run)


def metric_figure(run: RunData) -> Figure | None:
    """Scores of the task over the evaluations, in percent.

    None where the loss is all there is, or the score of one evaluation: that is a number.
    """
    name = run.metric
    if name is None or np.isfinite(run.series(name, "validation")[1]).sum() < 2:
        return None
    figure, axes = _single(run, height=3.6)
    others = [score for score in run.scores() if score != name]
    for index, metric in enumerate([name, *others[: len(COLOURS) - 1]]):
        style: dict[str, Any] = {"color": COLOURS[index], "marker": MARKERS[index]}
        steps, values = run.series(metric, "validation")
        width = 1.6 if metric == name else 0.9
        axes.plot(steps, values, markersize=4, linewidth=width, label=metric, **style)
    # one score needs no legend
    axes.set_ylabel("%, validation" if others else f"{name} (%, validation)")
    return _finish(figure, run)


def flip_figure(run: RunData) -> Figure | None:
    """Flip rate over all sparse layers, log axis; None when there is none above zero."""
    steps, flips = run.series("flip_rate")
    if not drawable(flips, log=True):
        return None
    figure, axes = _single(run)
    _smoothed(axes, steps, flips, "", log=True)
    flip_axis(axes, [run.flip_interval()])
    return _finish(figure, run)


def lr_figure(run: RunData) -> Figure | None:
    """Learning rate; None when it was not logged."""
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
    """Flip rate of each layer over the steps, log colours.

    None without values above zero, or of one step only: then there is no course to show.
    """
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
    columns = np.append(2 * steps[0] - steps[1], steps)  # each reaches back to the one before
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


def loss_label(run: RunData) -> str:
    """What a loss axis shows."""
    return f"loss ({run.loss_name})"


def new_figure(size: tuple[float, float], columns: int = 1, rows: int = 1) -> tuple[Figure, Any]:
    """An empty figure and its axes: as an array (columns), or (rows, columns) of several rows."""
    cells = [[row * columns + i for i in range(columns)] for row in range(rows)]
    figure, axes = new_mosaic(size, cells)
    grid = np.array([*axes.values()]).reshape(rows, columns)
    return figure, grid if rows > 1 else grid[0] if columns > 1 else grid[0, 0]


def new_mosaic(
    size: tuple[float, float], rows: Any, heights: Sequence[float] | None = None
) -> tuple[Figure, dict[int, Axes]]:
    """An empty figure and its axes, numbered as in ``rows``; equal neighbours are one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", dpi=150)
    grid = figure.subplot_mosaic(rows, height_ratios=heights)
    for axes in grid.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid


def line_style(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of the n-th thing that is compared."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
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
    """Steps are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")


def engineering() -> Formatter:
    """Ticks as 1 M, 20 k."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="\N{THIN SPACE}")


def _smoothed(
    axes: Axes, steps: np.ndarray, values: np.ndarray, name: str, *, log: bool = False
) -> None:
    """A curve as logged and, where it has points enough, its running mean above it."""
    mean, width = smooth(values)
    if width > 1:
        faint: dict[str, Any] = {"color": TRAIN, "alpha": 0.35, "linewidth": 0.8}
        axes.plot(steps, visible(values, log), label=f"{name}as logged", **faint)
    mean = visible(mean, log)
    style: dict[str, Any] = {"color": TRAIN, "linewidth": 1.6, "marker": point_marker(mean)}
    axes.plot(steps, mean, label=name + mean_label(steps, width), **style)


def point_marker(values: np.ndarray) -> str | None:
    """The marker of a curve: a dot where few points, or lone ones between gaps, would not show."""
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
    """A log axis of flip rates that says over how many steps they are; ``every``: of each curve."""
    steps = max(every, default=1)
    interval = "per step" if steps == 1 else f"per refresh, every {steps} steps"
    if len({*every}) > 1:
        interval = "intervals differ: see legend"
    axes.set_yscale("log")
    axes.set_ylabel(f"flip rate (share of mask entries,\n{interval})", fontsize=9)


def over(run: RunData) -> str:
    """`` over 40 steps`` where a flip rate is not that of one step."""
    interval = run.flip_interval()
    return f" over {interval} steps" if interval > 1 else ""


def title(run: RunData) -> str:
    """What a run is called in titles: its name, method and seed, as far as they are known."""
    parts = [run.config.get("name"), run.method, run.option("precision")]
    parts = [part for part in parts if part != "fp32"]
    if "seed" in run.config:
        parts.append(f"seed {run.config['seed']}")
    return ", ".join(dict.fromkeys(str(part) for part in parts if part)) or run.path.name


def footed(figure: Figure, runs: Sequence[RunData]) -> Figure:
    """With command, commit and hardware of the first run, as far as environment.json knows them."""
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
    """What a smoothed line shows, with the width in steps."""
    if width == 1:
        return "as logged"
    return f"running mean over {int(np.median(np.diff(steps))) * width} steps"


def means_label(runs: Sequence[RunData], key: str) -> str:
    """What the smoothed lines of several runs show: the width where they share it."""
    series = [run.series(key) for run in runs]
    found = {mean_label(steps, smooth(values)[1]) for steps, values in series if len(steps)}
    return found.pop() if len(found) == 1 else "running means" if found else "as logged"


def visible(values: np.ndarray, log: bool = True) -> np.ndarray:
    """What a curve can show: zeros have no place on a log axis and are gaps."""
    return np.where(values > 0, values, np.nan) if log else values


def drawable(values: np.ndarray, *, log: bool = False) -> bool:
    """Whether there is anything to show."""
    return bool(np.isfinite(visible(values, log)).any())


def _shorten(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split off the dotted prefix that all names share."""
    # the last part always stays, and so does the only name of a single layer
    parents = [name.split(".")[:-1] for name in names] if len(names) > 1 else []
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    shared = [parts[0] for parts in alike]
    start = len("".join(f"{part}." for part in shared))
    return ".".join(shared), [name[start:] for name in names]
