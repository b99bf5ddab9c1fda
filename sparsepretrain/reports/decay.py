"""The figure of a decay search: μ over λ, and the flip rates that it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.errors import ConfigError
from sparsepretrain.reports.plots import COLOURS, GREY, _new, _positive
from sparsepretrain.reports.runs import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "decay.png"


def decay_report(directory: Path) -> Path:
    """Draw the search that ``directory/tune.json`` describes; returns the picture's path.

    Raises:
        ConfigError: there is no such file or a run of it is gone, or nothing can be written.
        DataError: a damaged record.
    """
    try:
        result = json.loads((directory / "tune.json").read_text(encoding="utf-8"))
        figure = decay_figure(result)
        figure.savefig(directory / PICTURE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw the search in {directory}: {error}") from error
    return directory / PICTURE


def decay_figure(result: dict[str, Any]) -> Figure:
    """Left: μ of every λ with the feasible interval; right: flip rates over the steps.

    ``result`` is what ``tune.json`` holds; the run directories are read.
    """
    from matplotlib import colormaps

    figure, (left, right) = _new((12, 5.2), columns=2)
    low, high = result["interval"]
    decays = [run["decay"] for run in result["runs"]]
    left.axhspan(low, high, color=COLOURS[2], alpha=0.18, label=f"feasible: {low:g} to {high:g}")
    ratios = [run["mu"] for run in result["runs"]]
    left.plot(decays, ratios, color=COLOURS[0], marker="o", markersize=5, label="μ")
    for decay, mu in zip(decays, ratios, strict=True):
        if decay == result["chosen"]:
            label = f"chosen: λ = {decay:.3g}"
            ring: dict[str, Any] = {"markersize": 12, "fillstyle": "none", "linestyle": " "}
            left.plot([decay], [mu], color=COLOURS[1], marker="o", label=label, **ring)
    left.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    left.set_xscale("log")
    left.set_ylim(bottom=0)
    left.set_xlabel("decay factor λ")
    left.set_ylabel("μ = flip rate over that of the dense run")
    left.legend(frameon=False, fontsize=8)
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(decays)))
    _curve(right, result, result["dense"], label="dense", color="black", linewidth=2)
    for run, shade in zip(result["runs"], shades, strict=True):
        _curve(right, result, run, label=f"λ = {run['decay']:.3g}", color=shade)
    right.set_yscale("log")
    right.set_xlabel("step")
    refresh = result["refresh"]
    interval = "per step" if refresh == 1 else f"per mask refresh, every {refresh} steps"
    right.set_ylabel(f"flip rate ({interval})")
    right.legend(frameon=False, fontsize=8)
    name, seed = result["config"]["name"], result["config"]["seed"]
    figure.suptitle(
        f"Decay search: {result['method']} on {name}, seed {seed}, first {result['steps']} steps",
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    return figure


def _curve(axes: Any, result: dict[str, Any], run: dict[str, Any], **style: Any) -> None:
    steps, flips = load(Path(run["directory"])).series("flip_rate")
    inside = steps <= result["steps"]
    marker = "." if inside.sum() <= 40 else None
    axes.plot(steps[inside], _positive(flips[inside]), marker=marker, **style)
