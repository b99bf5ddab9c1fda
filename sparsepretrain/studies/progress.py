"""Cells of a study, their states, and the table that shows them.

Processes share no state: the table reads the records of the runs. A cell is an ordinary run
directory, so runs trained elsewhere count.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from sparsepretrain.config import validate
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console, clock, significant
from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.runs import checkpoint, record
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.training.launch import train_or_launch

ROWS = 30
"""Maximum cells shown; larger tables show running and failed cells only."""


class Stopped(SparsePretrainError):
    """Signal that stopped a study after its runs saved checkpoints: exit code of the signal."""

    label = "stopped"

    def __init__(self, code: int) -> None:
        self.exit_code = code
        super().__init__("the same command continues where this one stopped")


@dataclass(eq=False)
class StudyCell:
    """Run of a study and its state."""

    label: str
    run: Run
    stop_after: int | None = None
    """Step of the run after which this cell ends early, or None."""
    command: tuple[str, ...] = ()
    """Equivalent words after ``sparsepretrain``; empty: the words of this process."""
    stage_of: tuple[RunDirectory, str] | None = None
    """Run and name of a stage, where its failure is recorded."""
    then: Callable[[], Iterable[StudyCell]] = tuple
    """Cells that follow, requested once this one is finished."""
    state: Literal[
        "waiting", "queued", "running", "finished", "partial", "stopped", "canceled", "failed"
    ] = "waiting"
    """``queued``: a job of a cluster waits; ``partial``: the run reached ``stop_after``;
    ``stopped``: a signal ended the run before; ``canceled``: a job was ended for good."""
    exit_code: int = 0
    """Exit code of a failed cell; negative signal number if killed."""
    error: str = ""
    """Last line that a failed cell printed."""
    line: dict[str, Any] = field(default_factory=dict)
    """Newest training line of the record."""
    pace: float | None = None
    """Recent seconds per step."""
    words: tuple[str, ...] = ()
    """All overrides of the run."""
    key: str = ""
    """Name in the list of jobs; empty: the words."""

    @cached_property
    def directory(self) -> RunDirectory:
        """Run directory."""
        return RunDirectory.of(self.run)

    @property
    def end(self) -> int:
        """Last step of this cell: of the run, or ``stop_after``."""
        steps = self.run.steps
        return steps if self.stop_after is None else min(self.stop_after, steps)

    @property
    def goal(self) -> Literal["finished", "partial"]:
        """State after the last step, in the words of the reports."""
        return "finished" if self.end >= self.run.steps else "partial"

    @property
    def left(self) -> str:
        """Remaining work: ``finished`` or ``partial`` (none), ``from step 40`` or ``to run``."""
        if self.run.resume != "never":
            if self.directory.is_finished(self.run, self.end):
                return self.goal
            if saved := checkpoint.saved(self.directory.checkpoints):
                return f"from step {max(saved)}"
        return "to run"

    @property
    def extent(self) -> str:
        """Length of the work in words."""
        return f"{self.end} steps"

    @property
    def devices(self) -> int:
        """Number of GPUs, one without ``parallel.nproc``; 0 on the CPU."""
        return 0 if self.run.parallel.device == "cpu" else self.run.nproc

    def work(self) -> Callable[[Console], int]:
        """Return the picklable function that a child process calls; it returns the exit code."""
        return partial(_train, self.run.plain, self.stop_after)

    def note(self) -> None:
        """Record the failure of the cell in the run directory, or clear an earlier one."""
        directory, stage = self.stage_of or (self.directory, "train")
        if self.state == "failed" or directory.failures_file.exists():
            directory.note_failure(stage, self.exit_code, self.error)

    def look(self) -> None:
        """Read the progress of the run."""
        tail = record.tail(self.directory.record_file)
        lines = [line for line in tail if "split" not in line]
        if not lines:
            return
        first = lines[0]
        last = lines[-1]
        flips = [line["flip_rate"] for line in lines if line.get("flip_rate") is not None]
        self.line = last | {"flip_rate": flips[-1] if flips else None}
        if last["step"] > first["step"]:
            self.pace = (last["time"] - first["time"]) / (last["step"] - first["step"])


def _row(cell: StudyCell) -> list[str]:
    """Return the row of a cell in the table."""
    step, loss, flips = (cell.line.get(key) for key in ("step", "loss", "flip_rate"))
    note = ""
    if cell.state == "canceled":
        note = cell.error
    elif cell.state == "failed":
        note = f"exit code {cell.exit_code}: {cell.error}"
    elif cell.state == "running" and cell.pace is not None and step is not None:
        note = clock(max(0, cell.end - step) * cell.pace)
    return [
        cell.label,
        cell.state,
        f"{'–' if step is None else step}/{cell.run.steps}",
        "–" if loss is None else significant(loss),
        "–" if flips is None else f"{flips:.1e}",
        note,
    ]


class Progress(contextlib.AbstractContextManager["Progress"], ABC):
    """Cells that run somewhere, shown in one table. Subclasses say where and run them.

    Finished cells are skipped, partial ones continue, and a failed one stays as a row with its
    error while the other runs continue.

    Args:
        title: first words above the table.
        console: shows the table; redrawn on a terminal.
        jobs: number of cells at a time, for the remaining time.
    """

    def __init__(self, title: str, console: Console, *, jobs: int = 1) -> None:
        self.title = title
        self.jobs = jobs
        self.cells: list[StudyCell] = []
        self._console = console

    def __exit__(self, *error: object) -> None:
        self._console.stop()

    @abstractmethod
    def run(self, cells: Sequence[StudyCell]) -> None:
        """Run the remaining work of ``cells`` and show them in a table.

        Raises:
            Stopped: the cells are not done, and the same command continues.
        """

    def _is_done(self, cell: StudyCell) -> bool:
        """Return True for a cell without remaining work, and say so."""
        if cell.left != cell.goal:
            return False
        cell.state = cell.goal
        cell.look()
        cell.note()
        self._say(cell, cell.directory.nothing_to_do(cell.run, cell.end))
        return True

    def _next(self, cell: StudyCell) -> list[StudyCell]:
        """Add the cells that follow ``cell``; return those that wait to run and fail the others."""
        following = list(cell.then()) if cell.state == cell.goal else []
        self.cells += following
        for refused in [other for other in following if other.state == "failed"]:
            self._fail(refused, refused.exit_code, refused.error)
        return [other for other in following if other.state == "waiting"]

    def _fail(self, cell: StudyCell, code: int, error: str, *, note: bool = True) -> None:
        cell.state = "failed"
        cell.exit_code = code
        cell.error = error
        if note:
            cell.note()
        self._console.warn(f"{cell.label} failed ({_row(cell)[-1]}); the other runs continue")

    def _say(self, cell: StudyCell, what: str) -> None:
        if not self._console.live:
            self._console.info(f"{cell.label}: {what}")

    def _show(self) -> None:
        if not self._console.live:
            return
        for cell in self.cells:
            if cell.state == "running":
                cell.look()
        self._console.table(self._title(), *self._table(), redraw=True)

    def show_all(self) -> None:
        """Print the table unless a terminal shows it already."""
        self._console.stop()
        rows, header = self._table()
        if not rows:  # many cells, all finished
            self._console.info(self._title())
        elif not self._console.live:
            self._console.table(self._title(), rows, header)

    def _table(self) -> tuple[list[list[str]], tuple[str, ...]]:
        shown = self.cells
        if len(shown) > ROWS:
            shown = [cell for cell in shown if cell.state in ("running", "canceled", "failed")]
        return [_row(cell) for cell in shown], ("run", "state", "step", "loss", "flip rate", "ETA")

    def _title(self) -> str:
        """Return the number of cells in each state and the remaining time."""
        counts = Counter(cell.state for cell in self.cells)
        parts = [f"{counts[state]} {state}" for state in counts]
        paces = [cell.pace for cell in self.cells if cell.pace is not None]
        open_ = [cell for cell in self.cells if cell.state in ("waiting", "queued", "running")]
        if paces and open_:
            steps = sum(cell.end - cell.line.get("step", 0) for cell in open_)
            seconds = steps * sum(paces) / len(paces)
            parts.append(f"ETA {clock(seconds / self.jobs)}")
        return f"{self.title}: {', '.join(parts)}"


def _train(plain: dict[str, Any], stop_after: int | None, console: Console) -> int:
    return train_or_launch(validate(plain), console, stop_after)
