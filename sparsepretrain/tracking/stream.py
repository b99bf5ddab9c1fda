"""Stream of metrics: record, console and mirrors.

The record is written before :meth:`Stream.log` returns. W&B and TensorBoard are mirrors in threads:
a missing, slow or failing mirror never stops or slows a run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sparsepretrain.config.groups import Tracker
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.record import Record
from sparsepretrain.tracking.console import Console
from sparsepretrain.tracking.mirror import Lane, Mirror, TensorBoard
from sparsepretrain.tracking.wandb import WeightsAndBiases

CLOSING_SECONDS = 10.0
"""Seconds that :meth:`Stream.close` waits for all mirrors; W&B keeps unsent data on disk."""


class Stream:
    """Sends every record to metrics.jsonl, the console and the mirrors of ``tracker``."""

    def __init__(
        self,
        run_dir: Path,
        tracker: Tracker,
        *,
        config: dict[str, Any],
        run_name: str,
        resume_step: int | None,
        console: Console,
        mirrors: list[Mirror] | None = None,
        total: int | None = None,
    ) -> None:
        self.record = Record(RunDirectory(run_dir).record_file, resume_step=resume_step)
        self._console = console
        self._total = config.get("steps") if total is None else total
        if mirrors is None:
            mirrors = []
            if tracker.mode != "disabled":
                mirrors.append(WeightsAndBiases(run_dir, tracker, config, run_name, resume_step))
            if tracker.tensorboard:
                mirrors.append(TensorBoard(run_dir, config, resume_step))
        self._lanes = [Lane(mirror, console.warn) for mirror in mirrors]

    def log(self, record: dict[str, Any]) -> None:
        """Record a step (see :meth:`Record.write`); a recorded step is skipped."""
        line = self.record.write(record)
        if line is None:
            return
        self._console.step(line, self._total)
        values = values_of(line)
        for lane in self._lanes:
            lane.offer(line["step"], values)

    def close(self, exit_code: int, summary: dict[str, Any] | None = None) -> None:
        """Close record and mirrors in about 10 s at most; further calls have no effect."""
        self.record.close()
        self._console.stop()
        deadline = time.monotonic() + CLOSING_SECONDS
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.finish(exit_code, summary or {}, deadline=deadline)


def values_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line; keys of an evaluation become ``<split>/<key>``."""
    prefix = f"{line['split']}/" if "split" in line else ""
    skipped = ("step", "split") if not prefix else ("step", "split", "time", "tokens")
    return {
        prefix + key: value
        for key, value in line.items()
        if key not in skipped and isinstance(value, int | float)
    }
