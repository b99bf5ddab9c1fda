"""Lookup of trained weights in a run, a checkpoint, or a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepretrain.errors import CheckpointError, reason
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.runs.directory import RunDirectory, similar_directory

EVALUATED = ("model", "ema")
"""Checkpoint parts that an evaluation may read."""

HF_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Location of trained weights."""

    path: Path | str
    """Directory of the checkpoint, or its name on the Hugging Face hub."""
    checkpoint: Checkpoint | None = None
    """Checkpoint of a run; None: a Hugging Face checkpoint."""
    config: dict[str, Any] | None = None
    """Frozen configuration of the run as plain values."""

    @property
    def step(self) -> int | None:
        """Completed optimizer steps of the run."""
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def run(self) -> RunDirectory | None:
        """Run that contains the checkpoint; None for copies elsewhere and Hugging Face's."""
        return None if self.checkpoint is None else RunDirectory.of_checkpoint(self.checkpoint.path)


def find(path: str | Path, warn: Callable[[str], None] = lambda line: None) -> WeightSource:
    """Find the checkpoint at ``path`` and verify the parts that an evaluation reads.

    Args:
        path: a run directory (its newest intact checkpoint), a checkpoint directory or a copy of
            one, a directory written by ``save_pretrained``, or a name on the hub.
        warn: called for each damaged checkpoint passed over.
    """
    directory = Path(path).expanduser()
    if (directory / HF_CONFIG).is_file():
        return WeightSource(directory)
    own = RunDirectory(directory).checkpoints
    files = (checkpoint.MANIFEST, checkpoint.STATE)
    if any((directory / name).is_file() for name in files):
        found = Checkpoint(directory)
        found.require(EVALUATED)
    elif own.is_dir():
        newest = checkpoint.newest_valid(own, warn, EVALUATED)
        if newest is None:
            raise CheckpointError(f"{directory}: there is no whole checkpoint in it")
        found = newest
    elif directory.exists():
        raise CheckpointError(
            f"{directory} is neither a run directory nor a checkpoint: it has no {own.name}/, no "
            f"{checkpoint.MANIFEST} and no {HF_CONFIG}"
        )
    else:
        name = str(path)
        local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name[:5] == "runs/"
        if local or ("/" in name and directory.parent.is_dir()):
            hint = similar_directory(directory)
            raise CheckpointError(f"{name}: there is no such directory{hint}")
        _require_on_hub(name)
        return WeightSource(name)
    return WeightSource(found.path, found, found.config())


def _require_on_hub(repository: str) -> None:
    from huggingface_hub import hf_hub_download

    from sparsepretrain.data.hub import hub_access

    try:
        with hub_access():
            hf_hub_download(repository, HF_CONFIG)
    except (OSError, ValueError) as error:  # not there, no network, no legal name
        raise CheckpointError(
            f"{repository}: no such directory, and no {HF_CONFIG} on the hub: {reason(error)}"
        ) from error
