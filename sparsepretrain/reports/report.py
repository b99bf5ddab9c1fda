"""Plots and a Markdown page of one run, or an overlay of several."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsepretrain.config.compose import read
from sparsepretrain.config.tables import Scale, load_table
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.files import write_atomic
from sparsepretrain.reports import plots, probes
from sparsepretrain.reports.figures import compared, of_runs
from sparsepretrain.reports.results import collect, read_record, write_record
from sparsepretrain.reports.runs import (
    Paired,
    RunData,
    differences,
    glue_scores,
    load,
    pair,
    smooth,
    uneven_validation,
)
from sparsepretrain.reports.runs import labels as default_labels
from sparsepretrain.reports.table import markdown_table, render
from sparsepretrain.runs.directory import RunDirectory, find_runs
from sparsepretrain.tracking.console import clock, count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = {
    "loss": (plots.loss_figure, "no loss was recorded"),
    "metric": (plots.metric_figure, ""),
    "flip_rate": (plots.flip_figure, "no flip rate above zero was recorded"),
    "flip_rate_layers": (plots.layers_figure, "flip rates of layers have fewer than two steps"),
    "lr": (plots.lr_figure, "no learning rate was recorded"),
}
"""File name -> the function that draws it, and what a report says where there is nothing, if so."""

LONGEST = 40
"""Characters of labels that become the name of a directory."""


def report(
    runs: Sequence[Path],
    out: Path | None = None,
    labels: Sequence[str] | None = None,
    *,
    page: bool = False,
) -> list[Path]:
    """Draw and describe runs.

    One run: ``plots/*.png`` and ``report.md`` in its directory. Several: ``difference.png`` (to the
    dense run of the same seed and data, flip rates below), ``final.png`` (at the end),
    ``overlay.png`` (the curves) and ``report.md`` in ``reports/<labels>``. Validation losses that
    are not comparable are warned of.

    Args:
        runs: run directories, or directories above them.
        out: write there instead.
        labels: one name per run; by default what differs between the configurations.
        page: write ``report.html`` too: text and figures in one file, below 1 MB.

    Returns:
        The files written, pictures first.

    Raises:
        ConfigError: no run, no records, a wrong number of labels, or an unwritable ``out``.
        DataError: a damaged record.
    """
    data = [load(run.path) for run in find_runs(runs)]
    if not data:
        raise ConfigError("no run given: name one or more run directories")
    if labels is not None and len(labels) != len(data):
        raise ConfigError(f"{len(labels)} labels for {len(data)} runs: give one label per run")
    try:
        if len(data) == 1:
            return _one(data[0], Path(out) if out else data[0].path, page=page)
        names = list(labels) if labels is not None else default_labels(data)
        place = Path(out) if out else Path("reports") / _file_name(names)
        return _several(data, names, place, page=page)
    except OSError as error:
        raise _unwritable(error) from error


def report_table(
    name: str,
    out: Path | None = None,
    *,
    scale: Scale | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[Path] = (),
    record: bool = False,
    from_record: bool = False,
    html: bool = False,
) -> list[Path]:
    """Write the page of a table: ``<name>.md`` and its figures ``<name>-*.png``.

    Args:
        name: of the table.
        out: where; None: ``reports/<name>``.
        scale, seeds, overrides, config_dirs: which runs, see :func:`results.collect`.
        record: write ``records/<name>.json.gz`` too, from which the page can be written again.
        from_record: read that file instead of runs.
        html: write ``<name>.html`` too, see :func:`report`.

    Returns:
        The files written, the Markdown last.

    Raises:
        ConfigError: no such table, none of its runs has begun, or ``out`` is not writable.
        DataError: ``from_record`` without a whole record.
    """
    out = Path("reports", name) if out is None else out
    file = out / "records" / f"{name}.json.gz"
    if from_record:
        results = read_record(file)
    else:
        results = collect(
            name, scale=scale, seeds=seeds, overrides=overrides, config_dirs=config_dirs
        )
        parts = list(results.all())
        if not any(part.cells for part in parts) and any(part.scale for part in parts):
            base = dict(read(overrides, config_dirs).values).get("runs_dir", "runs")
            if not any(Path(base, name).rglob(RunDirectory.record_file.name)):
                raise ConfigError(f"no run of {name} has begun: sparsepretrain reproduce {name}")
            raise ConfigError(
                f"no run in {Path(base, name)} is of just these words: give --scale and the "
                f"KEY=VALUE that `sparsepretrain reproduce {name}` was given"
            )
    tables = {part.name: load_table(part.name, config_dirs) for part in [results, *results.all()]}
    page = render(results, tables)
    try:
        if record:
            write_record(results, file)
        return _write(out, page.figures, page.lines, f"{name}.md", page=html)
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> ConfigError:
    where = f"{error.filename}: {error.strerror}"
    return ConfigError(f"cannot write the report: {where}; choose another --out")


def _one(run: RunData, out: Path, *, page: bool) -> list[Path]:
    figures = {}
    lines = [f"# {plots.title(run)}", "", *markdown_table(("quantity", "value"), _numbers(run)), ""]
    for name, (draw, missing) in PICTURES.items():
        if figure := draw(run):
            figures[f"plots/{name}.png"] = figure
            lines += [f"![{name}](plots/{name}.png)", ""]
        elif missing:
            lines += [f"{missing}: the plot `{name}` is left out.", ""]
    for name, figure in probes.pictures(run).items():
        figures[f"plots/{name}.png"] = figure
        lines += [f"![{name}](plots/{name}.png)", ""]
    lines += _descent({plots.title(run): [run]})
    about = dict(run.environment)
    coverage = about.pop("coverage", None) or ["not recorded"]
    environment = json.dumps(about or "environment.json is missing", indent=2, ensure_ascii=False)
    lines += [
        *(f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.", ""),
        *("## Coverage", "", "```", *coverage, "```", ""),
        *("## Configuration", "", "```yaml"),
        *(run.config_text.rstrip() or "# config.yaml is missing", "```", ""),
        *("## Environment", "", "```json", environment, "```"),
    ]
    return _write(out, figures, lines, page=page)


def _several(runs: list[RunData], labels: list[str], out: Path, *, page: bool) -> list[Path]:
    paired = pair(runs, labels)
    drawn = of_runs(paired) | probes.overlays(paired.seeds())
    figures = {f"{name}.png": figure for name, figure in drawn.items()}
    lines = [
        f"# {' / '.join(paired.seeds())}",
        "",
        f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        "",
    ]
    for file in figures:
        lines += [f"![{Path(file).stem}]({file})", ""]
    lines += [_about(paired), ""]
    if (uneven := uneven_validation(runs, labels)) is not None:
        warnings.warn(uneven, SparsePretrainWarning, stacklevel=3)
        lines += [f"Warning: {uneven}.", ""]
    lines += [*_overview(paired, labels), ""]
    losses, rates = (plots.means_label(runs, key) for key in ("loss", "flip_rate"))
    lines += [f"Train loss ({losses}) and flip rate ({rates}) are those of the end.", ""]
    if len(scores := glue_scores(runs)) > 1:
        average = f"{sum(scores.values()) / len(scores):.2f} %"
        lines += [f"GLUE average, each task once ({', '.join(scores)}): {average}.", ""]
    lines += _descent(paired.seeds())
    lines += ["## What differs", ""]
    if differing := differences(runs):
        rows = [
            (f"`{key}`", *("null" if v is None else str(v) for v in values))
            for key, values in differing.items()
        ]
        lines += markdown_table(("key", *labels), rows)
    else:
        lines.append("Nothing in the configurations.")
    lines += ["", "## Where from", ""]
    where = []
    for label, run in zip(labels, runs, strict=True):
        told = [run.environment.get(key) for key in ("command", "commit")]
        path = Path(os.path.relpath(run.path, out)).as_posix()
        where.append((label, f"`{path}`", *(f"`{value}`" if value else "–" for value in told)))
    lines += markdown_table(("run", "directory", "command", "commit"), where)
    for label, run in zip(labels, runs, strict=True):
        if covered := run.environment.get("coverage"):
            lines += ["", f"## Coverage of {label}", "", "```", *covered, "```"]
    heat = {f"flip_rate_layers {i}": plots.layers_figure(run) for i, run in enumerate(runs)}
    shown = figures | {name: figure for name, figure in heat.items() if figure is not None}
    return _write(out, figures, lines, page=page, shown=shown)


def _descent(groups: probes.Groups) -> list[str]:
    rows = probes.descent_table(groups)
    if not rows:
        return []
    first, last = (f"{share:.0%}" for share in probes.MIDDLE)
    text = "Change of the loss of a step's batch along ε of its update, actual against predicted, "
    text += f"from {first} to {last} of the run:"
    return [text, "", *markdown_table(rows[0], rows[1:]), ""]


def _overview(paired: Paired, labels: Sequence[str]) -> list[str]:
    metrics = list(dict.fromkeys(name for run in paired.runs for name in run.metrics()))
    units = {run.unit for run in paired.runs}
    rate = f"{units.pop() if len(units) == 1 else 'items'}/s"
    header = ["run", "method", "steps", "train loss", "validation loss"]
    header += [f"minus {paired.reference}", *metrics, "flip rate", rate, "seed"]
    runs = zip(labels, paired.runs, paired.partners, strict=True)
    return markdown_table(
        header, [(label, *_row(run, partner, metrics)) for label, run, partner in runs]
    )


def _about(paired: Paired) -> str:
    dense = any(run.method == "dense" for run in paired.runs)
    none = "" if dense else "No dense run is among these. "
    if not paired.groups():
        return f"{none}No two runs share seed, data and batch: the curves only."
    text = (
        f"{none}Differences are to {paired.reference}, of the same seed, data and batch, step by "
        "step; bands and bars are 95 % intervals over seeds, where there are several."
    )
    both = zip(paired.names, paired.partners, strict=True)
    if alone := dict.fromkeys(name for name, partner in both if partner is None):
        text += f" No such run for {', '.join(alone)}."
    return text


def _numbers(run: RunData) -> list[tuple[str, str]]:
    """The table at the top of a run's page; what was not recorded is left out."""
    steps, loss = run.series("loss")
    evaluated, validation = run.series("loss", "validation")
    flipped, flips = run.series("flip_rate")
    total = run.config.get("steps")
    rows = [("steps", f"{run.end} of {total}" if total else f"{run.end}")]
    if len(loss):
        rows.append((f"train loss at step {steps[0]}", _loss(loss[0])))
    if len(loss) > 1:
        mean, width = smooth(loss)
        rows.append((f"train loss at the end ({plots.mean_label(steps, width)})", _loss(mean[-1])))
    ends = dict(zip(evaluated[[0, -1]], validation[[0, -1]], strict=True)) if len(evaluated) else {}
    rows += [(f"validation loss at step {step}", _loss(value)) for step, value in ends.items()]
    for name in run.metrics():
        at = run.series(name, "validation")[0][-1]
        rows.append((f"validation {name} at step {at}", _score(run.last(name, "validation"))))
    if np.any(np.isfinite(flips)):
        peak = int(np.nanargmax(flips))
        over = plots.over(run)
        rows.append((f"flip rate{over} at step {flipped[0]}", f"{flips[0]:.2e}"))
        rows.append((f"flip rate{over} at its peak, step {flipped[peak]}", f"{flips[peak]:.2e}"))
        mean, width = smooth(flips)
        end = f"at the end ({plots.mean_label(flipped, width)})"
        rows.append((f"flip rate{over} {end}", f"{mean[-1]:.2e}"))
    rows += [(change, f"at step {step}") for step, change in run.switches()]
    use = "MFU (median; sparse products counted as dense, of the dense peak)"
    numbers: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("density of the sparse layers at the end", run.last("density"), "{:.4f}".format),
        (f"{run.unit}/s (median)", run.median("tokens_per_second"), count),
        (use, run.median("mfu", "mfu_dense"), lambda share: f"{100 * share:.1f} %"),
        (run.unit, run.last("tokens"), count),
        ("time", run.last("time"), clock),
    ]
    return rows + [(name, text(value)) for name, value, text in numbers if value is not None]


def _row(run: RunData, partner: RunData | None, metrics: Sequence[str]) -> tuple[str, ...]:
    loss, flips = (run.series(key)[1] for key in ("loss", "flip_rate"))
    validation, rate = run.last("loss", "validation"), run.median("tokens_per_second")
    difference = "–"
    if partner is not None and partner is not run and (found := compared(run, partner, "loss")):
        step, value = found
        same = run.end == partner.end == step
        difference = f"{value:+.4f}" if same else f"{value:+.4f} (step {step})"
    return (
        str(run.option("sparsity", "name", "–")),
        str(run.end),
        _loss(smooth(loss)[0][-1]) if len(loss) else "–",
        "–" if validation is None else _loss(validation),
        difference,
        *(_score(run.last(name, "validation")) for name in metrics),
        f"{smooth(flips)[0][-1]:.2e}{plots.over(run)}" if np.any(np.isfinite(flips)) else "–",
        "–" if rate is None else count(rate),
        str(run.config.get("seed", "–")),
    )


def _write(
    out: Path,
    figures: dict[str, Figure],
    lines: Iterable[str],
    name: str | None = None,
    *,
    page: bool,
    shown: dict[str, Figure] | None = None,
) -> list[Path]:
    """Pictures, Markdown (the last of what is returned) and, of ``shown`` or all, the HTML page."""
    text = "\n".join(lines).rstrip() + "\n"
    file = out / name if name else RunDirectory(out).report_file
    written = [*map(out.joinpath, figures)]
    for path in [*written, file]:
        path.parent.mkdir(parents=True, exist_ok=True)
    for picture, figure in figures.items():
        figure.savefig(out / picture)
    write_atomic(file, text)
    if page:
        from sparsepretrain.reports.page import html_page

        written.append(file.with_suffix(".html"))
        write_atomic(written[-1], html_page(text, shown or figures))
    return [*written, file]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _score(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.2f}"


def _file_name(labels: Sequence[str]) -> str:
    """The labels where they are short; else how many runs, and digits that tell sets apart."""
    name = re.sub(r"[^\w.=+-]+", "_", "-".join(labels)).strip("-_.")
    if 0 < len(name) <= LONGEST:
        return name
    return f"{len(labels)}-runs-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
