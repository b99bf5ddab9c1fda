"""Finished stages of a walk in a directory, so that a killed command goes on behind them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsepretrain.errors import cannot_write
from sparsepretrain.files import sync
from sparsepretrain.kernels import pack_rows, unpack_rows
from sparsepretrain.pruning.walk import Stage


class DirectoryJournal:
    """One safetensors file per stage, written under another name and renamed.

    Args:
        directory: exists; belongs to one walk.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, name: str) -> Stage | None:
        """Return a stage that was finished before, or None; a damaged file counts as none."""
        file = self._file(name)
        if not file.is_file():
            return None
        stage = Stage(name)
        try:
            with safe_open(file, framework="pt") as stored:
                about = json.loads(stored.metadata()["about"])
                stage.facts = about["facts"]
                for key in stored.keys():  # noqa: SIM118
                    kind, _, own = key.partition("|")
                    tensor = stored.get_tensor(key)
                    if kind == "mask":
                        stage.masks[own] = unpack_rows(tensor, about["shapes"][own])
                    else:
                        stage.tensors[own] = tensor
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None
        return stage

    def save(self, stage: Stage) -> None:
        """Store a finished stage.

        Raises:
            SparsePretrainError: it cannot be written; exit code 4 on a full disk.
        """
        file = self._file(stage.name)
        temporary = file.with_suffix(".tmp")
        tensors: dict[str, Tensor] = {
            f"mask|{name}": pack_rows(mask).cpu() for name, mask in stage.masks.items()
        }
        tensors |= {f"tensor|{k}": v.contiguous().cpu() for k, v in stage.tensors.items()}
        shapes = {name: list(mask.shape) for name, mask in stage.masks.items()}
        about = json.dumps({"facts": stage.facts, "shapes": shapes})
        try:
            save_file(tensors, temporary, {"about": about})
            sync(temporary)
            os.replace(temporary, file)
        except (OSError, SafetensorError) as error:
            failed = error if isinstance(error, OSError) else OSError(str(error))
            raise cannot_write(file, failed) from error

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.safetensors"
