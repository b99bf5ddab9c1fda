"""Checkpoints that are either whole or not there.

Written to a temporary directory beside the others, every file flushed to disk, the manifest with
sha256 sums last, then renamed. The loader takes the newest one whose sums agree.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsepretrain.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.pt"
CONFIG = "config.yaml"


def save(directory: Path, step: int, state: dict[str, Any], *, config: str, keep_last: int) -> Path:
    """Write ``directory/step_<step>`` and remove the oldest beyond ``keep_last`` valid ones.

    A whole checkpoint of this step stays as it is: replacing a directory is not atomic.

    Args:
        directory: ``checkpoints`` of a run directory; created when missing.
        step: completed optimiser steps.
        state: tensors and plain Python values.
        config: resolved configuration as YAML text.
        keep_last: at least 1; the one just written counts.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    final = directory / step_name(step)
    stage = directory / f".{final.name}.{os.getpid()}"
    if verify(final) is None:
        return final
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        import torch

        stage.mkdir()
        with open(stage / STATE, "wb") as file:  # given a path, torch hides the system's error
            torch.save(state, file)
        (stage / CONFIG).write_text(config, encoding="utf-8")
        files = {name: _sum_and_sync(stage / name) for name in (STATE, CONFIG)}
        manifest = {"format": FORMAT, "step": step, "sha256": files}
        (stage / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _sum_and_sync(stage / MANIFEST)
        _sync_directory(stage)
        if final.exists():  # damaged
            shutil.rmtree(final)
        os.replace(stage, final)
        _sync_directory(directory)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {final}: {_reason(error)}") from error
    _prune(directory, final, keep_last)
    return final


def step_name(step: int) -> str:
    """Name of what belongs to ``step``; in the order of names it is in the order of steps."""
    return f"step_{step:08d}"


def saved(directory: Path) -> dict[int, Path]:
    """Step -> directory of each checkpoint in ``directory``, whole or not, in order."""
    paths = {p.name.removeprefix("step_"): p for p in sorted(directory.glob("step_*"))}
    return {int(number): path for number, path in paths.items() if number.isdigit()}


def newest_valid(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files match its manifest; says which ones it passed over."""
    for path in sorted(directory.glob("step_*"), reverse=True):
        problem = verify(path)
        if problem is None:
            return path
        warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
    return None


def verify(path: Path) -> str | None:
    """None when ``path`` is a whole checkpoint, else what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this version reads {FORMAT}"
        number = path.name.removeprefix("step_")  # other names are the user's copies
        if number.isdigit() and int(number) != manifest["step"]:
            return f"{MANIFEST} is of step {manifest['step']}"
        if set(manifest["sha256"]) != {STATE, CONFIG}:
            return f"{MANIFEST} does not name its files"
        for name, expected in manifest["sha256"].items():
            if _sum(path / name) != expected:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {type(error).__name__}"
    return None


def load(path: Path) -> tuple[dict[str, Any], str]:
    """(state, configuration as YAML text) of a checkpoint, tensors on the CPU.

    Raises:
        CheckpointError: it does not exist or is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    problem = verify(path)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} is damaged ({problem}): choose another")
    return read_tensors(path / STATE), (path / CONFIG).read_text(encoding="utf-8")


def read_tensors(file: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote, on the CPU; code in it is never run.

    Raises:
        CheckpointError: it is damaged, or holds more than tensors and plain values.
    """
    import torch

    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is refused: it is damaged, or has objects other than tensors and plain "
            "values, which may run code when they are loaded"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {_reason(error)}") from error
    return state


def _reason(error: BaseException) -> str:
    """Why something failed, in one line; a full disk by its name, whatever was made of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"disk full ({os.strerror(cause.errno)}); free some space and start again"
        cause = cause.__context__
    return " ".join(str(error).split())[:200] or type(error).__name__


def _prune(directory: Path, newest: Path, keep_last: int) -> None:
    # only checkpoints that would load count as kept; `newest` has just been written
    valid = [p for p in sorted(directory.glob("step_*"), reverse=True) if p <= newest]
    kept = 0
    for path in valid:
        if kept >= keep_last:
            shutil.rmtree(path, ignore_errors=True)
        elif path == newest or verify(path) is None:
            kept += 1


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sum_and_sync(path: Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _sum(path)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
