"""Run a decay search: a dense reference, a segment per λ, a table, and the chosen λ as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparsepretrain.config import freeze
from sparsepretrain.config.compose import shell_line
from sparsepretrain.errors import ConfigError
from sparsepretrain.files import write_atomic
from sparsepretrain.studies import decay as rules
from sparsepretrain.studies.decay import Search
from sparsepretrain.studies.engine import Cell, CellError, Study
from sparsepretrain.tracking.console import Console, count, significant

RESULT = "tune.json"
"""Everything that a search found, in its directory."""


class Outcome(NamedTuple):
    """How a search ended."""

    decay: float | None
    """The chosen λ, or None."""
    message: str
    """The command to train with it, or why there is none."""


def tune_decay(
    search: Search,
    out: Path,
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    console: Console | None = None,
) -> Outcome:
    """Run (or continue) a search and write ``tune.json`` and the file of the chosen method.

    Args:
        search: what to search.
        out: directory of the results; also one for ``--config-dir``, once a λ is chosen.
        overrides, config_dirs: as typed, for the command that trains with the result.
        console: one on the standard output by default.

    Raises:
        Stopped: by a signal; the same call goes on where it stopped.
        CellError: the dense run failed, or all others did.
        ConfigError: ``out`` is not writable, or no mask flips in the dense run.
    """
    console = console or Console()
    _write(out)
    if search.doubt:
        console.warn(search.doubt)
    dense, cells = search.reference(), {decay: search.sparse(decay) for decay in search.grid}
    with Study("decay search", console) as study:
        study.run([dense])
        reference = _measure(search, dense)
        if not reference["flip_rate"]:
            raise ConfigError(
                f"no mask flips at the end of the dense run {dense.directory}: give more --steps"
            )
        study.run(list(cells.values()))

        def ratio(decay: float) -> float:
            if decay not in cells:
                cells[decay] = search.sparse(decay)
                study.run([cells[decay]])
            if cells[decay].state == "failed":
                return math.nan
            return float(_measure(search, cells[decay])["flip_rate"] / reference["flip_rate"])

        found = rules.search(ratio, search.grid, search.interval)
    rows, failed = [], []
    for decay, mu in found.items():
        cell = cells[decay]
        if math.isnan(mu):
            failed.append({"decay": decay, "error": cell.error, "exit_code": cell.exit_code})
            failed[-1]["directory"] = str(cell.directory)
        else:
            judged = {"decay": decay, "mu": mu, "verdict": rules.verdict(mu, search.interval)}
            rows.append(judged | _measure(search, cell))
    if not rows:
        raise CellError(cells[search.grid[0]])
    chosen = rules.choose(found, search.interval)
    result = {
        "method": search.run.sparsity.name,
        "steps": search.steps,
        "refresh": search.refresh,
        "interval": list(search.interval),
        "grid": list(search.grid),
        "rule": "feasible μ nearest to the middle of the interval; of equals the smaller decay",
        "dense": reference,
        "runs": rows,
        "failed": failed,
        "in_order": rules.in_order(found, search.interval),
        "config": search.run.plain,
        "chosen": chosen,
    }
    if not result["in_order"]:
        console.warn("μ does not fall steadily with λ: few flips make it noisy, average over more")
    _show(search, result, console)
    if chosen is None:
        message = rules.why_none(found, search.interval)
    else:
        message = _write_option(search, chosen, out, overrides, [*config_dirs, out])
    result["message"] = message
    _write(out / RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return Outcome(chosen, message)


def show_plan(search: Search, out: Path, console: Console | None = None) -> None:
    """Print the runs of a search, what is left of each, and what they cost; runs nothing."""
    console = console or Console()
    console.loading(search.run.name)
    from sparsepretrain.tasks import build_task
    from sparsepretrain.training.assembly import META, build_model, sparsify_model
    from sparsepretrain.training.plan import duration, step_cost
    from sparsepretrain.training.world import World

    cells = [search.reference(), *map(search.sparse, search.grid)]
    rows = [(cell.label, search.steps, cell.left, cell.directory) for cell in cells]
    title = f"decay search for {search.run.sparsity.name} (dry run)"
    console.table(title, rows, header=("run", "steps", "state", "run directory"))
    run, task = search.run, build_task(search.run)
    device = World.single(run.parallel.device).device
    model = build_model(task, META)
    flops, _, items = step_cost(run, task, model)
    sparsify_model(run, task, model)
    most = (len(cells) + rules.BISECTIONS) * search.steps
    more = f"up to {rules.BISECTIONS} more where μ jumps over the interval"
    facts = [
        ("feasible μ", f"{_feasible(search)}, from {_comparisons(search.comparisons)} of masks"),
        ("runs", f"{len(cells)}, and {more}"),
        ("steps", f"{search.steps:,} each of {run.steps:,}; at most {most:,}"),
        (task.unit, f"at most {count(most * items)}"),
        ("compute", f"at most {duration(run, device, most * flops)}"),
        ("results", str(out)),
    ]
    console.table("", facts)
    if search.doubt:
        console.warn(search.doubt)


def _measure(search: Search, cell: Cell) -> dict[str, Any]:
    """What a segment shows at its end: means over the last comparisons of masks, and steps."""
    if cell.state == "failed":
        raise CellError(cell)
    lines = [line for line in cell.directory.record() if line["step"] <= search.steps]
    flips = [line["flip_rate"] for line in lines if line.get("flip_rate") is not None]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    if not flips:
        raise ConfigError(f"{cell.directory} has no flip rate: give more --steps")
    last = flips[-max(rules.LAST, len(flips) // 10) :]
    tail = losses[-max(1, search.steps // 10) :]
    return {
        "flip_rate": sum(last) / len(last),
        "loss": sum(tail) / len(tail),
        "compared": len(last),
        "directory": str(cell.directory),
    }


def _comparisons(number: int) -> str:
    return f"{number} comparison{'s' * (number != 1)}"


def _feasible(search: Search) -> str:
    return "{:g} to {:g}".format(*search.interval)


def _show(search: Search, result: dict[str, Any], console: Console) -> None:
    dense = result["dense"]
    shown = [("dense", f"{dense['flip_rate']:.3e}", "1", "reference", significant(dense["loss"]))]
    for row in result["runs"]:
        says = "chosen" if row["decay"] == result["chosen"] else row["verdict"]
        numbers = f"{row['flip_rate']:.3e}", f"{row['mu']:.3f}", says, significant(row["loss"])
        shown.append((f"{row['decay']:.3g}", *numbers))
    shown += [(f"{row['decay']:.3g}", "–", "–", "failed", "–") for row in result["failed"]]
    console.table("decay search", shown, header=("λ", "flip rate", "μ", "λ is", "train loss"))
    console.info(
        f"{result['method']}, first {search.steps} of {search.run.steps} steps; flip rates are "
        f"means of the last {_comparisons(dense['compared'])}; feasible μ: {_feasible(search)}"
    )


def _write_option(
    search: Search, chosen: float, out: Path, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> str:
    """Write ``sparsity/<method>_tuned.yaml``; returns the command that trains with it."""
    method, plain = search.run.sparsity.name, search.run.plain
    head = f"# {method} with the decay that `sparsepretrain tune-decay` chose: μ in "
    head += "[{:g}, {:g}] after {} steps.\n".format(*search.interval, search.steps)
    text = freeze.to_yaml(plain["sparsity"] | {"decay": chosen})
    _write(out / "sparsity" / f"{method}_tuned.yaml", head + text)
    words = ["sparsepretrain", "train"]
    words += [word for directory in config_dirs for word in ("--config-dir", str(directory))]
    # the file holds all of the group
    words += [w for w in overrides if rules.key_of(w).partition(".")[0] != "sparsity"]
    words.append(f"sparsity={method}_tuned")
    if plain["experiment"] is not None:
        words.append(f"sparsity.decay={chosen!r}")  # which an experiment may set as well
    return shell_line(words)


def _write(path: Path, text: str | None = None) -> None:
    """Make the directory ``path``, or a file and the directory that it is in."""
    try:
        (path if text is None else path.parent).mkdir(parents=True, exist_ok=True)
        if text is not None:
            write_atomic(path, text)
    except OSError as error:
        what = "make" if text is None else "write"
        raise ConfigError(f"cannot {what} {path} ({error.strerror}): set --out DIR") from error
