"""Directory of a run: paths, lock, and contents of its files."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import re
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import (
    ConfigError,
    DataError,
    SparsePretrainWarning,
    cannot_write,
)
from sparsepretrain.files import read_json, write_atomic, writer_tag
from sparsepretrain.runs import checkpoint, origin, ownership, record
from sparsepretrain.runs.ownership import Ownership

_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()
# Workers that load data are forks. One that outlives its run, by seconds after SIGKILL, must not
# keep the lock; closing its copy of the file does not release it here.
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _locks])

SET_ASIDE = re.compile(r"\.old-\d+$")
"""Suffix of a run replaced by ``resume=never``."""


class _Entry:
    """File or directory of a run, given by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, run: None, owner: type) -> _Entry: ...
    @overload
    def __get__(self, run: RunDirectory, owner: type) -> Path: ...
    def __get__(self, run: RunDirectory | None, owner: type) -> _Entry | Path:
        return self if run is None else run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Run on disk. All file names of a run are defined here.

    Args:
        path: ``<runs_dir>/<name>/<hash8>-s<seed>`` (:meth:`of`), or another path after a move.
    """

    path: Path

    config_file = _Entry("config.yaml")
    """Resolved configuration."""
    environment_file = _Entry("environment.json")
    """Versions, commit, command and hardware of the last training process, and ``hashes`` of
    ``initial_weights``, ``data_order`` and ``evaluation``."""
    record_file = _Entry("metrics.jsonl")
    """See :mod:`~sparsepretrain.runs.record`."""
    probes_file = _Entry("probes.jsonl")
    """Measurements of probes in the form of the record; a line names its ``probe``."""
    evaluations_file = _Entry("eval.jsonl")
    """One line per evaluation of a checkpoint on a whole split."""
    tokenizer_file = _Entry("tokenizer.json")
    """Tokenizer of the model; missing for bytes and images."""
    tokenizer_settings_file = _Entry("tokenizer_config.json")
    """Name of its end-of-text token, if that was given or is declared beside the tokenizer."""
    pretrained = _Entry("pretrained")
    """Settings of the tokenizer and of generation of the Hugging Face checkpoint that the run
    started from; an export has them."""
    source_file = _Entry("source.json")
    """Fingerprint of the checkpoint that the run started from, see
    :mod:`~sparsepretrain.runs.origin`."""
    checkpoints = _Entry("checkpoints")
    """See :mod:`~sparsepretrain.runs.checkpoint`."""
    masks = _Entry("masks")
    """Packed masks, a file per recorded step."""
    plots = _Entry("plots")
    """Figures of the report."""
    report_file = _Entry("report.md")
    """Report on the run."""
    exports = _Entry("export")
    """Models for other libraries, a directory per format."""
    pruned = _Entry("pruned")
    """One-shot pruned models, a directory per stage of a table."""
    harness = _Entry("lm_eval")
    """Results of lm-evaluation-harness, a directory per step."""
    console_log = _Entry("console.log")
    """Console output of a run started by another process."""
    status_file = _Entry("status.json")
    """``exit_code`` of a run under torchrun, which maps all errors to 1."""
    failures_file = _Entry("failed.json")
    """See :meth:`failures`."""
    lock_file = _Entry(".lock")
    """Lock file of the training process, for processes of the same machine."""
    owner_file = _Entry(".owner")
    """Training process of any machine, see :mod:`~sparsepretrain.runs.ownership`."""

    @classmethod
    def of(cls, config: Run | dict[str, Any]) -> RunDirectory:
        """Return the directory determined by a configuration."""
        return cls(freeze.run_directory(config))

    @classmethod
    def of_checkpoint(cls, path: Path) -> RunDirectory | None:
        """Return the run that contains a checkpoint; None for a copy elsewhere."""
        name = cls.checkpoints.name
        resolved = path if path.parent.name == name else path.resolve()
        return cls(resolved.parent.parent) if resolved.parent.name == name else None

    def __str__(self) -> str:
        return str(self.path)

    def masks_file(self, step: int) -> Path:
        """Return the path of a step's masks: ``pack_24`` codes and shapes by layer."""
        return self.masks / f"{checkpoint.step_name(step)}.npz"

    def has_trained(self, end: int) -> bool:
        """Return True if the record reaches step ``end``, with checkpoints or without."""
        try:
            return any(line["step"] >= end for line in self.record())
        except (ConfigError, DataError):
            return False

    @contextlib.contextmanager
    def claim(self) -> Iterator[Ownership]:
        """Create and own the directory; remove it again if the run fails before writing.

        Raises:
            ConfigError: another process owns it, or it is not writable.
        """
        created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with contextlib.ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                # The empty file is kept: if a finished run removed it, two later ones could hold
                # locks on two files.
                lock = held.enter_context(open(self.lock_file, "w"))
                _locks.add(lock)
                self._lock(lock)
            except OSError as error:
                _remove_empty(created)
                raise ConfigError(self._not_writable(error)) from error
            try:
                with self._owning() as owner:
                    yield owner
            except BaseException:  # a signal too
                if created and list(self.path.iterdir()) == [self.lock_file]:
                    self.lock_file.unlink()
                    _remove_empty(created)
                raise

    def _lock(self, lock: IO[str]) -> None:
        """Lock a file as the kernel of this machine does; raise ConfigError if it is locked.

        The kernel releases the lock with the process, also after SIGKILL. Some network file systems
        have no such locks, and others lock on one machine only: the owner's file decides there.
        """
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = ownership.read(self.owner_file)
            if owner is None or owner.is_near:
                raise ConfigError(self._held(owner)) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise

    @contextlib.contextmanager
    def _owning(self) -> Iterator[Ownership]:
        try:
            owner = ownership.own(self.owner_file)
        except ownership.Held as error:
            raise ConfigError(self._held(error.owner)) from error
        except OSError as error:
            raise ConfigError(self._not_writable(error)) from error
        try:
            yield owner
        finally:
            owner.release()

    def _held(self, owner: ownership.Owner | None) -> str:
        who = f" ({owner})" if owner else ""
        return f"another process is training {self}{who}: wait for it, or change name or seed"

    def _not_writable(self, error: OSError) -> str:
        return f"run directory {self} is not writable ({error.strerror}): set runs_dir=DIR"

    def write(self, file: Path, content: str | bytes) -> None:
        """Write one of the run's files atomically; CheckpointError on a full disk."""
        try:
            file.parent.mkdir(exist_ok=True)
            write_atomic(file, content)
        except OSError as error:
            raise cannot_write(file, error) from error

    def set_aside(self) -> Path:
        """Move all files to the sibling ``<name>.old-<k>`` and return its path."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        target.mkdir()
        for entry in self.path.iterdir():
            in_use = entry in (self.lock_file, self.console_log)  # by this process
            if not in_use and not entry.name.startswith(self.owner_file.name):
                os.replace(entry, target / entry.name)
        return target

    def config(self) -> dict[str, Any]:
        """Return the frozen configuration as plain values."""
        return freeze.from_yaml(self.config_file)

    def environment(self) -> dict[str, Any]:
        """Return the content of ``environment.json``; empty if missing."""
        if not self.environment_file.is_file():
            return {}
        try:
            return read_json(self.environment_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.environment_file} cannot be read: {error}") from error

    def failures(self) -> dict[str, dict[str, Any]]:
        """Return failed stage -> ``exit_code`` (minus the signal if killed) and one-line ``error``.

        Stage ``train`` is the run itself; others are stages of a table.
        """
        try:
            return read_json(self.failures_file)
        except (OSError, ValueError):
            return {}

    def note_failure(self, what: str, exit_code: int = 0, error: str = "") -> None:
        """Record the failure of stage ``what``, or its success if the exit code is 0.

        Runs and the tables that wait for them write the file, perhaps on several machines.
        """
        with contextlib.suppress(OSError), ownership.exclusive(self.failures_file):
            failures = {key: entry for key, entry in self.failures().items() if key != what}
            if exit_code:
                failures[what] = {"exit_code": exit_code, "error": error}
            if failures:
                write_atomic(self.failures_file, json.dumps(failures, ensure_ascii=False) + "\n")
            else:
                self.failures_file.unlink(missing_ok=True)

    def status(self) -> int | None:
        """Return the exit code left by rank 0, or None."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(read_json(self.status_file)["exit_code"])
        return None

    def leave_status(self, exit_code: int | None) -> None:
        """Set :meth:`status` of an existing run; ignore write errors."""
        with contextlib.suppress(OSError):
            if exit_code is None:
                self.status_file.unlink(missing_ok=True)
            elif self.path.is_dir():
                text = json.dumps({"exit_code": exit_code}) + "\n"
                write_atomic(self.status_file, text, tag=writer_tag())

    def record(self) -> list[dict[str, Any]]:
        """Return the lines of the record; see :func:`record.read`."""
        return record.read(self.record_file)

    def retention(self, run: Run) -> checkpoint.Retention:
        """Return the retention rule of ``run`` with the validation losses so far."""
        keep = run.checkpoint
        losses = {}
        if keep.keep_best:
            losses = {
                line["step"]: line["loss"]
                for line in self.record()
                if line.get("split") == "validation" and line["loss"] is not None
            }
        return checkpoint.Retention(keep.keep_last, keep.keep_every, keep.keep_best, losses)

    def finetuned(self, stage: str, step: int) -> list[RunDirectory]:
        """Return the runs of a table's stage on this run's checkpoint of ``step``, newest first.

        The runs are siblings (see ``studies.tables.Stage``), possibly moved together.
        """
        seed = self.path.name.rpartition("-s")[2]
        parent = self.path.parent.with_name(f"{self.path.parent.name}--{stage}")
        # init.path ends with <hash8>-s<seed>/checkpoints/step_<N>
        source = (self.path.name, self.checkpoints.name, checkpoint.step_name(step))
        runs = [
            run
            for run in map(RunDirectory, parent.glob(f"*-s{seed}"))
            if run.config_file.is_file()
            and Path(str(run.config()["init"]["path"])).parts[-3:] == source
        ]
        return sorted(runs, key=lambda run: run.config_file.stat().st_mtime_ns, reverse=True)

    def evaluation(
        self, split: str | None, overrides: Sequence[str] = (), average: int = 1
    ) -> dict[str, Any] | None:
        """Return the newest line of ``eval.jsonl`` on the latest evaluated step.

        Evaluations of another split, of another number of averaged checkpoints or with other
        ``overrides`` are ignored.
        """
        try:
            lines = record.read(self.evaluations_file)
        except ConfigError:
            return None
        wanted = {"split": split, "average": average, "overrides": list(overrides)}
        same = [line for line in lines if all(line.get(k) == v for k, v in wanted.items())]
        # max returns the first of equals: reversed, the newest line of a step
        return max(reversed(same), key=lambda line: line["step"] or 0, default=None)

    def pruning(self, step: int, stage: str) -> dict[str, Any] | None:
        """Return ``prune.json`` of a stage on the checkpoint of ``step``, or None."""
        file = self.pruned / stage / "prune.json"
        if not file.is_file():
            return None
        results = read_json(file)
        at_step = Path(results["settings"]["checkpoint"]).name == checkpoint.step_name(step)
        return results if at_step else None

    def harness_file(self, step: int, stage: str) -> Path:
        """Return ``--output_path`` of lm-evaluation-harness, which adds the date to the name."""
        return self.harness / checkpoint.step_name(step) / f"{stage}.json"

    def harness_result(self, step: int, stage: str) -> dict[str, float] | None:
        """Return ``<task>/<metric>`` -> value of a stage's newest result, or None.

        A filter of the harness other than ``none`` follows the metric after a comma.
        """
        file = self.harness_file(step, stage)
        files = sorted(file.parent.glob(f"{file.stem}_2*.json"))  # a date follows the stage
        if not files:
            return None
        tasks = read_json(files[-1]).get("results", {})
        return {
            f"{task}/{key.removesuffix(',none')}": float(value)
            for task, values in tasks.items()
            for key, value in values.items()
            if "," in key and isinstance(value, int | float)
        }

    def probes(self) -> list[dict[str, Any]]:
        """Return the lines of the probes in order.

        Raises:
            DataError: a line names no probe.
        """
        if not self.probes_file.is_file():
            return []
        lines = record.read(self.probes_file)
        for line in lines:
            if not isinstance(line.get("probe"), str):
                raise DataError(
                    f"{self.probes_file}: the line of step {line['step']} with {', '.join(line)} "
                    "names no `probe`: remove that line"
                )
        return lines

    def is_finished(self, run: Run, end: int) -> bool:
        """Return True if step ``end`` or a later one has an intact checkpoint and evaluation.

        Raises:
            CheckpointError: the run has checkpoints, and the one that it started from has changed.
        """
        if checkpoint.saved(self.checkpoints):
            origin.require_same(self.source_file, self)
        late = [path for step, path in checkpoint.saved(self.checkpoints).items() if step >= end]
        if all(checkpoint.Checkpoint(path).problem() is not None for path in late):
            return False
        if run.eval.batches == 0:
            return True
        try:
            return any(line["step"] >= end and "split" in line for line in self.record())
        except (ConfigError, DataError):
            return False

    def nothing_to_do(self, run: Run, end: int) -> str:
        """Return the line that is printed if the run has already reached step ``end``."""
        partial = f"partial (step {end} of {run.steps})"
        state = f"finished ({end} steps)" if end >= run.steps else partial
        return f"{self} is {state}: nothing to do"


def similar_directory(path: Path) -> str:
    """Return `` (did you mean …?)`` for a path that does not exist, or "" if no name is close.

    The first part of ``path`` that is missing is compared with the directories beside it.
    """
    missing = path
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    try:
        names = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()]
    except OSError:  # a directory that this user may not list
        return ""
    near = difflib.get_close_matches(missing.name, sorted(names), n=1, cutoff=0.7)
    return f" (did you mean {str(missing.parent / near[0])!r}?)" if near else ""


def find_runs(paths: Sequence[Path]) -> list[RunDirectory]:
    """Return the distinct run directories at or below ``paths``; warn of other paths."""
    runs: dict[RunDirectory, None] = {}
    problems = []
    name = RunDirectory.record_file.name
    for path in map(Path, paths):
        below = [RunDirectory(path)]
        if not below[0].record_file.is_file():
            found_below = [RunDirectory(file.parent) for file in sorted(path.rglob(name))]
            below = [run for run in found_below if not SET_ASIDE.search(run.path.name)]
        if not path.is_dir():
            hint = "" if path.exists() else similar_directory(path)
            problems.append(f"{path} is not a directory{hint}: give the directory of a run")
        elif not below:
            problems.append(f"{path} has no {name}, nor has a directory below it")
        for run in below:
            if len(paths) > 1 and SET_ASIDE.search(run.path.name):
                problems.append(f"{run} was set aside by resume=never; name it alone to see it")
            elif len(paths) > 1 and not run.record_file.stat().st_size:
                problems.append(f"{run.record_file} has no records yet")
            else:
                runs[run] = None
    if problems and not runs:
        raise ConfigError(problems)
    for problem in problems:
        warnings.warn(f"left out: {problem}", SparsePretrainWarning, stacklevel=2)
    return list(runs)


def _remove_empty(directories: Sequence[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()
