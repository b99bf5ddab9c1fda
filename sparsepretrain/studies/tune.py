"""Run a decay search: a dense reference, a segment per λ, a table, and the chosen λ as a file."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparsepretrain.config import freeze
from sparsepretrain.errors import ConfigError, DivergedError, SparsePretrainError
from sparsepretrain.files import write_atomic
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies import decay as rules
from sparsepretrain.studies.decay import Search, Segment
from sparsepretrain.tasks import build_task
from sparsepretrain.tracking.console import Console, count
from sparsepretrain.training.build import build_model, pick_device, sparsify_model
from sparsepretrain.training.plan import duration, step_cost
from sparsepretrain.training.trainer import train

RESULT = "tune.json"
"""Everything that a search found, in its directory."""


class Stopped(SparsePretrainError):
    """A signal stopped a segment, which saved a checkpoint: exit code of the signal."""

    label = "stopped"

    def __init__(self, code: int) -> None:
        self.exit_code = code
        super().__init__("the same command continues the search")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a segment shows at its end."""

    flip_rate: float
    """Mean over the last comparisons of masks."""
    loss: float
    """Training loss, mean over the last tenth of the steps."""
    compared: int
    """Comparisons that the flip rate is averaged over."""
    directory: str
    """Of the run."""


@dataclass(frozen=True, slots=True)
class Outcome:
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

    Segments are run directories like any other: those that are finished are not run again.

    Args:
        search: what to search.
        out: directory of the results; also one for ``--config-dir``, once a λ is chosen.
        overrides, config_dirs: as typed, for the command that trains with the result.
        console: one on the standard output by default.

    Raises:
        Stopped: by a signal; the same call goes on where it stopped.
        DivergedError: a segment did.
        ConfigError: ``out`` is not writable, or no mask flips in the dense run.
    """
    console = console or Console()
    _make(out)
    if search.doubt:
        console.warn(search.doubt)
    dense = _run(search, search.reference(), console)
    if not dense.flip_rate:
        raise ConfigError(
            f"no mask flips at the end of the dense run {dense.directory}: give more --steps"
        )
    runs: dict[float, Measured] = {}

    def ratio(decay: float) -> float:
        runs[decay] = _run(search, search.sparse(decay), console)
        return runs[decay].flip_rate / dense.flip_rate

    found = rules.search(ratio, search.grid, search.interval)
    chosen = rules.choose(found, search.interval)
    if not rules.in_order(found, search.interval):
        console.warn("μ does not fall steadily with λ: few flips make it noisy, average over more")
    _show(search, dense, runs, found, chosen, console)
    if chosen is None:
        message = rules.why_none(found, search.interval)
    else:
        option = _write_option(search, chosen, out)
        message = _command(search, option, chosen, overrides, [*config_dirs, out])
    result = _result(search, dense, runs, found) | {"chosen": chosen, "message": message}
    _write(out / RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return Outcome(chosen, message)


def show_plan(search: Search, out: Path, console: Console | None = None) -> None:
    """Print the runs of a search, what is left of each, and what they cost; runs nothing."""
    console = console or Console()
    segments = [search.reference(), *map(search.sparse, search.grid)]
    rows = [(_label(s), search.steps, _state(search, s), s.directory) for s in segments]
    title = f"decay search for {search.run.sparsity.name} (dry run)"
    console.table(title, rows, header=("λ", "steps", "state", "run directory"))
    run, device = search.run, pick_device(search.run)
    task = build_task(run)
    model = build_model(run, task, torch.device("meta"))
    flops, items = step_cost(run, task, model)
    sparsify_model(run, task, model)
    most = len(segments) + rules.BISECTIONS
    low, high = search.interval
    comparisons = _comparisons(search.comparisons)
    facts = [
        ("feasible μ", f"{low:g} to {high:g}, from {comparisons} of masks"),
        (
            "runs",
            f"{len(segments)}, and up to {rules.BISECTIONS} more where μ jumps over the interval",
        ),
        ("steps", f"{search.steps:,} each of {run.steps:,}; at most {most * search.steps:,}"),
        (task.unit, f"at most {count(most * search.steps * items)}"),
        ("compute", f"at most {duration(run, device, most * search.steps * flops)}"),
        ("results", str(out)),
    ]
    console.table("", facts)
    if search.doubt:
        console.warn(search.doubt)


def _run(search: Search, segment: Segment, console: Console) -> Measured:
    """Train a segment unless it is finished, and read its record."""
    try:
        code = train(segment.run, console, stop_after=search.steps)
    except DivergedError as error:
        raise DivergedError(f"λ = {_label(segment)}: {error}; choose another --grid") from error
    if code:
        raise Stopped(code)
    gc.collect()  # a model and its optimiser hold each other through hooks
    if segment.run.compile:
        torch.compiler.reset()  # or dynamo gives up on a model after eight of its kind
    record = RunDirectory(segment.directory).record()
    lines = [line for line in record if line["step"] <= search.steps]
    flips = [line["flip_rate"] for line in lines if line.get("flip_rate") is not None]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    if not flips:
        raise ConfigError(f"{segment.directory} has no flip rate: give more --steps")
    last = flips[-max(rules.LAST, len(flips) // 10) :]
    tail = losses[-max(1, search.steps // 10) :]
    loss = sum(tail) / len(tail)
    return Measured(sum(last) / len(last), loss, len(last), str(segment.directory))


def _state(search: Search, segment: Segment) -> str:
    directory = RunDirectory(segment.directory)
    if directory.is_finished(segment.run, search.steps):
        return "finished"
    saved = checkpoint.saved(directory.checkpoints)
    return f"from step {max(saved)}" if saved else "to run"


def _comparisons(number: int) -> str:
    return f"{number} comparison{'s' * (number != 1)}"


def _label(segment: Segment) -> str:
    return "dense" if segment.decay is None else f"{segment.decay:.3g}"


def _show(
    search: Search,
    dense: Measured,
    runs: dict[float, Measured],
    found: dict[float, float],
    chosen: float | None,
    console: Console,
) -> None:
    rows = [("dense", f"{dense.flip_rate:.3e}", "1", "reference", f"{dense.loss:.4f}")]
    for decay, mu in found.items():
        says = "chosen" if decay == chosen else rules.verdict(mu, search.interval)
        run = runs[decay]
        row = (f"{decay:.3g}", f"{run.flip_rate:.3e}", f"{mu:.3f}", says, f"{run.loss:.4f}")
        rows.append(row)
    console.table("decay search", rows, header=("λ", "flip rate", "μ", "λ is", "train loss"))
    low, high = search.interval
    console.info(
        f"{search.run.sparsity.name}, first {search.steps} of {search.run.steps} steps; flip rates "
        f"are means of the last {_comparisons(dense.compared)}; feasible μ: {low:g} to {high:g}"
    )


def _result(
    search: Search, dense: Measured, runs: dict[float, Measured], found: dict[float, float]
) -> dict[str, Any]:
    """What tune.json holds."""
    return {
        "method": search.run.sparsity.name,
        "steps": search.steps,
        "refresh": search.refresh,
        "interval": list(search.interval),
        "grid": list(search.grid),
        "rule": "feasible μ nearest to the middle of the interval; of equals the smaller decay",
        "dense": asdict(dense),
        "runs": [
            {
                "decay": decay,
                "mu": mu,
                "verdict": rules.verdict(mu, search.interval),
                **asdict(runs[decay]),
            }
            for decay, mu in found.items()
        ],
        "in_order": rules.in_order(found, search.interval),
        "config": search.run.plain,
    }


def _write_option(search: Search, chosen: float, out: Path) -> str:
    """Write the group file ``sparsity/<method>_tuned.yaml``; returns its name as an option."""
    option = f"{search.run.sparsity.name}_tuned"
    low, high = search.interval
    head = (
        f"# {search.run.sparsity.name} with the decay that `sparsepretrain tune-decay` chose: μ in "
        f"[{low:g}, {high:g}] after {search.steps} steps.\n"
    )
    text = freeze.to_yaml(search.run.plain["sparsity"] | {"decay": chosen})
    _make(out / "sparsity")
    _write(out / "sparsity" / f"{option}.yaml", head + text)
    return option


def _command(
    search: Search,
    option: str,
    chosen: float,
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
) -> str:
    """The command that trains with the chosen λ."""
    words = ["sparsepretrain", "train"]
    for directory in config_dirs:
        words += ["--config-dir", str(directory)]
    # the file holds all of the group
    words += [w for w in overrides if rules.key_of(w).partition(".")[0] != "sparsity"]
    words.append(f"sparsity={option}")
    if search.run.plain["experiment"] is not None:
        words.append(f"sparsity.decay={chosen!r}")  # which an experiment may set as well
    return shlex.join(words)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {directory} ({error.strerror}): set --out DIR") from error


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): set --out DIR") from error
