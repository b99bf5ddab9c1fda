"""metrics.jsonl, the record of a run: one strict JSON object per line, never a step twice.

A line is ``{"step", "time", "tokens", "loss", "lr", "grad_norm", "flip_rate", "density", …}``.
Evaluation lines also carry ``"split"``; values of a layer have flat keys (``flip_rate/<layer>``).

``flip_rate`` is the mean over the comparisons of masks since the line before (of a layer: since the
last line with layers), ``flip_rate_last`` that of the last comparison alone, and ``flip_interval``
the steps between two compared masks where that is more than one: such comparisons have a line each.
``mfu_dense`` counts every product as dense, also those that a method makes sparse; so did ``mfu``,
its name in older records, whose ``flip_rate`` was that of the last comparison.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsepretrain.errors import ConfigError, DataError, cannot_write
from sparsepretrain.files import parse_json, write_atomic


class Record:
    """Appends to a record; every line is with the operating system on return.

    Args:
        file: of the run; its directory is created when missing.
        resume_step: the last completed step of the checkpoint that the run continues from. Lines
            of later steps are cut off, a torn last line is dropped. None: an empty record.

    Raises:
        ConfigError: the directory is not writable.
        DataError: a line of the record that is continued is not JSON.
    """

    def __init__(self, file: Path, *, resume_step: int | None) -> None:
        self.path = file
        self._last: dict[tuple[Any, ...], int] = {}
        self._before = 0.0
        kept = io.StringIO()  # not the lines as objects, which are ten times as large
        self.lines = 0
        """Lines in the file."""
        for line in _lines(file) if resume_step is not None and file.exists() else ():
            if line["step"] <= resume_step:
                kept.write(_dump(line))
                self.lines += 1
                self._last[_stream(line)] = line["step"]
                self._before = max(self._before, line.get("time") or 0.0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, kept.getvalue())
            # unbuffered: one write call per line, so that kill -9 tears at most the last one
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path.parent} is not writable ({error.strerror}): "
                "choose another with runs_dir=DIR"
            ) from error
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._before + time.monotonic() - self._start

    def write(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Append one record.

        Args:
            record: has an int ``step``; values are numbers (0-d tensors and NumPy scalars too),
                strings, booleans or None. NaN and ±inf are written as null, since JSON has neither.
                ``time`` is filled in with :attr:`seconds` unless given.

        Returns:
            The line as written, or None when one of this split or probe reached this step before:
            nothing is written then.

        Raises:
            SparsePretrainError: the line could not be written; a CheckpointError on a full disk.
        """
        values = {key: _plain(key, value) for key, value in record.items()}
        step, stream = values["step"], _stream(values)
        if step <= self._last.get(stream, -1):
            return None
        line = {"step": step, "time": round(self.seconds, 3), **values}
        data = _dump(line).encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._last[stream] = step
        self.lines += 1
        return line

    def close(self) -> None:
        """Close the file; calling it again is harmless."""
        self._file.close()


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a record in order; a torn last line is left out.

    Raises:
        ConfigError: there is no such file.
        DataError: a line before the last is not a JSON record.
    """
    return list(_lines(file))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """What :func:`read` returns, line by line."""
    if not file.is_file():
        raise ConfigError(f"{file.parent} has no {file.name}: give the directory of a run")
    wrong = 0  # number of the first line that is no record; harmless where nothing follows
    try:
        with file.open("rb") as stream:  # bytes: a torn write may end inside a character
            for number, text in enumerate(stream, start=1):
                if wrong and text.strip():
                    raise DataError(f"{file}, line {wrong} is not a JSON record: remove that line")
                record = None
                with contextlib.suppress(ValueError):
                    record = parse_json(text, dict)
                step = None if record is None else record.get("step")
                if record is not None and isinstance(step, int) and 0 <= step < 2**53:
                    yield record
                else:
                    wrong = wrong or number
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def tail(file: Path, size: int = 1 << 18) -> list[dict[str, Any]]:
    """The newest lines of a record that another process may be writing: those in ``size`` bytes."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            texts = stream.read().split(b"\n")
    except OSError:
        return []
    records = []
    for text in texts:
        with contextlib.suppress(ValueError):  # the first and the last may be a part of a line
            records.append(parse_json(text, dict))
    return [line for line in records if "step" in line]


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n"


def _stream(line: dict[str, Any]) -> tuple[Any, ...]:
    """What has one line per step: training, a split, a probe."""
    return line.get("split"), line.get("probe")


def _plain(key: str, value: Any) -> Any:
    """``value`` as strict JSON can hold it."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"record key {key!r} holds a {type(value).__name__}, not a number or string")
