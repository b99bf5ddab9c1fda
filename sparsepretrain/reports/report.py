"""Plots and a Markdown page of one run, or an overlay of several."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.errors import ConfigError
from sparsepretrain.files import write_atomic
from sparsepretrain.reports import plots
from sparsepretrain.reports.glue import glue_average, glue_scores
from sparsepretrain.reports.runs import RunData, differences, find, load, smooth
from sparsepretrain.reports.runs import labels as default_labels
from sparsepretrain.tracking.console import clock, count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = {
    "loss": (plots.loss_figure, "no loss was recorded"),
    "metric": (plots.metric_figure, ""),
    "flip_rate": (plots.flip_figure, "no flip rate above zero was recorded"),
    "flip_rate_layers": (plots.layers_figure, "no flip rate of layers was recorded"),
    "lr": (plots.lr_figure, "no learning rate was recorded"),
}
"""File name -> the function that draws it, and what a report says where there is nothing, if so."""


def report(
    runs: Sequence[Path], out: Path | None = None, labels: Sequence[str] | None = None
) -> list[Path]:
    """Draw and describe runs.

    One run: ``plots/*.png`` and ``report.md`` in its directory. Several: ``overlay.png`` and
    ``report.md`` in ``reports/<labels>``.

    Args:
        runs: run directories, or directories above them.
        out: write there instead.
        labels: one name per run; by default what differs between the configurations.

    Returns:
        The files written, pictures first.

    Raises:
        ConfigError: no run, no records, a wrong number of labels, or an unwritable ``out``.
        DataError: a damaged record.
    """
    data = [load(path) for path in find(runs)]
    if not data:
        raise ConfigError("no run given: name one or more run directories")
    if labels is not None and len(labels) != len(data):
        raise ConfigError(f"{len(labels)} labels for {len(data)} runs: give one label per run")
    try:
        if len(data) == 1:
            return _one(data[0], Path(out) if out else data[0].path)
        names = list(labels) if labels is not None else default_labels(data)
        return _several(data, names, Path(out) if out else Path("reports") / _file_name(names))
    except OSError as error:
        raise ConfigError(
            f"cannot write the report: {error.filename}: {error.strerror}; choose another --out"
        ) from error


def _one(run: RunData, out: Path) -> list[Path]:
    # everything is drawn before anything is written
    figures = {name: draw(run) for name, (draw, _) in PICTURES.items()}
    written = [
        _save(figure, out / "plots" / f"{name}.png") for name, figure in figures.items() if figure
    ]
    lines = [f"# {plots.title(run)}", "", *_table(("", ""), _numbers(run)), ""]
    for name, figure in figures.items():
        missing = PICTURES[name][1]
        if figure:
            lines += [f"![{name}](plots/{name}.png)", ""]
        elif missing:
            lines += [f"{missing}: the plot `{name}` is left out.", ""]
    lines += _sources(run)
    return [*written, _write(out / "report.md", lines)]


def _several(runs: list[RunData], labels: list[str], out: Path) -> list[Path]:
    figure = plots.overlay_figure(runs, labels)
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    units = {run.unit for run in runs}
    header = ("run", "method", "steps", "train loss", "validation loss", *metrics, "flip rate")
    header = (*header, f"{units.pop() if len(units) == 1 else 'items'}/s")
    rows = [(label, *_row(run, metrics)) for label, run in zip(labels, runs, strict=True)]
    lines = ["# " + " / ".join(labels), "", "![overlay](overlay.png)", ""]
    lines += [*_table((*header, "seed"), rows), ""]
    losses, rates = (plots.means_label(runs, key) for key in ("loss", "flip_rate"))
    lines += [f"Train loss ({losses}) and flip rate ({rates}) are those of the end.", ""]
    lines += _glue_average(runs)
    lines += ["## What differs", ""]
    differing = differences(runs)
    if differing:
        rows = [(f"`{key}`", *map(_cell, values)) for key, values in differing.items()]
        lines += _table(("key", *labels), rows)
    else:
        lines.append("Nothing in the configurations.")
    lines += ["", "## Where from", ""]
    where = [
        (label, f"`{_relative(run.path, out)}`", _code(run, "command"), _code(run, "commit"))
        for label, run in zip(labels, runs, strict=True)
    ]
    lines += _table(("run", "directory", "command", "commit"), where)
    return [_save(figure, out / "overlay.png"), _write(out / "report.md", lines)]


def _glue_average(runs: Sequence[RunData]) -> list[str]:
    """One line where several runs are tasks of GLUE; a task with two metrics counts once."""
    scores = glue_scores(run.path for run in runs)
    if len(scores) < 2:
        return []
    average = f"{glue_average(scores):.2f} %"
    return [f"GLUE average, each task once ({', '.join(scores)}): {average}.", ""]


def _numbers(run: RunData) -> list[tuple[str, str]]:
    """The table at the top of a run's page; what was not recorded is left out."""
    steps, loss = run.series("loss")
    evaluated, validation = run.series("loss", "validation")
    flipped, flips = run.series("flip_rate")
    total = run.config.get("steps")
    done = max(record["step"] for record in run.records)
    rows = [("steps", f"{done} of {total}" if total else f"{done}")]
    if len(loss):
        rows.append((f"train loss at step {steps[0]}", _loss(loss[0])))
        mean, width = smooth(loss)
        rows.append((f"train loss at the end ({plots.mean_label(steps, width)})", _loss(mean[-1])))
    if len(validation):
        rows.append((f"validation loss at step {evaluated[0]}", _loss(validation[0])))
        rows.append((f"validation loss at step {evaluated[-1]}", _loss(validation[-1])))
    rows += [
        (f"validation {name} at step {at[-1]}", _score(values))
        for name in run.metrics()
        for at, values in [run.series(name, "validation")]
    ]
    if np.any(np.isfinite(flips)):
        peak = int(np.nanargmax(flips))
        over = plots.over(run)
        rows.append((f"flip rate{over} at step {flipped[0]}", f"{flips[0]:.2e}"))
        rows.append((f"flip rate{over} at its peak, step {flipped[peak]}", f"{flips[peak]:.2e}"))
        mean, width = smooth(flips)
        rows.append(
            (f"flip rate{over} at the end ({plots.mean_label(flipped, width)})", f"{mean[-1]:.2e}")
        )
    rows += [(change, f"at step {step}") for step, change in run.switches()]
    density = run.series("density")[1]
    if len(density):
        rows.append(("density of the sparse layers at the end", f"{density[-1]:.4f}"))
    rates = run.series("tokens_per_second")[1]
    if len(rates):
        rows.append((f"{run.unit}/s (median)", count(_median(rates))))
    use = np.concatenate([run.series(key)[1] for key in ("mfu", "mfu_dense")])
    if len(use):
        name = "MFU (median; sparse products counted as dense, of the dense peak)"
        rows.append((name, f"{100 * _median(use):.1f} %"))
    tokens, seconds = run.series("tokens")[1], run.series("time")[1]
    if len(tokens):
        rows.append((run.unit, count(float(tokens[-1]))))
    if len(seconds):
        rows.append(("time", clock(float(seconds[-1]))))
    return rows


def _row(run: RunData, metrics: Sequence[str]) -> tuple[str, ...]:
    loss, validation = run.series("loss")[1], run.series("loss", "validation")[1]
    flips, rates = run.series("flip_rate")[1], run.series("tokens_per_second")[1]
    return (
        str((run.config.get("sparsity") or {}).get("name", "–")),
        str(max(record["step"] for record in run.records)),
        _loss(smooth(loss)[0][-1]) if len(loss) else "–",
        _loss(validation[-1]) if len(validation) else "–",
        *(_score(run.series(name, "validation")[1]) for name in metrics),
        f"{smooth(flips)[0][-1]:.2e}{plots.over(run)}" if np.any(np.isfinite(flips)) else "–",
        count(_median(rates)) if len(rates) else "–",
        str(run.config.get("seed", "–")),
    )


def _sources(run: RunData) -> list[str]:
    config = run.config_text.rstrip() or "# config.yaml is missing"
    environment = json.dumps(run.environment, indent=2, ensure_ascii=False)
    if not run.environment:
        environment = '"environment.json is missing"'
    return [
        *("## Configuration", "", "```yaml", config, "```", ""),
        *("## Environment", "", "```json", environment, "```"),
    ]


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _write(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n".join(lines).rstrip() + "\n")
    return path


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _score(values: np.ndarray) -> str:
    """The last value of a metric."""
    return f"{values[-1]:.2f}" if len(values) and math.isfinite(values[-1]) else "–"


def _cell(value: Any) -> str:
    return "null" if value is None else str(value)


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _code(run: RunData, key: str) -> str:
    value = run.environment.get(key)
    return f"`{value}`" if value else "–"


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def _file_name(labels: Sequence[str]) -> str:
    return re.sub(r"[^\w.=+-]+", "_", "-".join(labels))[:80].strip("-_.") or "overlay"
