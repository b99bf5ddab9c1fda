"""List tables and estimate costs without running anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sparsepretrain.config.cells import Part
from sparsepretrain.config.tables import Table, load_table, names, printed, table_cells
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.studies.reproduce import to_run
from sparsepretrain.tracking.console import Console, count


def show_plan(found: Sequence[Part], console: Console) -> None:
    """Print the cells of tables or a sweep with remaining work and costs."""
    cells, title = to_run(found, console), " + ".join(part.name for part in found)
    console.loading(title)
    from sparsepretrain.tasks import build_task
    from sparsepretrain.training.assembly import META, build_model
    from sparsepretrain.training.cost import step_cost
    from sparsepretrain.training.plan import duration
    from sparsepretrain.training.world import World

    left = [cell.left for cell in cells]
    rows = [
        (cell.label, f"{cell.end:,}" if cell.end else "?", state, str(cell.directory))
        for cell, state in zip(cells, left, strict=True)
    ]
    header = ("run", "steps", "state", "run directory")
    console.table(f"{title} (dry run)", rows, header=header)
    total, flops, items, unit = 0, 0.0, 0, ""
    unknown = "" if all(cell.end for cell in cells) else "unknown: counting epochs needs the data"
    costs: dict[str, tuple[float, int]] = {}
    for cell, state in zip(cells, left, strict=True):
        done = cell.end if state == cell.goal else int(state.partition("from step ")[2] or 0)
        steps, plain = cell.end - done, cell.run.plain
        key = json.dumps([plain[group] for group in ("model", "task", "data", "batch")])
        if key not in costs:
            costs[key] = 0.0, 0
            try:
                task = build_task(cell.run)
                each, _, of_step = step_cost(cell.run, task, build_model(task, META))
                unit, costs[key] = task.unit, (each, of_step)
            except SparsePretrainError as error:  # a missing model or tokenizer
                unknown = f"unknown: {error}"
        total, flops = total + steps, flops + steps * costs[key][0]
        items += steps * costs[key][1]
    run = cells[0].run
    open_ = sum(state != cell.goal for cell, state in zip(cells, left, strict=True))
    facts = [("runs", f"{open_} of {len(left)} to run or continue"), ("steps", f"{total:,}")]
    if not unknown:
        device = World.single(run.parallel.device).device
        unknown = duration(run, device, flops)
        facts.append((unit, count(items)))
    console.table("", [*facts, ("compute", unknown)])
    if following := [stage.name for part in found for stage in part.stages]:
        console.info(f"stages after each run: {', '.join(dict.fromkeys(following))}")


def show_tables(config_dirs: Sequence[Path], console: Console) -> None:
    """Print all tables: cells, published numbers, minutes at nano scale."""
    rows: list[tuple[str, ...]] = []
    for name in sorted(names(config_dirs)):
        try:
            table = load_table(name, config_dirs)
        except ConfigError as error:
            console.warn("; ".join(error.messages))
            continue
        source = f"{table.paper}, arXiv:{table.arxiv}" if table.arxiv else table.paper or "–"
        rows.append((name, *_described(table), source))
    header = ("table", "title", "paper", "nano", "published", "minutes", "source")
    console.table("", rows, header=header, lines=False)
    console.info("\npaper, nano: cells x seeds + tuning runs; minutes: of one CPU core, nano scale")


def _described(table: Table) -> tuple[str, ...]:
    if made_of := table.parts or table.bench:
        return f"{table.title}: {'; '.join(made_of)}", *"––––"
    sizes = []
    for scale in ("paper", "nano"):
        size = table.scales.get(scale)
        number = 0 if size is None else sum(not why for *_, why in table_cells(table, scale))
        text = "–" if size is None else f"{number} x {size.seeds}"
        if size is not None and (tune := size.tune) is not None:
            text += f" + {sum(len(tune.settings(r)) for r in table.rows) * len(tune.seeds)}"
        sizes.append(text)
    values = [
        printed(source, row, column) is not None
        for source in table.published
        for row in table.rows
        for column in table.columns or [""]
    ]
    nano = table.scales.get("nano")
    minutes = "–" if nano is None or nano.minutes is None else f"{nano.minutes:g}"
    known = f"{sum(values)} of {len(values)}" if values else "–"
    return table.title, *sizes, known, minutes
