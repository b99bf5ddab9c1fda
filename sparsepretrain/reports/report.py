"""Write plots and a Markdown page of one run or of several runs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from sparsepretrain.config.freeze import hash_of
from sparsepretrain.console import clock, count
from sparsepretrain.errors import ConfigError
from sparsepretrain.reports import plots, probes
from sparsepretrain.reports.figures import of_runs
from sparsepretrain.reports.page import Page, markdown_table, write_page
from sparsepretrain.reports.runs import (
    Paired,
    RunData,
    differences,
    labels,
    load,
    pair,
)
from sparsepretrain.runs.directory import RunDirectory, find_runs

PICTURES = {
    "loss": plots.loss_figure,
    "metric": plots.metric_figure,
    "flip_rate": plots.flip_figure,
    "flip_rate_layers": plots.layers_figure,
    "lr": plots.lr_figure,
}
"""File name -> drawing function, which returns None if the record lacks the numbers."""

MU = "flips / dense"
ABOUT_MU = (
    f"{MU} is μ of arXiv:2404.01847 section 4: the flip rate over that of the dense run with the "
    "same mask rule, in the last tenth of the comparisons. A decay factor λ is feasible if μ at "
    "the end of warm-up lies in [0.60, 0.95]; μ falls as λ grows."
)

SHARED = "seed, data, task, `batch.size` and evaluation samples (`eval.batches` × `batch.micro`)"
"""Settings of paired runs."""

LONGEST = 40
"""Characters of labels that may become a directory name."""


def report(runs: Sequence[Path], out: Path | None = None, *, page: bool = False) -> list[Path]:
    """Draw and describe runs.

    One run: ``plots/*.png`` and ``report.md`` in its directory. Several: ``difference.png`` (to the
    dense run of the same seed and samples, flip rates below), ``overlay.png`` (the curves) and
    ``report.md`` in ``reports/<labels>``. Probes that runs recorded add ``probe_*.png``. ``out``
    replaces these directories; ``page`` adds ``report.html``, text and figures in one file below
    1 MB. The pictures are returned first.
    """
    data = [load(run.path) for run in find_runs(runs)]
    if not data:
        raise ConfigError("no run given: name one or more run directories")
    if len(data) == 1:
        return _one(data[0], Path(out) if out else data[0].path, page=page)
    names = labels(data)
    return _several(data, names, Path(out) if out else Path("reports") / _file_name(names), page)


def _one(run: RunData, out: Path, *, page: bool) -> list[Path]:
    figures = {}
    numbers = [*_summary(run).items(), *((c, f"at step {s}") for s, c in run.switches())]
    lines = [f"# {plots.title(run)}", "", *markdown_table(("quantity", "value"), numbers), ""]
    drawn = {name: figure for name, draw in PICTURES.items() if (figure := draw(run))}
    for name, figure in (drawn | probes.of_run(run)).items():
        figures[f"plots/{name}.png"] = figure
        lines += [f"![{name}](plots/{name}.png)", ""]
    lines += _descent({plots.title(run): [run]})
    about = dict(run.environment)
    file = RunDirectory(run.path).config_file
    coverage = about.pop("coverage", None) or ["not recorded"]
    environment = json.dumps(about or "environment.json is missing", indent=2, ensure_ascii=False)
    config = file.read_text(encoding="utf-8") if file.is_file() else "# config.yaml is missing"
    lines += [
        *(f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.", ""),
        *("## Coverage", "", "```", *coverage, "```", ""),
        *("## Configuration", "", "```yaml", config.rstrip(), "```", ""),
        *("## Environment", "", "```json", environment, "```"),
    ]
    return write_page(out, Page(lines, figures), page=page)


def _several(runs: list[RunData], names: list[str], out: Path, page: bool) -> list[Path]:
    paired = pair(runs, names)
    drawn = of_runs(paired) | probes.of_groups(paired.seeds())
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
    rows = [_summary(run) for run in runs]
    for row, run, partner in zip(rows, runs, paired.partners, strict=True):
        row[f"minus {paired.reference}"] = _compared(run, partner)
        if (ratio := run.flip_ratio(partner)) is not None:
            row[MU] = f"{ratio:.3f}"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        (name, *(row.get(key, "–") for key in keys)) for name, row in zip(names, rows, strict=True)
    ]
    lines += [*markdown_table(("run", *keys), cells), ""]
    lines += ["Train loss and flip rate are running means at the end of the run.", ""]
    if MU in keys:
        lines += [ABOUT_MU, ""]
    lines += _descent(paired.seeds())
    lines += ["## What differs", ""]
    if differing := differences(runs):
        cells = [
            (f"`{key}`", *("null" if v is None else str(v) for v in values))
            for key, values in differing.items()
        ]
        lines += markdown_table(("key", *names), cells)
    else:
        lines.append("The configurations are equal.")
    lines += ["", "## Runs", ""]
    where = []
    for name, run in zip(names, runs, strict=True):
        origin = [run.environment.get(key) for key in ("command", "commit")]
        path = Path(os.path.relpath(run.path, out)).as_posix()
        where.append((name, f"`{path}`", *(f"`{value}`" if value else "–" for value in origin)))
    lines += markdown_table(("run", "directory", "command", "commit"), where)
    return write_page(out, Page(lines, figures), page=page)


def _descent(groups: probes.Groups) -> list[str]:
    """Return the table of the probe ``descent``; empty without enough lines."""
    rows = probes.descent_table(groups)
    if not rows:
        return []
    first, last = (f"{share:.0%}" for share in probes.MIDDLE)
    text = (
        "Change of the loss of a step's own batch along ε of its update, actual against predicted, "
        f"from {first} to {last} of the run:"
    )
    return [text, "", *markdown_table(rows[0], rows[1:]), ""]


def _about(paired: Paired) -> str:
    if not paired.has_pairs:
        return f"No two runs share {SHARED}: no differences are shown."
    text = (
        f"Differences are to {paired.reference} with equal {SHARED}, step by step; bands "
        "are 95 % intervals over seeds."
    )
    both = zip(paired.names, paired.partners, strict=True)
    if alone := dict.fromkeys(name for name, partner in both if partner is None):
        text += f" Without such a run: {', '.join(alone)}."
    return text


def _summary(run: RunData) -> dict[str, str]:
    """Return the numbers of a run as text; train loss and flip rate are running means."""
    steps, flips = run.series("flip_rate")
    total = run.config.get("steps")
    first = {
        "method": run.method or "–",
        "steps": f"{run.end} of {total}" if total else f"{run.end}",
    }
    flip_numbers = []
    if np.any(np.isfinite(flips)):
        peak = int(np.nanargmax(flips))
        flip_numbers = [
            ("flip rate", run.end_mean("flip_rate"), f"{{:.2e}}{plots.over(run)}".format),
            ("peak flip rate", flips[peak], f"{{:.2e}}, step {steps[peak]}".format),
        ]
    numbers: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("train loss", run.end_mean("loss"), _loss),
        ("validation loss", run.last("loss", "validation"), _loss),
        *((name, run.last(name, "validation"), "{:.2f}".format) for name in run.metrics()),
        *flip_numbers,
        ("density", run.last("density"), "{:.4f}".format),
        (f"{run.unit}/s", run.median("tokens_per_second"), count),
        ("MFU", run.median("mfu", "mfu_dense"), "{:.1%}".format),  # sparse matmuls as dense
        (run.unit, run.last("tokens"), count),
        ("time", run.last("time"), clock),
    ]
    known = {name: text(value) for name, value, text in numbers if value is not None}
    return first | known | {"seed": str(run.config.get("seed", "–"))}


def _compared(run: RunData, partner: RunData | None) -> str:
    """Return the difference of the last common validation loss, with the step if earlier."""
    if partner is None or partner is run:
        return "–"
    own, other = (dict(zip(*r.series("loss", "validation"), strict=True)) for r in (run, partner))
    # step 0 compares initial weights
    step = max((step for step in own if step > 0 and step in other), default=None)
    if step is None or not math.isfinite(value := own[step] - other[step]):
        return "–"
    text = f"{value:+.4f}"
    return text if run.end == partner.end == step else f"{text} (step {step})"


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _file_name(labels: Sequence[str]) -> str:
    """Return short labels joined, else the number of runs and a hash of the labels."""
    name = re.sub(r"[^\w.=+-]+", "_", "-".join(labels)).strip("-_.")
    return name if 0 < len(name) <= LONGEST else f"{len(labels)}-runs-{hash_of(name)}"
