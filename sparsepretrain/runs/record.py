"""metrics.jsonl, the record of a run: one strict JSON object per line, each step once.

A line is ``{"step", "time", "tokens", "loss", "lr", "grad_norm", "flip_rate", "density", …}``.
Evaluation lines also have ``"split"``; values of a layer have flat keys (``flip_rate/<layer>``).

``flip_rate`` is the mean over the mask comparisons since the previous line (for a layer: since the
last line with layers), ``flip_rate_last`` the last comparison's. ``flip_interval`` is the number of
steps between compared masks if above one; each such comparison has its own line. ``mfu_dense``
counts sparse matmuls as dense.
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
    """Append-only record; each line is handed to the operating system on return.

    Args:
        file: path of the record; its directory is created if missing.
        resume_step: step of the checkpoint to resume from; later lines and a torn last line are
            dropped. None: start an empty record.
    """

    def __init__(self, file: Path, *, resume_step: int | None) -> None:
        self.path = file
        self._last: dict[tuple[Any, ...], int] = {}
        before = 0.0  # seconds of training before a resume
        text = io.StringIO()  # parsed lines would take ten times the memory
        self.lines = 0
        """Number of lines in the file."""
        for line in read_lines(file) if resume_step is not None and file.exists() else ():
            if line["step"] <= resume_step:
                text.write(_dump(line))
                self.lines += 1
                self._last[_stream(line)] = line["step"]
                before = max(before, line.get("time") or 0.0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, text.getvalue())
            # unbuffered: kill -9 tears at most the last line
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"run directory {self.path.parent} is not writable ({error.strerror}): "
                "choose another with runs_dir=DIR"
            ) from error
        self._start = time.monotonic() - before

    def write(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Append one line, unless its split or probe has a line of this or a later step.

        Args:
            record: int ``step``, and numbers (0-d tensors and NumPy scalars too), strings,
                booleans or None. NaN and ±inf become null. ``time`` defaults to the seconds of
                training, those before a resume included.

        Returns:
            The written line, or None if nothing was written.
        """
        values = {key: _plain(key, value) for key, value in record.items()}
        step = values["step"]
        stream = _stream(values)
        if step <= self._last.get(stream, -1):
            return None
        line = {"step": step, "time": round(time.monotonic() - self._start, 3), **values}
        data = _dump(line).encode()
        try:
            # an unbuffered write to a disk that becomes full writes a part and raises nothing
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._last[stream] = step
        self.lines += 1
        return line

    def close(self) -> None:
        """Close the file; repeated calls are allowed."""
        self._file.close()


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a record in order, without a torn last line."""
    return list(read_lines(file))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record in order, without a torn last line."""
    if not file.is_file():
        raise ConfigError(f"{file.parent} has no {file.name}: give the directory of a run")
    wrong = 0  # number of the first bad line; allowed at the end
    try:
        with file.open("rb") as stream:  # bytes: a torn write may end inside a character
            for number, text in enumerate(stream, start=1):
                if wrong and text.strip():
                    raise DataError(f"{file}, line {wrong} is not a JSON record: remove that line")
                record = None
                with contextlib.suppress(ValueError):
                    record = parse_json(text)
                step = None if record is None else record.get("step")
                if record is not None and isinstance(step, int) and 0 <= step < 2**53:
                    yield record
                else:
                    wrong = wrong or number
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def tail(file: Path, size: int = 1 << 18) -> list[dict[str, Any]]:
    """Return the lines in the last ``size`` bytes of a record that may be growing."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            texts = stream.read().split(b"\n")
    except OSError:
        return []
    records = []
    for text in texts:
        with contextlib.suppress(ValueError):  # the first and the last line may be incomplete
            records.append(parse_json(text))
    return [line for line in records if "step" in line]


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n"


def _stream(line: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a sequence with one line per step: training, a split, or a probe."""
    return line.get("split"), line.get("probe")


def _plain(key: str, value: Any) -> Any:
    """Convert ``value`` to strict JSON."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"record key {key!r} holds a {type(value).__name__}, not a number or string")
