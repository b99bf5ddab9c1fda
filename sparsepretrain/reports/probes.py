"""Figures of the probes that runs recorded; those of descent and scale are like S-STE's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsepretrain.reports import plots
from sparsepretrain.reports.figures import draw_band
from sparsepretrain.reports.plots import COLORS, DASHES, GRAY, drawable
from sparsepretrain.reports.runs import Curve, RunData

Groups = Mapping[str, Sequence[RunData]]
"""Name -> runs of several seeds."""

MIDDLE = 0.15, 0.6
"""Part of the run that the descent table covers. Before it, the loss falls for every method;
after it, changes are near the rounding of the loss."""

GRADIENTS = {"wgrad": "dW", "dgrad": "dX"}
"""Matmul -> gradient that it gives."""


def of_run(run: RunData) -> dict[str, Figure]:
    """Return name -> figure of the probes of one run."""
    drawn = {"lifetime": lifetime_figure(run), "estimator": estimator_figure(run)}
    return of_groups({plots.title(run): [run]}) | _named(drawn)


def of_groups(groups: Groups) -> dict[str, Figure]:
    """Return name -> figure of the probes that compare runs; seeds are taken together."""
    return _named(
        {
            "descent_masks": masks_figure(groups),
            "descent": descent_figure(groups),
            "scale": scale_figure(groups),
        }
    )


def _named(figures: Mapping[str, Figure | None]) -> dict[str, Figure]:
    return {f"probe_{name}": figure for name, figure in figures.items() if figure is not None}


def measured(runs: Sequence[RunData], probe: str, *keys: str) -> np.ndarray:
    """Return steps and values, (lines, 1 + keys), of a probe's lines with finite ``keys``."""
    lines = [line for run in runs for line in run.probes if line["probe"] == probe]
    rows = [[line["step"], *map(line.get, keys)] for line in lines if {*keys} <= line.keys()]
    values = np.array(rows, dtype=np.float64).reshape(len(rows), 1 + len(keys))
    return values[np.isfinite(values).all(axis=1)]  # null in the record is NaN


def epsilons(groups: Groups) -> list[float]:
    """Return the measured fractions ε of the update, largest first."""
    keys = {key for runs in groups.values() for run in runs for line in run.probes for key in line}
    parts = [key.removeprefix("actual_") for key in keys if key.startswith("actual_")]
    return sorted(map(float, parts), reverse=True)


def changes(runs: Sequence[RunData], epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, predicted and actual change of the loss along a fraction of each update."""
    values = measured(runs, "descent", "predicted", f"actual_{epsilon:g}")
    return values[:, 0], epsilon * values[:, 1], values[:, 2]


def descent_table(groups: Groups) -> list[tuple[str, ...]]:
    """Return a header and a row per name and ε, from lines in ``MIDDLE``; empty without enough.

    Slope: least squares of actual on predicted through the origin. Residual: standard deviation
    around it, over the mean absolute prediction.
    """
    heads = ("run", "ε", "steps", "correlation", "loss rises", "actual ÷ predicted", "residual")
    rows: list[tuple[str, ...]] = [heads]
    for label, runs in groups.items():
        for epsilon in epsilons({label: runs}):
            steps, *both = changes(runs, epsilon)
            total = runs[0].config.get("steps") or runs[0].end
            inside = (steps >= MIDDLE[0] * total) & (steps <= MIDDLE[1] * total)
            predicted, actual = (values[inside] for values in both)
            size = float(np.abs(predicted).mean()) if len(predicted) > 2 else 0.0
            if not size or not np.ptp(actual):
                continue
            slope = float(actual @ predicted / (predicted @ predicted))
            correlation = np.corrcoef(predicted, actual)[0, 1]
            residual = np.std(actual - slope * predicted) / size
            rises = f"{100 * np.mean(actual > 0):.1f} %"
            numbers = (f"{correlation:.3f}", rises, f"{slope:.2f}", f"{residual:.2f}")
            rows.append((label, f"{epsilon:g}", str(len(actual)), *numbers))
    return rows if len(rows) > 1 else []


def masks_figure(groups: Groups) -> Figure | None:
    """Plot ΔF₁ (weights and masks move) over ΔF₂ (weights only); S-STE, Figure 1."""
    keys = ("weights_only", "actual_1")
    every = {name: measured(runs, "descent", *keys) for name, runs in groups.items()}
    shown = {name: points for name, points in every.items() if len(points)}
    if not shown:
        return None
    figure, grid = plots.new_figure((1.2 + 3.1 * len(shown), 3.9), columns=len(shown))
    scale = _scale(np.concatenate([points[:, 1:].ravel() for points in shown.values()]))
    for axes, (label, points) in zip(grid, shown.items(), strict=True):
        mesh = _scatter(axes, points[:, 1], points[:, 2], points[:, 0], scale)
        rises = 100 * np.mean(points[:, 2] > 0)
        axes.set_title(f"{label}\nΔF₁ > 0 in {rises:.1f} % of {len(points)}", fontsize=8)
        axes.set_xlabel("ΔF₂ (masks fixed)", fontsize=8)
    grid[0].set_ylabel("ΔF₁ (masks recomputed)", fontsize=8)
    return _with_steps(figure, mesh, groups)


def descent_figure(groups: Groups) -> Figure | None:
    """Plot predicted and actual reduction, a row per ε, and its distribution; S-STE, Figure 2."""
    parts = epsilons(groups)
    shown = {name: runs for name, runs in groups.items() if len(measured(runs, "descent"))}
    if not shown or not parts:
        return None
    columns = len(shown) + 1
    size = (1.2 + 2.6 * columns, 1.0 + 2.5 * len(parts))
    figure, grid = plots.new_figure(size, columns=columns, rows=len(parts))
    for first, epsilon in zip(range(0, len(grid), columns), parts, strict=True):
        row = grid[first : first + columns]
        points = {label: changes(runs, epsilon) for label, runs in shown.items()}
        scale = _scale(np.concatenate([values for _, *both in points.values() for values in both]))
        for index, (label, (steps, predicted, actual)) in enumerate(points.items()):
            mesh = _scatter(row[index], -predicted, -actual, steps, scale)
            row[index].set_title(f"{label}\nε = {epsilon:g}", fontsize=7)
            row[index].set_xlabel("predicted reduction", fontsize=8)
            share = np.arange(1, len(actual) + 1) / len(actual)
            style = plots.line_style(index) | {"marker": None}
            row[-1].step(np.sort(-actual), share, where="post", label=label, **style)
        row[0].set_ylabel("actual reduction", fontsize=8)
        row[-1].axvline(0, color="black", linewidth=0.8)
        _symlog(row[-1], scale, both=False)
        row[-1].set_title(f"share of steps below\nε = {epsilon:g}", fontsize=7)
        row[-1].set_xlabel("actual reduction", fontsize=8)
    if len(shown) > 1:
        grid[columns - 1].legend(fontsize=6, frameon=False, loc="upper left")
    return _with_steps(figure, mesh, groups)


def scale_figure(groups: Groups) -> Figure | None:
    """Plot flip rates and scales β over layers and seeds; S-STE, Figure 4. None without scales."""
    runs = [run for seeds in groups.values() for run in seeds]
    if not any(line["probe"] == "scale" for run in runs for line in run.probes):
        return None
    figure, (left, right) = plots.new_figure((11, 4.4), columns=2)
    left.set_yscale("log")
    every: list[int] = []
    for index, (label, seeds) in enumerate(groups.items()):
        style = plots.line_style(index) | {"marker": None}
        flips = [run.series("flip_rate") for run in seeds]
        curves: list[Curve | None] = [(steps.tolist(), rates.tolist()) for steps, rates in flips]
        if draw_band(left, curves, style | {"label": label}).size:
            every += [run.flip_interval() for run in seeds]
        keys = dict.fromkeys(key for run in seeds for line in run.probes for key in line)
        for kind, width in (("beta/", 1.8), ("best/", 0.8)):
            names = [key for key in keys if key.startswith(kind)]
            if not names:
                continue
            lines = measured(seeds, "scale", *names)
            steps = np.unique(lines[:, 0])
            scales = [lines[lines[:, 0] == step, 1:] for step in steps]
            style |= {"linewidth": width}
            right.plot(steps, [np.median(values) for values in scales], **style)
            if kind == "beta/":
                low = [np.min(values) for values in scales]
                high = [np.max(values) for values in scales]
                right.fill_between(steps, low, high, color=style["color"], alpha=0.15)
    plots.flip_axis(left, every)
    for axes in (left, right):
        plots.step_axis(axes)
    right.set_ylabel("scale β (median and range of the layers;\nthin: current least-squares scale)")
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    return plots.footed(figure, runs)


def lifetime_figure(run: RunData) -> Figure | None:
    """Plot deaths and resurrections, ages, and flips by L1 gap; None without the probe."""
    counts = measured([run], "lifetime", "deaths", "births", "resurrections")
    ages = measured([run], "lifetime", "age_10", "age_50", "age_90")
    if not len(counts):
        return None
    figure, (rates, middle, gaps) = plots.new_figure((13, 4), columns=3)
    for index, name in enumerate(("deaths", "births", "resurrections"), start=1):
        style: dict[str, Any] = {"color": COLORS[index], "linestyle": DASHES[index - 1]}
        rates.plot(counts[:, 0], plots.visible(counts[:, index]), label=name, **style)
    rates.set_ylabel("per entry and comparison")
    rates.set_yscale("log" if drawable(counts[:, 1:], log=True) else "linear")
    middle.fill_between(ages[:, 0], ages[:, 1], ages[:, 3], color=COLORS[0], alpha=0.2)
    middle.plot(ages[:, 0], ages[:, 2], color=COLORS[0], label="median, 10 to 90 %")
    middle.plot(ages[:, 0], ages[:, 0], color=GRAY, linestyle=":", label="since the start")
    middle.set_ylabel("steps since an entry was last selected")
    for axes in (rates, middle):
        plots.step_axis(axes)
    keys = {key for line in run.probes for key in line if key.startswith("flips_gap_")}
    classes = sorted(keys, key=lambda key: int(key.removeprefix("flips_gap_")))
    shares = measured([run], "lifetime", *classes)
    for index, part in enumerate(np.array_split(shares, min(3, len(shares)))):
        span = f"steps to {part[-1, 0]:.0f}"
        mean = plots.visible(part[:, 1:].mean(0))
        gaps.plot(mean, color=COLORS[index], marker=plots.MARKERS[index], label=span)
    gaps.set_xlabel("L1 gap class, 0 = smallest")
    gaps.set_ylabel("groups that flip per comparison")
    gaps.set_yscale("log" if drawable(shares[:, 1:], log=True) else "linear")
    for axes in (rates, middle, gaps):
        axes.legend(fontsize=7, frameon=False)
    return plots.footed(figure, [run])


def estimator_figure(run: RunData) -> Figure | None:
    """Plot running means of squared bias and variance of MVUE; None without the probe."""
    shown = [p for p in GRADIENTS if len(measured([run], "estimator", f"{p}_bias"))]
    if not shown:
        return None
    figure, panels = plots.new_figure((10, 4), columns=2)
    for matmul, color in zip(shown, COLORS, strict=False):
        for axes, key in zip(panels, ("bias", "variance"), strict=True):
            steps, values = measured([run], "estimator", f"{matmul}_{key}").T
            count = np.arange(1, len(values) + 1)
            mean = np.cumsum(values) / count
            spread = np.cumsum(values**2) / count - mean**2
            error = np.sqrt(np.maximum(spread, 0) / np.maximum(count - 1, 1))
            axes.plot(steps, values, ".", color=color, alpha=0.3, markersize=3)
            axes.plot(
                steps, mean, color=color, label=f"{GRADIENTS[matmul]}: mean so far ± standard error"
            )
            axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.25)
    for axes, name in zip(panels, ("squared bias", "variance"), strict=True):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel(f"{name} ÷ ‖exact gradient‖²")
        axes.legend(fontsize=8, frameon=False)
        plots.step_axis(axes)
    return plots.footed(figure, [run])


def _scale(values: np.ndarray) -> tuple[float, float]:
    """Return (linear threshold, largest magnitude) of a symlog axis."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if not len(sizes):
        return 1.0, 1.0
    largest = float(sizes.max())
    return max(float(np.quantile(sizes, 0.1)), 1e-4 * largest), largest


def _symlog(axes: Axes, scale: tuple[float, float], *, both: bool = True) -> None:
    linear, largest = scale
    for name in "xy" if both else "x":
        getattr(axes, f"set_{name}scale")("symlog", linthresh=linear)
        getattr(axes, f"set_{name}lim")(-2 * largest, 2 * largest)
        axis = getattr(axes, f"{name}axis")
        axis.get_major_locator().set_params(numticks=7)
        axis.set_tick_params(labelsize=6, labelrotation=45 if name == "x" else 0)


def _scatter(
    axes: Axes, x: np.ndarray, y: np.ndarray, steps: np.ndarray, scale: tuple[float, float]
) -> Any:
    _symlog(axes, scale)
    line = [-2 * scale[1], 2 * scale[1]]
    axes.plot(line, line, color=GRAY, linewidth=0.8, zorder=1)
    for draw in (axes.axhline, axes.axvline):
        draw(0, color="black", linewidth=0.6)
    return axes.scatter(x, y, c=steps, s=7, cmap="viridis", linewidths=0, zorder=2)


def _with_steps(figure: Figure, mesh: Any, groups: Groups) -> Figure:
    figure.colorbar(mesh, ax=figure.axes, label="step", fraction=0.03, pad=0.01)
    return plots.footed(figure, [run for runs in groups.values() for run in runs])
