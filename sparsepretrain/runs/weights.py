"""Lookup of trained weights in a run, a checkpoint, or a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsepretrain.data.hub import hub_access
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
    averaged: tuple[Checkpoint, ...] = ()
    """Checkpoints whose weights are averaged, ``checkpoint`` last; empty: only ``checkpoint``."""

    @property
    def step(self) -> int | None:
        """Completed optimizer steps of the run."""
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def averaged_steps(self) -> list[int]:
        """Steps of the averaged checkpoints, ascending; empty without an average."""
        return [checkpoint.step for checkpoint in self.averaged]

    def model_state(self, parameters: Iterable[str]) -> dict[str, Tensor]:
        """Return the state dict of the model.

        ``parameters`` are means over the averaged checkpoints, summed in fp64 and rounded once to
        the dtype of the weight. Everything else is that of ``checkpoint``: masks, scales and
        counters of the method, and BatchNorm statistics, as with ``ema``.
        """
        assert self.checkpoint is not None
        state: dict[str, Tensor] = self.checkpoint.part("model")
        parts = [checkpoint.part("model", mapped=True) for checkpoint in self.averaged]
        for name in parameters if parts else ():
            first, *others = (part[name][...] for part in parts)
            total = first.double()
            for other in others:
                total = total + other.double()
            state[name].copy_(total / len(parts))
        return state

    @property
    def run(self) -> RunDirectory | None:
        """Run that contains the checkpoint; None for copies elsewhere and Hugging Face's."""
        return None if self.checkpoint is None else RunDirectory.of_checkpoint(self.checkpoint.path)


def find(
    path: str | Path, warn: Callable[[str], None] = lambda line: None, *, average: int = 1
) -> WeightSource:
    """Find the checkpoint at ``path`` and verify the parts that an evaluation reads.

    Args:
        path: a run directory (its newest intact checkpoint), a checkpoint directory or a copy of
            one, a directory written by ``save_pretrained``, or a name on the hub.
        warn: called for each damaged checkpoint passed over.
        average: number of last checkpoints of the run whose weights are averaged, up to this one.
    """
    source = _find(path, warn)
    if average == 1:
        return source
    if source.checkpoint is None:
        raise CheckpointError(
            f"average={average}: expected a run, got a Hugging Face checkpoint: leave average out"
        )
    if source.run is None:
        raise CheckpointError(
            f"average={average}: {source.path} is not in a run directory, so there are no others"
        )
    return replace(source, averaged=_last(source.run, source.checkpoint, average, warn))


def _last(
    run: RunDirectory, newest: Checkpoint, count: int, warn: Callable[[str], None]
) -> tuple[Checkpoint, ...]:
    """Return ``newest`` and the ``count - 1`` intact checkpoints before it, in order of steps."""
    chosen = [newest]
    earlier = {k: path for k, path in checkpoint.saved(run.checkpoints).items() if k < newest.step}
    for step in sorted(earlier, reverse=True):
        if len(chosen) == count:
            break
        candidate = Checkpoint(earlier[step])
        if (problem := candidate.problem(("model",))) is None:
            chosen.append(candidate)
        else:
            warn(f"checkpoint {candidate} is damaged ({problem}); the average leaves it out")
    if len(chosen) < count:
        raise CheckpointError(
            f"average={count}: expected {count} whole checkpoints up to step {newest.step}, got "
            f"{len(chosen)} in {run.checkpoints}: lower average, or train with "
            f"checkpoint.keep_last={count} and a checkpoint.every that saves as many"
        )
    return tuple(reversed(chosen))


def _find(path: str | Path, warn: Callable[[str], None]) -> WeightSource:
    """Find the checkpoint at ``path``; see :func:`find`."""
    directory = Path(path).expanduser()
    if (directory / HF_CONFIG).is_file():
        return WeightSource(directory)
    saved = RunDirectory(directory).checkpoints
    files = (checkpoint.MANIFEST, checkpoint.STATE)
    if any((directory / name).is_file() for name in files):
        chosen = Checkpoint(directory)
        chosen.require(EVALUATED)
    elif saved.is_dir():
        newest = checkpoint.newest_valid(saved, warn, EVALUATED)
        if newest is None:
            raise CheckpointError(f"{directory}: there is no whole checkpoint in it")
        chosen = newest
    elif directory.exists():
        raise CheckpointError(
            f"{directory} is neither a run directory nor a checkpoint: it has no {saved.name}/, no "
            f"{checkpoint.MANIFEST} and no {HF_CONFIG}{_checkpoints_of_hosts(directory)}"
        )
    else:
        name = str(path)
        local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name[:5] == "runs/"
        if local or ("/" in name and directory.parent.is_dir()):
            hint = similar_directory(directory)
            raise CheckpointError(f"{name}: there is no such directory{hint}")
        _require_on_hub(name)
        return WeightSource(name)
    return WeightSource(chosen.path, chosen, chosen.config())


def _checkpoints_of_hosts(directory: Path) -> str:
    """Return a hint at checkpoints below, as a Trainer of transformers leaves them; "": none."""
    below = [file.parent for file in directory.glob(f"*/{HF_CONFIG}")]
    if not below:
        return ""
    newest = max(below, key=lambda path: (path / HF_CONFIG).stat().st_mtime)
    return f"; it has {len(below)} checkpoints in subdirectories: give one, such as {newest}"


def _require_on_hub(repository: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    here = f"{repository}: no such directory"
    try:
        with hub_access():
            hf_hub_download(repository, HF_CONFIG)
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{here}; the hub cannot be reached, and its cache has no {HF_CONFIG} of this name"
        ) from error
    except (OSError, ValueError) as error:  # not there, no network, no legal name
        raise CheckpointError(f"{here}, and no {HF_CONFIG} on the hub: {reason(error)}") from error
