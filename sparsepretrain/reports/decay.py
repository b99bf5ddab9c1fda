"""The figure of a decay search: μ over λ, and the flip rates that it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.errors import ConfigError
from sparsepretrain.reports.plots import COLOURS, GREY, new_figure, point_marker, visible
from sparsepretrain.reports.runs import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "decay.png"


def decay_report(result: dict[str, Any], directory: Path) -> Path:
    """Draw a search into ``directory``; returns the picture's path.

    Args:
        result: what ``tune.json`` holds; the run directories are read.
        directory: of the results.

    Raises:
        ConfigError: a run is gone, or nothing can be written.
        DataError: a damaged record.
    """
    try:
        decay_figure(result).savefig(directory / PICTURE)
    except OSError as error:
        raise ConfigError(f"cannot draw the search in {directory}: {error}") from error
    return directory / PICTURE


def decay_figure(result: dict[str, Any]) -> Figure:
    """Left: μ of every λ with the feasible interval; right: flip rates over the steps."""
    from matplotlib import colormaps

    figure, (left, right) = new_figure((12, 5.2), columns=2)
    low, high = result["interval"]
    decays, ratios = ([run[key] for run in result["runs"]] for key in ("decay", "mu"))
    left.axhspan(low, high, color=COLOURS[2], alpha=0.18, label=f"feasible: {low:g} to {high:g}")
    left.plot(decays, ratios, color=COLOURS[0], marker="o", markersize=5, label="μ")
    if (decay := result["chosen"]) is not None:
        ring: dict[str, Any] = {"markersize": 12, "fillstyle": "none", "linestyle": " "}
        ring |= {"color": COLOURS[1], "marker": "o", "label": f"chosen: λ = {decay:.3g}"}
        left.plot([decay], [ratios[decays.index(decay)]], **ring)
    left.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    left.set(
        xscale="log", xlabel="decay factor λ", ylabel="μ = flip rate over that of the dense run"
    )
    left.set_ylim(bottom=0)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(decays)))
    _curve(right, result, result["dense"], label="dense", color="black", linewidth=2)
    for run, shade in zip(result["runs"], shades, strict=True):
        _curve(right, result, run, label=f"λ = {run['decay']:.3g}", color=shade)
    refresh = result["refresh"]
    interval = "per step" if refresh == 1 else f"per mask refresh, every {refresh} steps"
    right.set(yscale="log", xlabel="step", ylabel=f"flip rate ({interval})")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    name, seed = result["config"]["name"], result["config"]["seed"]
    figure.suptitle(
        f"Decay search: {result['method']} on {name}, seed {seed}, first {result['steps']} steps",
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    return figure


def _curve(axes: Any, result: dict[str, Any], run: dict[str, Any], **style: Any) -> None:
    steps, flips = load(Path(run["directory"])).series("flip_rate")
    inside = steps <= result["steps"]
    shown = visible(flips[inside])
    axes.plot(steps[inside], shown, marker=point_marker(shown), **style)
