"""Finding trained weights: a run, one of its checkpoints, or a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sparsepretrain.config import freeze
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.directory import RunDirectory

HF_CONFIG = "config.json"
HF_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weights in one file; in several, ``<file>.index.json`` names them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was found."""

    path: Path | str
    """Directory of the checkpoint, or its name on the Hugging Face hub."""
    kind: Literal["run", "huggingface"]
    step: int | None = None
    """Completed optimiser steps of a run."""
    config: dict[str, Any] | None = None
    """Frozen configuration of a run, as plain values."""

    @property
    def run(self) -> RunDirectory | None:
        """Of a run's own checkpoint; None for Hugging Face's and for copies lying elsewhere."""
        return RunDirectory.of_checkpoint(Path(self.path)) if self.kind == "run" else None


def find(path: str | Path, warn: Callable[[str], None] = lambda line: None) -> Source:
    """The checkpoint that ``path`` names.

    Args:
        path: a run directory (its newest whole checkpoint), a directory inside ``checkpoints/`` or
            a copy of one, a directory that ``save_pretrained`` wrote, or a name on the hub.
        warn: told which damaged checkpoints are passed over.

    Raises:
        CheckpointError: nothing is there, or what is there is damaged.
    """
    directory = Path(path).expanduser()
    if (directory / HF_CONFIG).is_file():
        return Source(directory, "huggingface")
    if (directory / checkpoint.MANIFEST).is_file() or (directory / checkpoint.STATE).is_file():
        return _run_source(directory)
    checkpoints = RunDirectory(directory).checkpoints
    if checkpoints.is_dir():
        newest = checkpoint.newest_valid(checkpoints, warn)
        if newest is None:
            raise CheckpointError(f"{directory}: there is no whole checkpoint in it")
        return _run_source(newest)
    if directory.exists():
        raise CheckpointError(
            f"{directory} is neither a run directory nor a checkpoint: it has no checkpoints/, no "
            f"{checkpoint.MANIFEST} and no {HF_CONFIG}"
        )
    name = str(path)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):  # no name of the hub
        raise CheckpointError(f"{name}: no such checkpoint")
    _fetch(name, HF_CONFIG)
    return Source(name, "huggingface")


def latest(source: Source, count: int) -> list[Source]:
    """``source`` and the ``count - 1`` whole checkpoints of its run before it, oldest first.

    Raises:
        CheckpointError: there are fewer.
    """
    if count == 1:
        return [source]
    run = source.run
    if run is None:
        raise CheckpointError(f"{source.path} is not in a run directory: no others to average with")
    earlier = sorted(run.checkpoints.glob("step_*"))
    whole = [p for p in earlier if p <= Path(source.path) and checkpoint.verify(p) is None]
    if len(whole) < count:
        raise CheckpointError(
            f"{run} has {len(whole)} whole checkpoint(s) up to step {source.step}, not "
            f"{count}: lower average, or train with checkpoint.keep_last={count}"
        )
    return [_run_source(p) for p in whole[-count:]]


def state(source: Source) -> dict[str, Any]:
    """Everything in the checkpoint of a run, tensors on the CPU.

    Raises:
        CheckpointError: it is damaged.
    """
    return checkpoint.load(Path(source.path))[0]


def model_state(source: Source) -> dict[str, Tensor]:
    """The model's state dict, buffers included, on the CPU; names as stored.

    Raises:
        CheckpointError: it is damaged or cannot be fetched.
    """
    if source.kind == "run":
        model: dict[str, Tensor] = state(source)["model"]
        return model
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(source):
        try:
            tensors |= _read_tensors(file)
        except CheckpointError:
            raise
        except Exception as error:  # safetensors and pickle raise errors of their own
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{file} cannot be read: {reason}") from error
    return tensors


def sparsifier_state(source: Source) -> dict[str, Any] | None:
    """What ``Sparsifier.state_dict`` returned; None for a Hugging Face checkpoint."""
    return None if source.kind == "huggingface" else state(source)["sparsifier"]


def _run_source(path: Path) -> Source:
    problem = checkpoint.verify(path)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} is damaged ({problem}): choose another")
    step = json.loads((path / checkpoint.MANIFEST).read_text(encoding="utf-8"))["step"]
    try:
        return Source(path, "run", step, freeze.from_yaml(path / checkpoint.CONFIG))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _weight_files(source: Source) -> list[Path]:
    for name in HF_FILES:
        if (file := locate(source, name)) is not None:
            return [file]
        if (index := locate(source, f"{name}.index.json")) is not None:
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{index} is damaged: it names no files") from error
            files = [(name, locate(source, name)) for name in sorted(set(names))]
            for name, part in files:
                if part is None:
                    raise CheckpointError(f"{source.path}: {name} is missing")
            return [part for _, part in files if part is not None]
    raise CheckpointError(f"{source.path} has no weights: neither {' nor '.join(HF_FILES)}")


def locate(source: Source, name: str) -> Path | None:
    """A file of a Hugging Face checkpoint, fetched if need be; None: it has none."""
    if isinstance(source.path, Path):
        file = source.path / name
        return file if file.is_file() else None
    try:
        return _fetch(source.path, name)
    except CheckpointError:
        return None


def _fetch(repository: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    from sparsepretrain.data.hub import hub_access, reason

    try:
        with hub_access():
            return Path(hf_hub_download(repository, name))
    except (OSError, ValueError) as error:  # not there, no network, no legal name
        raise CheckpointError(
            f"{repository}: no such directory, and the hub gives no {name}: {reason(error)}"
        ) from error


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(os.fspath(file))
    return checkpoint.read_tensors(file)
