"""Stream of metrics: record, console and mirrors.

The record is written before :meth:`Stream.log` returns. W&B and TensorBoard are mirrors in threads:
a missing, slow or failing mirror never stops or slows a run.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.record import Record, read_lines
from sparsepretrain.tracking.wandb import Place, WeightsAndBiases

CLOSING_SECONDS = 10.0
"""Seconds that :meth:`Stream.close` waits for all mirrors; W&B keeps unsent data on disk."""


class Stream:
    """Sends every record to metrics.jsonl, the console and the mirrors of ``run.tracker``."""

    def __init__(
        self,
        directory: RunDirectory,
        run: Run,
        *,
        resume_step: int | None,
        console: Console,
        total: int,
        mirrors: list[Mirror] | None = None,
    ) -> None:
        self.record = Record(directory.record_file, resume_step=resume_step)
        self._resume_step = resume_step
        self._console = console
        self._total = total
        if mirrors is None:
            mirrors = []
            path = directory.path
            config = run.plain
            if run.tracker.mode != "disabled":
                place = Place.of(run, path.name)
                mirrors.append(
                    WeightsAndBiases(path, run.tracker, config, place, resume_step, self._earlier)
                )
            if run.tracker.tensorboard:
                mirrors.append(TensorBoard(path, config, resume_step, self._earlier))
        self._lanes = [Lane(mirror, console.warn) for mirror in mirrors]

    def log(self, record: dict[str, Any]) -> None:
        """Record a step (see :meth:`Record.write`); a recorded step is skipped.

        Mirrors get its numbers under the names of :func:`mirrored`.
        """
        line = self.record.write(record)
        if line is None:
            return
        self._console.step(line, self._total)
        for lane in self._lanes:
            lane.offer(line["step"], mirrored(line))

    def _earlier(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield step and values of the lines before a resume."""
        for line in read_lines(self.record.path):
            if self._resume_step is not None and line["step"] <= self._resume_step:
                yield line["step"], mirrored(line)

    def close(self, exit_code: int, summary: dict[str, Any] | None = None) -> None:
        """Close record and mirrors in about 10 s at most; further calls have no effect."""
        self.record.close()
        self._console.stop()
        deadline = time.monotonic() + CLOSING_SECONDS
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.finish(exit_code, summary or {}, deadline=deadline)


AXES = ("tokens", "time")
"""Keys of the record to plot against; they belong to no section."""

SECTIONS = {
    "train": ("loss", "lr", "grad_norm", "skipped", "cross_entropy", "kl", "router_loss"),
    "speed": ("tokens_per_second", "data_wait", "mfu_dense"),
}
"""Section of mirrors -> keys of training lines; all others are in ``sparsity``, as a method of a
plug-in may name its metrics freely."""


def mirrored(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the record under the names that mirrors show.

    Mirrors draw a section of panels per prefix: ``train/loss``, ``sparsity/flip_rate``,
    ``speed/tokens_per_second``, ``layers/flip_rate/<layer>``, and ``<split>/<key>`` of an
    evaluation. ``tokens`` and ``time`` keep their names. The line of an evaluation has no time: at
    the same step it would replace that of training.
    """
    split = line.get("split")
    values = {}
    for key, value in line.items():
        if key in ("step", "split") or not isinstance(value, int | float):
            continue
        if key not in AXES:
            values[f"{split or _section(key)}/{key}"] = value
        elif split is None or key == "tokens":
            values[key] = value
    return values


def _section(key: str) -> str:
    if "/" in key:
        return "layers"
    return next((name for name, keys in SECTIONS.items() if key in keys), "sparsity")


Earlier = Callable[[], Iterable[tuple[int, dict[str, float]]]]
"""Returns steps and values from before a resume. A killed process may not have written all of them
to a mirror that buffers, so a new file of the mirror gets them all."""


class Mirror(Protocol):
    """Tracker; all methods are called in one thread, not the main one."""

    name: str
    """Name in warnings."""

    def open(self) -> str | None:
        """Import the package, connect and send the configuration; may return a warning."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the values of one step."""

    def close(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Send the summary and finish."""


@dataclass
class TensorBoard:
    """Event files in ``run_dir/tensorboard``; the newest one holds the whole run."""

    run_dir: Path
    config: dict[str, Any]
    resume_step: int | None
    earlier: Earlier = tuple
    name: str = "TensorBoard"

    def open(self) -> None:
        import tensorboard  # noqa: F401  (torch's own message does not name the package)
        from torch.utils.tensorboard import SummaryWriter

        purge = None if self.resume_step is None else 0  # hides all points of earlier files
        self._writer = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge)
        self._text("config", self.config)
        for step, values in self.earlier():
            self.log(step, values)

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._text("summary", {"exit_code": exit_code, **summary})
        self._writer.close()

    def _text(self, tag: str, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, default=str)
        self._writer.add_text(tag, f"```json\n{text}\n```")


class Lane(threading.Thread):
    """Runs a mirror behind a queue; a failing one is dropped with one warning."""

    def __init__(self, mirror: Mirror, warn: Callable[[str], None]) -> None:
        super().__init__(name=f"tracker {mirror.name}", daemon=True)
        self._mirror = mirror
        self._warn = warn
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._ending: tuple[int, dict[str, Any]] = (0, {})
        self._dropped = False
        self.start()

    def offer(self, step: int, values: dict[str, float]) -> None:
        """Queue a record without waiting."""
        if not self._dropped:
            self._queue.put((step, values))

    def finish(self, exit_code: int, summary: dict[str, Any], *, deadline: float) -> None:
        """Let the mirror send queued records and close until ``deadline`` (monotonic)."""
        self._ending = (exit_code, summary)
        self._queue.put(None)
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            self._drop("did not finish in time")

    def run(self) -> None:
        try:
            if note := self._mirror.open():
                self._warn(f"{self._mirror.name} {note}")
            while (item := self._queue.get()) is not None:
                self._mirror.log(*item)
            self._mirror.close(*self._ending)
        except ImportError as error:
            package = (error.name or self._mirror.name).partition(".")[0]
            self._drop(f"needs the package {package}, which is not installed")
        except Exception as error:  # a run must survive all errors of third parties
            first = next(iter(str(error).splitlines()), "")
            self._drop(f"failed ({type(error).__name__}{': ' if first else ''}{first})")

    def _drop(self, reason: str) -> None:
        if not self._dropped:
            self._dropped = True
            self._warn(f"{self._mirror.name} {reason}; metrics.jsonl stays complete")
