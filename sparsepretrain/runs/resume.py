"""Where a run continues from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import CheckpointError, ConfigError, DataError
from sparsepretrain.runs.record import read
from sparsepretrain.runs import checkpoint

if TYPE_CHECKING:
    from sparsepretrain.tracking.console import Console

FIXED = ("model.", "task.", "data.", "sparsity.", "optim.name", "seed", "batch.size")
"""Keys that a checkpoint cannot be continued across; other differences are logged."""


def is_finished(directory: Path, run: Run, end: int) -> bool:
    """Whether step ``end`` or a later one has a whole checkpoint and its evaluation."""
    numbers = {p: p.name.removeprefix("step_") for p in directory.glob("checkpoints/step_*")}
    late = [path for path, number in numbers.items() if number.isdigit() and int(number) >= end]
    if all(checkpoint.verify(path) is not None for path in late):
        return False
    if run.eval.batches == 0:
        return True
    try:
        lines = read(directory)
    except (ConfigError, DataError):
        return False
    return any(line["step"] >= end and "split" in line for line in lines)


def choose_checkpoint(
    directory: Path, run: Run, named: Path | None, console: Console
) -> Path | None:
    """The checkpoint to continue from according to ``resume``; None: from the start.

    Args:
        directory: of the run.
        run: its configuration.
        named: what :func:`named_checkpoint` returned.
        console: says what is passed over.

    Raises:
        CheckpointError: none of the run's checkpoints is whole.
    """
    if run.resume == "never":
        if any(directory.glob("checkpoints/step_*")) or (directory / "metrics.jsonl").exists():
            console.info(f"resume=never: the earlier run is kept in {set_aside(directory)}")
        return None
    own = directory / "checkpoints"
    newest = checkpoint.newest_valid(own, console.warn)
    if newest is None and any(own.glob("step_*")):
        raise CheckpointError(
            f"no checkpoint in {own} is whole: restore one, or start anew with resume=never"
        )
    if newest is None or named is None:
        return newest or named
    # a requeued resume=PATH goes on where it was stopped
    console.info(f"this run has checkpoints of its own: {newest} is used instead of {named}")
    return newest


def set_aside(directory: Path) -> Path:
    """Rename a run directory to ``<name>.old-<k>``; returns the new path."""
    number = 1
    while (target := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number += 1
    target.mkdir()
    for entry in directory.iterdir():
        if entry.name != ".lock":
            os.replace(entry, target / entry.name)
    return target


def named_checkpoint(run: Run, plain: dict[str, Any], console: Console) -> Path | None:
    """The checkpoint that ``resume=PATH`` names; None for ``auto`` and ``never``.

    Raises:
        CheckpointError: it does not exist, is damaged, or comes from a configuration that this
            one cannot continue.
    """
    if run.resume in ("auto", "never"):
        return None
    path = Path(run.resume)
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest_valid(path / "checkpoints", console.warn)
        if found is None:
            raise CheckpointError(f"resume={path}: there is no whole checkpoint in it")
        path = found
    if not path.is_dir():
        raise CheckpointError(f"resume={path}: no such checkpoint (auto, never or a path)")
    problem = checkpoint.verify(path)
    if problem is not None:
        raise CheckpointError(f"resume={path} is damaged ({problem}): choose another")
    differences = freeze.diff(freeze.from_yaml(path / checkpoint.CONFIG), plain)
    fatal = [d for d in differences if d.startswith(FIXED)]
    if fatal:
        raise CheckpointError(f"resume={path} comes from another configuration: {'; '.join(fatal)}")
    ignored = ("resume", "runs_dir", "tracker.", "workers", "name")
    for difference in differences:
        if not difference.startswith(ignored):
            console.info(f"continuing with another value of {difference}")
    return path
