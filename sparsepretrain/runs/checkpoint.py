"""Atomic checkpoints: named parts as safetensors and JSON.

``step_<N>/`` holds ``state.json``, the parts without tensors; a safetensors file for each part with
tensors, named by their path (``model.<name>``); ``config.yaml``; and ``manifest.json`` with the
SHA-256 of the other files. It is written under a hidden name, every file flushed to disk, the
manifest last, then renamed. No pickle is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepretrain.config import freeze
from sparsepretrain.errors import CheckpointError, ConfigError, reason
from sparsepretrain.files import is_plain_name, read_json, require_file, sync

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
"""Version of the layout, stored in the manifest."""
STATE = "state.json"
MANIFEST = "manifest.json"
CONFIG = "config.yaml"

_whole: dict[Path, frozenset[tuple[str, int, int]]] = {}
"""Checkpoints written or verified by this process, with their :func:`_stamp`."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Rule for keeping checkpoints; damaged ones do not count."""

    last: int
    """Number of newest checkpoints, at least 1."""
    every: int = 0
    """Keep all multiples of this step; 0: none."""
    best: int = 0
    """Number of checkpoints with the lowest loss."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Step -> loss."""


class Checkpoint:
    """Checkpoint directory on disk; each file is verified once, before its first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest: dict[str, Any] = {}
        self._checked: set[str] = set()

    def __str__(self) -> str:
        return str(self.path)

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        self.require(())
        return int(self._manifest["step"])

    def config(self) -> dict[str, Any]:
        """Return the frozen configuration as plain values."""
        self.require(())
        try:
            return freeze.from_yaml(self.path / CONFIG)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error

    def part(self, name: str) -> Any:
        """Return one part with tensors on the CPU, or None if missing.

        Raises:
            CheckpointError: a required file is missing or damaged.
        """
        self.require((name,))
        return self._with_tensors(name, self._state().get(name))

    def parts(self, mapped: Container[str] = ()) -> dict[str, Any]:
        """Return all parts in saved order.

        Args:
            mapped: parts whose tensors may be memory maps of the file; copy them before the file is
                removed.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self.require()
        return {
            name: self._with_tensors(name, part, copy=name not in mapped)
            for name, part in self._state().items()
        }

    def _state(self) -> dict[str, Any]:
        """Return the parts without tensors."""
        file = self.path / STATE
        try:
            return read_json(file, dict)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error

    def _with_tensors(self, name: str, part: Any, *, copy: bool = True) -> Any:
        from safetensors import SafetensorError, safe_open

        file, tensors = self.path / _shard(name), {}
        try:
            if file.name in self._manifest["sha256"]:
                with safe_open(file, framework="pt") as opened:
                    tensors = {key: opened.get_tensor(key) for key in list(opened.keys())}
                tensors = {k: t.clone() for k, t in tensors.items()} if copy else tensors
            return _join(part, tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error

    def require(self, parts: Iterable[str] | None = None) -> None:
        """Raise CheckpointError if missing or if :meth:`problem` finds damage."""
        if not self.path.is_dir():
            raise CheckpointError(f"checkpoint {self.path} does not exist")
        if (problem := self.problem(parts)) is not None:
            raise CheckpointError(f"checkpoint {self.path} is damaged ({problem}): choose another")

    def problem(self, parts: Iterable[str] | None = None) -> str | None:
        """Describe damage to the files of ``parts``, by default all; None: intact."""
        try:
            manifest = read_json(self.path / MANIFEST, dict)
            if manifest["format"] != FORMAT:
                return f"format {manifest['format']}, this version reads {FORMAT}"
            number = self.path.name.removeprefix("step_")  # other names are copies by the user
            if number.isdigit() and int(number) != manifest["step"]:
                return f"{MANIFEST} is of step {manifest['step']}"
            sums, needed = manifest["sha256"], {STATE, CONFIG}
            if not all(map(is_plain_name, sums)):
                return f"{MANIFEST} names a file elsewhere"
            if not {*needed, *(p.name for p in self.path.glob(_shard("*")))} <= sums.keys():
                return f"{MANIFEST} does not name its files"
            wanted = sums.keys() if parts is None else needed | set(map(_shard, parts))
            for name in sorted((wanted & sums.keys()) - self._checked):
                require_file(self.path / name)
                if _sum(self.path / name) != sums[name]:
                    return f"{name} does not match its checksum"
                self._checked.add(name)
            if parts is None:
                _whole[self.path.absolute()] = _stamp(self.path)
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{MANIFEST}: {type(error).__name__}"
        self._manifest = manifest
        return None


def save(
    directory: Path, step: int, parts: dict[str, Any], *, config: str, keep: Retention
) -> Path:
    """Write ``directory/step_<step>`` and remove checkpoints not retained by ``keep``.

    An intact checkpoint of this step stays: replacing a directory is not atomic.

    Args:
        directory: ``checkpoints`` of a run directory; created if missing.
        step: completed optimizer steps.
        parts: name -> tensors, numbers, strings, None, and lists, tuples and dicts of these.
        config: configuration as YAML text.
        keep: retention rule, the new checkpoint included.

    Raises:
        CheckpointError: the write failed; earlier checkpoints are untouched.
    """
    final = directory / step_name(step)
    if Checkpoint(final).problem() is None:
        return final
    from safetensors.torch import save_file

    with writing(final) as stage:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        stage.mkdir()
        plain = {}
        for name, part in parts.items():
            plain[name], tensors = _split(part, name)
            if tensors:
                save_file(tensors, stage / _shard(name))
        _write_json(stage / STATE, plain)
        (stage / CONFIG).write_text(config, encoding="utf-8")
        sums = {}
        for file in sorted(stage.iterdir()):
            shutil.copymode(stage / CONFIG, file)  # safetensors creates private files
            sync(file)
            sums[file.name] = _sum(file)
        _write_json(stage / MANIFEST, {"format": FORMAT, "step": step, "sha256": sums})
        sync(stage / MANIFEST)
        sync(stage)
        if final.exists():  # damaged
            shutil.rmtree(final)
        os.replace(stage, final)
        sync(directory)
        _whole[final.absolute()] = _stamp(final)
    _prune(directory, step, keep)
    return final


def step_name(step: int) -> str:
    """Return a name for ``step``; names sort by step."""
    return f"step_{step:08d}"


def saved(directory: Path) -> dict[int, Path]:
    """Return step -> path of each checkpoint in ``directory``, damaged ones included."""
    paths = {p.name.removeprefix("step_"): p for p in sorted(directory.glob("step_*"))}
    return {int(number): path for number, path in paths.items() if number.isdigit()}


def newest_valid(
    directory: Path, warn: Callable[[str], None], parts: Iterable[str] | None = None
) -> Checkpoint | None:
    """Return the newest intact checkpoint; ``warn`` of damaged ones passed over."""
    for path in sorted(directory.glob("step_*"), reverse=True):
        checkpoint = Checkpoint(path)
        problem = checkpoint.problem(parts)
        if problem is None:
            return checkpoint
        warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
    return None


@contextlib.contextmanager
def writing(final: Path) -> Iterator[Path]:
    """Provide a temporary path for ``final``; on error remove it and raise CheckpointError."""
    from safetensors import SafetensorError

    stage = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        yield stage
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {final}: {reason(error)}") from error


def _shard(part: str) -> str:
    return f"shard-00000-{part}.safetensors"


def _split(part: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Separate ``part`` into JSON values and tensors by path.

    Values that JSON lacks become a mapping with one key starting with a dollar sign. A tensor that
    occurs twice, such as a tied weight, is stored once.
    """
    from torch import Tensor

    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()

    def add(tensor: Tensor, path: str) -> str:
        place = memory(tensor)
        if place in names and tensor.numel():
            return names[place]
        if path in tensors:
            raise ValueError(f"two tensors are called {path}")
        value = tensor.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in storages:  # which safetensors refuses
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        tensors[path] = value
        return names.setdefault(place, path)

    def convert(value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
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

    return convert(part, name), tensors


def memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two views of the same numbers in memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Invert :func:`_split`."""
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    match value:
        case {"$float": text}:
            return float(text)
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_join(items, tensors))
        case {"$items": entries}:
            return {key: item for key, item in _join(entries, tensors)}
        case dict():
            return {key: _join(item, tensors) for key, item in value.items()}
    return value


def _prune(directory: Path, newest: int, keep: Retention) -> None:
    paths = {step: path for step, path in saved(directory).items() if step <= newest}
    by_loss = sorted(keep.losses.keys() & paths.keys(), key=lambda step: (keep.losses[step], step))
    kept = {step for step in paths if keep.every and step % keep.every == 0}
    # only intact checkpoints count
    kept |= _first_whole(paths, sorted(paths, reverse=True), keep.last)
    kept |= _first_whole(paths, by_loss, keep.best)
    for step in paths.keys() - kept:
        shutil.rmtree(paths[step], ignore_errors=True)
        _whole.pop(paths[step].absolute(), None)


def _first_whole(paths: dict[int, Path], order: Sequence[int], count: int) -> set[int]:
    whole = (step for step in order if _is_whole(paths[step]))
    return set(itertools.islice(whole, count))


def _is_whole(path: Path) -> bool:
    known = _whole.get(path.absolute())
    return (known is not None and known == _stamp(path)) or Checkpoint(path).problem() is None


def _stamp(path: Path) -> frozenset[tuple[str, int, int]]:
    """Return name, size and modification time of every file."""
    files = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    return frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
