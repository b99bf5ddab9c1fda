"""Choice of the checkpoint that a run resumes from."""

from __future__ import annotations

from pathlib import Path

from sparsepretrain import registry
from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.errors import CheckpointError
from sparsepretrain.runs.checkpoint import Checkpoint, newest_valid, saved
from sparsepretrain.runs.directory import RunDirectory, similar_directory
from sparsepretrain.sparsity import Method

FIXED = ("model.", "task.", "data.", "sparsity.", "optim.name", "seed", "batch.size")
"""Keys that must equal the checkpoint's; other differences are logged. Also ``steps``, of methods
whose every step depends on the length of the run."""


def begins_anew(run: Run) -> bool:
    """Return True if no checkpoint of the run will be loaded, so that it needs initial weights."""
    return run.resume == "never" or not saved(RunDirectory.of(run).checkpoints)


def choose_checkpoint(
    directory: RunDirectory, run: Run, named: Checkpoint | None, console: Console
) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None to start from scratch."""
    own = directory.checkpoints
    if run.resume == "never":
        if any(own.glob("step_*")) or directory.record_file.exists():
            console.info(f"resume=never: the earlier run is kept in {directory.set_aside()}")
        return None
    newest = newest_valid(own, console.warn)
    if newest is None and saved(own):
        raise CheckpointError(
            f"no checkpoint in {own} is whole: restore one, or start again with resume=never"
        )
    if newest is None and directory.has_trained(run.steps):  # somebody made room on the disk
        text = "this run reached its last step and has no checkpoint: its record is kept in"
        console.info(f"{text} {directory.set_aside()}")
    return newest or named


def named_checkpoint(run: Run, console: Console) -> Checkpoint | None:
    """Return the checkpoint of ``resume=PATH``; None for ``auto`` and ``never``.

    Also None if the run has checkpoints of its own.
    """
    if run.resume in ("auto", "never"):
        return None
    if saved(own := RunDirectory.of(run).checkpoints):
        # a requeued resume=PATH continues its own run, also when PATH is gone
        console.info(f"this run has checkpoints of its own in {own}: {run.resume} is not read")
        return None
    path = Path(run.resume)
    inside = RunDirectory(path).checkpoints
    newest = newest_valid(inside, console.warn) if inside.is_dir() else Checkpoint(path)
    if newest is None:
        raise CheckpointError(f"resume={path}: there is no whole checkpoint in it")
    if not path.is_dir():
        hint = "" if path.exists() else similar_directory(path)
        raise CheckpointError(f"resume={path}: expected auto, never or a checkpoint{hint}")
    if (problem := newest.problem()) is not None:
        raise CheckpointError(f"resume={path} is damaged ({problem}): choose another")
    differences = freeze.diff(newest.config(), run)
    method: type[Method] = registry.get("method", run.sparsity.name)
    fixed = (*FIXED, "steps:") if method.follows_length else FIXED
    fatal = [d for d in differences if d.startswith(fixed)]
    if fatal:
        raise CheckpointError(f"resume={path} comes from another configuration: {'; '.join(fatal)}")
    ignored = ("resume", "runs_dir", "tracker.", "probe", "workers", "name", "sparse_matmuls")
    for difference in differences:
        if not difference.startswith(ignored):
            console.info(f"continuing with another value of {difference}")
    return newest
