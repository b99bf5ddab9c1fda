"""Atomic checkpoints: named parts as safetensors and JSON.

``step_<N>/`` holds ``state.json``, the parts without tensors; a safetensors file for each part with
tensors and each rank that has some of them; ``config.yaml``; and ``manifest.json`` with the SHA-256
of the other files. It is written under a hidden name, every file flushed to disk, the manifest
last, then renamed. No pickle is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sparsepretrain.config import freeze
from sparsepretrain.errors import CheckpointError, ConfigError, reason
from sparsepretrain.files import is_plain_name, read_json, require_file, sync
from sparsepretrain.runs import tensors

T = TypeVar("T")

FORMAT = 2
"""Version of the layout, stored in the manifest."""
STATE = "state.json"
MANIFEST = "manifest.json"
CONFIG = "config.yaml"

SHARD = "shard-{:05d}-{}.safetensors"
"""File with one rank's tensors of one part: rank, name of the part."""

_whole: dict[Path, frozenset[tuple[str, int, int]]] = {}
"""Checkpoints written or verified by this process -> their :func:`_stamp`."""


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


class Ranks:
    """Ranks that save a checkpoint together: here only this process."""

    rank = 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        return [value]


ALONE = Ranks()


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

    def part(self, name: str, *, mapped: bool = False) -> Any:
        """Return one part with tensors on the CPU, or None if missing.

        Args:
            name: name of the part.
            mapped: its tensors are :class:`~sparsepretrain.runs.tensors.Stored`, read when indexed.
        """
        self.require((name,))
        return self._with_tensors(name, self._state().get(name), copy=not mapped)

    def parts(self, mapped: Container[str] = ()) -> dict[str, Any]:
        """Return all parts in saved order.

        Args:
            mapped: parts whose tensors are :class:`~sparsepretrain.runs.tensors.Stored`, read when
                indexed.
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
            return read_json(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error

    def _with_tensors(self, name: str, part: Any, *, copy: bool = True) -> Any:
        from safetensors import SafetensorError

        try:
            shards = tensors.read(
                self.path / file for file in _files(name, self._manifest["sha256"])
            )
            values = {key: t[...].clone() for key, t in shards.items()} if copy else shards
            return tensors.join(part, values)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            where = self.path / SHARD.format(0, name)
            raise CheckpointError(f"{where} cannot be read: {reason(error)}") from error

    def require(self, parts: Iterable[str] | None = None) -> None:
        """Raise CheckpointError if missing or if :meth:`problem` finds damage."""
        if not self.path.is_dir():
            raise CheckpointError(f"checkpoint {self.path} does not exist")
        if (problem := self.problem(parts)) is not None:
            raise CheckpointError(f"checkpoint {self.path} is damaged ({problem}): choose another")

    def problem(self, parts: Iterable[str] | None = None) -> str | None:
        """Return the damage found in the files of ``parts`` (None: all), or None if intact."""
        try:
            manifest = read_json(self.path / MANIFEST)
            if manifest["format"] != FORMAT:
                return f"format {manifest['format']}, this version reads {FORMAT}"
            number = self.path.name.removeprefix("step_")  # other names are copies by the user
            if number.isdigit() and int(number) != manifest["step"]:
                return f"{MANIFEST} is of step {manifest['step']}"
            sums = manifest["sha256"]
            needed = {STATE, CONFIG}
            if not all(map(is_plain_name, sums)):
                return f"{MANIFEST} names a file elsewhere"
            if not {*needed, *(p.name for p in self.path.glob("shard-*"))} <= sums.keys():
                return f"{MANIFEST} does not name its files"
            wanted = (
                sums.keys() if parts is None else needed.union(*(_files(p, sums) for p in parts))
            )
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
    directory: Path,
    step: int,
    parts: dict[str, Any],
    *,
    config: str,
    keep: Retention,
    ranks: Ranks = ALONE,
) -> Path:
    """Write ``directory/step_<step>`` and remove checkpoints not retained by ``keep``.

    An intact checkpoint of this step is kept, since replacing a directory is not atomic. Collective
    over ``ranks``, which must share a file system.

    Args:
        directory: ``checkpoints`` of a run directory; created if missing.
        step: completed optimizer steps.
        parts: name -> tensors, :class:`~sparsepretrain.runs.tensors.RowSlice`, numbers, strings,
            None, and lists, tuples and dicts of these. Ranks other than 0 pass only row slices.
        config: configuration as YAML text.
        keep: retention rule, the new checkpoint included.
        ranks: ranks that save together.

    Raises:
        CheckpointError: on all ranks, if the write failed on one; earlier checkpoints are
            untouched.
    """
    final = directory / step_name(step)
    plain: dict[str, Any] = {}

    def begin() -> Path | None:
        if ranks.rank or Checkpoint(final).problem() is None:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".step_*"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)
        stage = _stage(final)
        stage.mkdir()
        (stage / CONFIG).write_text(config, encoding="utf-8")
        return stage

    def write() -> dict[str, str]:
        for name, part in parts.items():
            plain[name], values, firsts = tensors.split(part, name)
            if values:
                tensors.write(stage / SHARD.format(ranks.rank, name), values, firsts)
        return {file.name: _flushed(file) for file in stage.glob(SHARD.format(ranks.rank, "*"))}

    def finish() -> None:
        if ranks.rank:
            return
        _write_json(stage / STATE, plain)
        sums_of_files = {name: _flushed(stage / name) for name in (CONFIG, STATE)}
        sums = {name: value for part in (sums_of_files, *written) for name, value in part.items()}
        manifest = {"format": FORMAT, "step": step, "sha256": dict(sorted(sums.items()))}
        _write_json(stage / MANIFEST, manifest)
        # Flush the files before the rename, and the parent directory after it: a file system may
        # write a rename to disk before the data, and a crash would leave a named, empty checkpoint.
        sync(stage / MANIFEST)
        sync(stage)
        if final.exists():  # damaged, since begin() keeps an intact one
            shutil.rmtree(final)
        os.replace(stage, final)
        sync(directory)
        _whole[final.absolute()] = _stamp(final)

    # Each phase ends with a gather: rank 0 writes the manifest, without which no checkpoint is
    # valid, when the files of all ranks are on disk.
    begun = _together(ranks, final, begin)[0]
    if begun is None:
        return final
    stage = begun
    written = _together(ranks, final, write)
    _together(ranks, final, finish)
    if not ranks.rank:
        _prune(directory, step, keep)
    return final


def _together(ranks: Ranks, final: Path, action: Callable[[], T]) -> list[T]:
    """Return what ``action`` returns on each rank."""
    result: Any = None
    failure: CheckpointError | None = None
    try:
        with writing(final):
            result = action()
    except CheckpointError as error:
        failure = error
    results = ranks.gather((result, failure and str(failure)))
    for _, text in results:
        if text is not None:
            shutil.rmtree(_stage(final), ignore_errors=True)
            raise CheckpointError(text) from failure
    return [result for result, _ in results]


def _flushed(file: Path) -> str:
    """Flush a file to disk and return its SHA-256."""
    shutil.copymode(file.with_name(CONFIG), file)  # safetensors creates private files
    sync(file)
    return _sum(file)


def step_name(step: int) -> str:
    """Return a name for ``step``; names sort by step, up to eight digits."""
    return f"step_{step:08d}"


def saved(directory: Path) -> dict[int, Path]:
    """Return step -> path of each checkpoint in ``directory``, damaged ones included.

    Other names, such as a copy ``step_best``, are the user's.
    """
    paths = {p.name.removeprefix("step_"): p for p in sorted(directory.glob("step_*"))}
    return {int(number): path for number, path in paths.items() if number.isdigit()}


def newest_valid(
    directory: Path, warn: Callable[[str], None], parts: Iterable[str] | None = None
) -> Checkpoint | None:
    """Return the newest intact checkpoint; ``warn`` about newer, damaged ones."""
    for _, path in sorted(saved(directory).items(), reverse=True):
        checkpoint = Checkpoint(path)
        problem = checkpoint.problem(parts)
        if problem is None:
            return checkpoint
        warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
    return None


@contextlib.contextmanager
def writing(final: Path) -> Iterator[None]:
    """Turn errors into a CheckpointError that names ``final``."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"cannot write checkpoint {final}: {reason(error)}") from error


def _stage(final: Path) -> Path:
    """Return the hidden name under which this process writes ``final``."""
    return final.with_name(f".{final.name}.{os.getpid()}")


def _prune(directory: Path, newest: int, keep: Retention) -> None:
    paths = {step: path for step, path in saved(directory).items() if step <= newest}
    by_loss = sorted(keep.losses.keys() & paths.keys(), key=lambda step: (keep.losses[step], step))
    kept = {step for step in paths if keep.every and step % keep.every == 0}
    for order, count in ((sorted(paths, reverse=True), keep.last), (by_loss, keep.best)):
        whole = (step for step in order if _is_whole(paths[step]))  # only intact ones count
        kept.update(itertools.islice(whole, count))
    for step in paths.keys() - kept:
        shutil.rmtree(paths[step], ignore_errors=True)
        _whole.pop(paths[step].absolute(), None)


def _is_whole(path: Path) -> bool:
    known = _whole.get(path.absolute())
    return (known is not None and known == _stamp(path)) or Checkpoint(path).problem() is None


def _files(part: str, names: Iterable[str]) -> list[str]:
    """Return the shards of ``part`` among ``names``."""
    return sorted(name for name in names if name.endswith(f"-{part}.safetensors"))


def _stamp(path: Path) -> frozenset[tuple[str, int, int]]:
    """Return name, size and modification time of every file."""
    files = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    return frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
