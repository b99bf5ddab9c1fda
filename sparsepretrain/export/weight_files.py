"""Weights of a checkpoint, read in parts of a few megabytes.

Files are those of Hugging Face: safetensors, alone or as shards with an index. Pickled files are
refused: reading them can run any code.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsepretrain.errors import CheckpointError, one_line
from sparsepretrain.files import read_json

INDEX = ".safetensors.index.json"
"""End of the name of an index: tensor name -> file."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
PART = 1 << 20
"""Maximum number of entries that are read at a time, or one row."""
MAPPED = 1 << 26
"""Bytes after which a file is opened again: pages of its mapping count as memory of the process."""


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Types that hold plain values, as safetensors names them."""


class Stored(NamedTuple):
    """Shape and type of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the type in safetensors, such as ``BF16`` or ``I8``."""

    @property
    def is_plain(self) -> bool:
        """True if the tensor holds values, not codes of them."""
        return self.dtype in NAMES.values()


class Weights(ABC):
    """Tensors by name, read in parts."""

    stored: Mapping[str, Stored]
    """Name -> shape and type."""
    defects: Mapping[str, str]
    """Name -> what is wrong with the files of a tensor."""

    @abstractmethod
    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows of a tensor, in the dtype that is stored."""

    def parts(self, name: str, multiple: int) -> Iterator[Tensor]:
        """Yield the tensor in parts along its first axis.

        Args:
            name: a tensor of at least one dimension.
            multiple: every part but the last one has a multiple of this many rows.
        """
        count, *others = self.stored[name].shape
        size = max(1, PART // max(1, math.prod(others)) // multiple) * multiple
        for first in range(0, count, size):
            yield self.rows(name, first, min(first + size, count))


class ModelWeights(Weights):
    """Weights of a model in memory."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.stored = {
            name: Stored(tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in state.items()
        }
        self.defects = {}

    def rows(self, name: str, first: int, last: int) -> Tensor:  # noqa: D102
        return self._state[name].detach()[first:last]


class WeightFiles(Weights):
    """Weights in safetensors files.

    Args:
        path: a file, or a directory with one file or with shards and an index.

    Raises:
        CheckpointError: there are none, only pickled ones, or a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.files, index = _files(path)
        self._place: dict[str, Path] = {}
        self._opened: tuple[Path, Any, contextlib.ExitStack] | None = None
        self._read = 0
        stored: dict[str, Stored] = {}
        defects: dict[str, str] = {}
        for file in self.files:
            with _reading(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    if name in stored:
                        defects[name] = f"is in {self._place[name].name} and in {file.name}"
                        if index.get(name) != file.name:
                            continue
                    stored[name] = Stored(tuple(part.get_shape()), part.get_dtype())
                    self._place[name] = file
        for name, file_name in index.items():
            if name not in stored:
                defects[name] = f"is missing in {file_name}, where the index has it"
        if index:
            for name in stored.keys() - index.keys():
                defects[name] = "is not in the index: loaders leave it out"
        self.stored = stored
        self.defects = defects

    def rows(self, name: str, first: int, last: int) -> Tensor:  # noqa: D102
        file = self._place[name]
        if self._opened is None or self._opened[0] != file or self._read > MAPPED:
            self.close()
            stack = contextlib.ExitStack()
            self._opened = (file, stack.enter_context(_reading(file)), stack)
        rows: Tensor = self._opened[1].get_slice(name)[first:last]
        self._read += rows.nbytes
        return rows

    def close(self) -> None:
        """Close the open file."""
        if self._opened is not None:
            self._opened[2].close()
        self._opened = None
        self._read = 0


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a checkpoint, and the index or an empty dict."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return [path], {}
        raise CheckpointError(f"{path}: expected a .safetensors file or a directory with some")
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or directory")
    indices = sorted(path.glob(f"*{INDEX}"))
    if len(indices) > 1:
        listed = ", ".join(file.name for file in indices)
        raise CheckpointError(f"{path} has several indices ({listed}): give a directory with one")
    found = sorted(path.glob("*.safetensors"))
    whole = path / "model.safetensors"
    if whole.is_file():  # loaders prefer it
        return [whole], {}
    if indices:
        try:
            entries = read_json(indices[0])["weight_map"].items()
            index = {str(name): str(file) for name, file in entries}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{indices[0]}: not an index of shards: {error!r}") from error
        files = [path / name for name in sorted(set(index.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, and {indices[0].name} names it")
        return files, index
    if len(found) > 1:
        listed = ", ".join(file.name for file in found[:4])
        raise CheckpointError(
            f"{path} has {len(found)} files and no index ({listed}): give one of the files"
        )
    if found:
        return found, {}
    if pickled := [file.name for pattern in PICKLED for file in sorted(path.glob(pattern))]:
        raise CheckpointError(
            f"{path} has pickled weights only ({pickled[0]}), which can run any code: load the "
            "model where you trust it, and save it with safe_serialization=True"
        )
    raise CheckpointError(f"{path} has no .safetensors files")


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {one_line(error)[:200]}") from error
