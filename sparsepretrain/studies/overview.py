"""List tables and estimate costs without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.studies.cells import Part
from sparsepretrain.studies.progress import StudyCell
from sparsepretrain.studies.reproduce import to_run
from sparsepretrain.studies.tables import load_table, names
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import META, build_model
from sparsepretrain.training.plan import duration
from sparsepretrain.training.tracing import step_cost
from sparsepretrain.training.world import World


def show_plan(parts: Sequence[Part], console: Console) -> None:
    """Print the cells of tables or of a `train -m` with remaining work and costs."""
    cells = to_run(parts, console)
    title = " + ".join(part.name for part in parts)
    console.loading(title)
    left = [cell.left for cell in cells]
    rows = [
        (cell.label, f"{cell.end:,}" if cell.end else "?", state, str(cell.directory))
        for cell, state in zip(cells, left, strict=True)
    ]
    header = ("run", "steps", "state", "run directory")
    console.table(f"{title} (dry run)", rows, header=header)
    steps: dict[StudyCell, int] = {}
    for cell, state in zip(cells, left, strict=True):
        if state != cell.goal:
            steps[cell] = cell.end - int(state.partition("from step ")[2] or 0)
    facts = [("runs", f"{len(steps)} of {len(cells)} to run or continue")]
    facts += [("steps", f"{sum(steps.values()):,}"), ("compute", _compute(steps, cells[0].run))]
    console.table("", facts)
    if following := [stage.name for part in parts for stage in part.stages]:
        console.info(f"stages after each run: {', '.join(dict.fromkeys(following))}")


def _compute(steps: Mapping[StudyCell, int], run: Run) -> str:
    """Return FLOPs and time of the remaining steps in words, on the device of ``run``."""
    if not all(cell.end for cell in steps):
        return "unknown: counting epochs needs the data"
    flops = 0.0
    costs = dict[str, float]()
    try:
        for cell, number in steps.items():
            plain = cell.run.plain
            key = json.dumps([plain[group] for group in ("model", "task", "data", "batch")])
            if key not in costs:
                task = build_task(cell.run)
                costs[key] = step_cost(cell.run, task, build_model(task, META)).flops
            flops += number * costs[key]
    except SparsePretrainError as error:  # a missing model or tokenizer
        return f"unknown: {error}"
    return duration(run, World.single(run.parallel.device).device, flops)


def show_tables(config_dirs: Sequence[Path], console: Console) -> None:
    """Print all tables, with the minutes of their runs at nano scale."""
    rows: list[tuple[str, ...]] = []
    for name in sorted(names(config_dirs)):
        try:
            table = load_table(name, config_dirs)
        except ConfigError as error:
            console.warn("; ".join(error.messages))
            continue
        nano = table.scales.get("nano")
        made_of = table.parts or table.bench
        title = f"{table.title}: {'; '.join(made_of)}" if made_of else table.title
        minutes = "–" if nano is None or nano.minutes is None else f"{nano.minutes:g}"
        source = f"{table.paper}, arXiv:{table.arxiv}" if table.arxiv else table.paper or "–"
        rows.append((name, title, minutes, source))
    header = ("table", "title", "minutes, nano, one core", "source")
    console.table("", rows, header=header, lines=False)
