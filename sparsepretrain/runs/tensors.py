"""Tensors of a checkpoint: split from plain values, written as safetensors, and joined again.

Each rank of a sharded model writes its rows of a tensor to a file of its own. The headers are those
of torch.distributed.checkpoint.HuggingFaceStorageWriter, so its reader reads them; that writer
itself holds a whole shard in memory twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

OFFSETS = "DCP_SHARDING_INFO"
"""Header key of a file with :class:`RowSlice`; its value is JSON with the first row of each."""


class RowSlice(NamedTuple):
    """Rows of a tensor that this rank saves; other ranks save the remaining rows."""

    tensor: Tensor
    first: int
    """Index of the first row in the whole tensor."""


class Stored:
    """Tensor in the files of a checkpoint, read when it is indexed.

    ``stored[...]`` is the whole tensor and ``stored[2:4]`` two rows of it. Both may be memory maps
    of a file: copy them before the file is removed.
    """

    def __init__(self, pieces: Mapping[int, Tensor]) -> None:
        self._pieces = dict(sorted(pieces.items()))
        first = self._pieces.get(0)
        rows = 0
        for start, piece in self._pieces.items():
            if start != rows:
                raise ValueError(f"rows {rows} to {start} are missing")
            rows += len(piece) if piece.dim() else 0
        if first is None:
            raise ValueError("a tensor has no rows")
        self.shape = (rows, *first.shape[1:]) if first.dim() else ()

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        if rows is ...:
            pieces = list(self._pieces.values())
        else:
            start, stop, _ = rows.indices(self.shape[0])
            cut = {
                first: piece[max(0, start - first) : max(0, stop - first)]
                for first, piece in self._pieces.items()
            }
            # an empty slice still needs dtype and trailing dimensions
            pieces = [piece for piece in cut.values() if len(piece)] or [cut[0]]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)


def write(file: Path, tensors: Mapping[str, Tensor], firsts: Mapping[str, int]) -> None:
    """Write tensors on the CPU; ``firsts`` holds the first row of row slices."""
    from safetensors.torch import save_file

    header = None
    if firsts:
        starts = {
            name: {
                "saved_offsets": [
                    firsts.get(name, 0) if axis == 0 else 0 for axis in range(tensor.dim())
                ]
            }
            for name, tensor in tensors.items()
        }
        header = {OFFSETS: json.dumps(starts)}  # one key: safetensors writes several in any order
    save_file(dict(tensors), file, header)


def read(files: Iterable[Path]) -> dict[str, Stored]:
    """Map the tensors of ``files``, which are the shards of one part."""
    from safetensors import safe_open

    pieces: dict[str, dict[int, Tensor]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            starts = json.loads((opened.metadata() or {}).get(OFFSETS, "{}"))
            for name in list(opened.keys()):
                first = (starts[name]["saved_offsets"] or [0])[0] if starts else 0
                pieces.setdefault(name, {})[first] = opened.get_tensor(name)
    return {name: Stored(shards) for name, shards in pieces.items()}


def split(part: Any, name: str) -> tuple[Any, dict[str, Tensor], dict[str, int]]:
    """Separate ``part`` into JSON values, tensors by path, and the first rows of :class:`RowSlice`.

    Values that JSON lacks become a mapping with one key starting with a dollar sign. A tensor that
    occurs twice, such as a tied weight, is stored once.
    """
    tensors: dict[str, Tensor] = {}
    firsts: dict[str, int] = {}
    names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()

    def add(tensor: Tensor, path: str) -> str:
        key = memory(tensor)
        if key in names and tensor.numel():
            return names[key]
        if path in tensors:
            raise ValueError(f"two tensors are called {path}")
        value = tensor.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in storages:  # safetensors refuses shared storage
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        tensors[path] = value
        return names.setdefault(key, path)

    def convert(value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, RowSlice):
            name = add(value.tensor, path)
            firsts[name] = value.first
            return {"$tensor": name}
        if isinstance(value, Tensor):
            return {"$tensor": add(value, path)}
        if isinstance(value, list | tuple):
            items = [convert(item, f"{path}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, dict):
            entries = [(key, convert(item, f"{path}.{key}")) for key, item in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(entries)
            return {"$items": [[convert(key, path), item] for key, item in entries]}
        raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")

    return convert(part, name), tensors, firsts


def join(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Invert :func:`split`; ``tensors`` maps the names of tensors to values."""
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    match value:
        case {"$float": text}:
            return float(text)
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(join(items, tensors))
        case {"$items": entries}:
            return {key: item for key, item in join(entries, tensors)}
        case dict():
            return {key: join(item, tensors) for key, item in value.items()}
    return value


def memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two views of the same numbers in memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
