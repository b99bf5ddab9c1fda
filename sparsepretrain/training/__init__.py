"""The loop and what it needs: building, schedules, precision, checkpoints, signals, guards."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain.config.schema import MOST_STEPS, Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.tracking.console import Console


def settle(run: Run) -> Run:
    """Replace ``steps=0`` by what ``epochs`` comes to; opens (and prepares) data only for that.

    Raises:
        DataError: the data is not there.
    """
    if run.steps:
        return run
    from sparsepretrain.tasks import build_task

    assert run.epochs is not None
    task = build_task(run)
    task.open_data(("train",))
    steps = max(1, round(run.epochs * task.samples("train") / run.batch.size))
    if steps > MOST_STEPS:
        raise ConfigError(f"epochs={run.epochs} are {steps} steps, more than {MOST_STEPS}")
    return dataclasses.replace(run, steps=steps)


def loading(what: str) -> None:
    """Say what the next seconds are spent on: importing torch and the model's library."""
    if "torch" not in sys.modules:
        Console().info(f"{what}: loading PyTorch and the model")


def train(run: Run) -> int:
    """Train (or continue) ``run``; returns the exit code.

    Raises:
        ConfigError, DataError, CheckpointError, DivergedError: with one line for the user.
    """
    from sparsepretrain.runs.directory import RunDirectory

    directory = RunDirectory.of(run)
    if run.resume == "auto" and directory.is_finished(run, run.steps):  # known without torch
        Console().info(f"{directory} is finished ({run.steps} steps): nothing to do")
        return 0
    loading(run.name)
    from sparsepretrain.training.trainer import train as start

    return start(run)


def dry_run(run: Run) -> None:
    """Build ``run`` on the meta device and print what it would do; touches no data.

    Raises:
        ConfigError: targets match nothing, a width does not fit the pattern.
    """
    loading(run.name)
    from sparsepretrain.training.plan import dry_run as show

    show(run)


def evaluate(
    checkpoint: str,
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    *,
    split: str,
    average: int,
    dense: bool,
    out: Path | None,
) -> dict[str, Any]:
    """Print and append the metrics of a checkpoint over a whole split, and return that line.

    Raises:
        ConfigError, DataError, CheckpointError: with one line for the user.
    """
    loading(checkpoint)
    from sparsepretrain.training.evaluation import evaluate_checkpoint as start

    return start(
        checkpoint, overrides, config_dirs, split=split, average=average, dense=dense, out=out
    )
