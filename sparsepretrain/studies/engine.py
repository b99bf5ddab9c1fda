"""Run several runs as one table, each in a child process; the same call continues a study.

Processes share no state: the parent reads the records of the runs. A cell is an ordinary run
directory, so runs trained elsewhere count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Literal

from sparsepretrain.config import validate
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console, clock, significant
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.runs import checkpoint, record
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.child import start_child
from sparsepretrain.training.launch import train_or_launch
from sparsepretrain.training.stopping import StopSignals

POLL_SECONDS = 0.5
"""Seconds between two polls of the children and their records."""

GRACE_SECONDS = 5.0
"""Seconds that children have to end after a second interrupt."""

ROWS = 30
"""Maximum cells shown; larger tables show running and failed cells only."""

STOPPING = (
    "stopping: running cells save a checkpoint; press Ctrl-C again to end them without saving"
)


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
    state: Literal["waiting", "running", "finished", "partial", "stopped", "failed"] = "waiting"
    """``partial``: the run reached ``stop_after``; ``stopped``: a signal ended the run before."""
    exit_code: int = 0
    """Exit code of a failed cell; negative signal number if killed."""
    error: str = ""
    """Last line that a failed cell printed."""
    line: dict[str, Any] = field(default_factory=dict)
    """Newest training line of the record."""
    pace: float | None = None
    """Recent seconds per step."""

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
    if cell.state == "failed":
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


class Study(contextlib.AbstractContextManager["Study"]):
    """Runs cells in child processes and shows them in one table.

    Finished cells are skipped, partial ones continue, and a failed one stays as a row with its
    error while the other runs continue.

    ``jobs`` cells at a time divide the threads of the CPU. Of ``devices``, entries of
    ``CUDA_VISIBLE_DEVICES``, each child sees the least used, one per rank; cells share a device
    only if there are more jobs than devices. Without ``devices``, children see all of this process.
    """

    def __init__(
        self, title: str, console: Console, *, jobs: int = 1, devices: Sequence[str] = ()
    ) -> None:
        self.title = title
        self.jobs = jobs
        self._devices = devices
        self._used = dict[StudyCell, list[str]]()
        self.cells: list[StudyCell] = []
        self._console = console
        self._children: dict[StudyCell, ForkServerProcess] = {}

    def __exit__(self, *error: object) -> None:
        self._console.stop()

    def run(self, cells: Sequence[StudyCell]) -> None:
        """Run the remaining work of ``cells`` and show them in a table.

        Raises:
            Stopped: after SIGINT or SIGTERM, when every run has saved a checkpoint.
            KeyboardInterrupt: after a second SIGINT, when the children ended or were killed.
        """
        self.cells = [*cells]
        waiting = list(cells)
        stopping = False
        with StopSignals() as signals:
            try:
                while self._children or (waiting and not stopping):
                    for cell in () if stopping else tuple(waiting):
                        if len(self._children) >= self.jobs:
                            break
                        # Two cells of the same run share its directory: run one after the other.
                        if any(cell.directory == other.directory for other in self._children):
                            continue
                        if (devices := self._free_devices(cell)) is not None:
                            waiting.remove(cell)
                            self._start(cell, devices)
                            waiting[:0] = self._next(cell)
                    self._show()
                    connection.wait([c.sentinel for c in self._children.values()], POLL_SECONDS)
                    if signals.exit_code is not None and not stopping:
                        stopping = True
                        if self._children:
                            self._console.info(STOPPING)
                        self._send(signals.exit_code - 128)
                    for cell in [c for c, child in self._children.items() if not child.is_alive()]:
                        self._end(cell, stopping=stopping)
                        waiting[:0] = self._next(cell)
            except BaseException:
                self._kill()
                raise
            finally:
                self._show()
        if signals.exit_code is not None:
            raise Stopped(signals.exit_code)

    def _free_devices(self, cell: StudyCell) -> list[str] | None:
        """Return the least used devices for ``cell``, or None if too few are free."""
        uses = Counter(device for other in self._children for device in self._used[other])
        most = -(-self.jobs // max(1, len(self._devices)))
        free = [device for device in self._devices if uses[device] < most]
        count = min(cell.devices, len(self._devices))  # a stage that needs more fails in its child
        return sorted(free, key=uses.__getitem__)[:count] if count <= len(free) else None

    def _start(self, cell: StudyCell, devices: list[str]) -> None:
        left = cell.left
        log = cell.directory.console_log
        if left == cell.goal:
            cell.state = cell.goal
            cell.look()
            cell.note()
            self._say(cell, cell.directory.nothing_to_do(cell.run, cell.end))
            return
        try:
            with cell.directory.claim():  # refused if another process trains the run
                log.touch()
        except ConfigError as error:
            self._fail(cell, error.exit_code, f"{error.label}: {error}", note=False)
            return
        cell.state = "running"
        self._say(cell, f"{left}, {cell.end} steps; prints to {log}")
        self._show()
        environment = dict(os.environ)
        self._used[cell] = devices
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        cell.look()
        self._children[cell] = start_child(
            cell.work(),
            family=cell.run.model.family,
            command=cell.command,
            log=str(log),
            jobs=self.jobs,
            environment=environment,
        )

    def _end(self, cell: StudyCell, *, stopping: bool) -> None:
        child = self._children.pop(cell)
        child.join()
        code = child.exitcode
        assert code is not None
        cell.look()
        if code == 0 or stopping:
            cell.state = "stopped" if code else cell.goal
            if not code:
                cell.note()
            self._say(cell, cell.state)
        elif code < 0:
            self._fail(cell, code, f"killed by {signal.Signals(-code).name}")
        else:
            lines = cell.directory.console_log.read_text(errors="replace").split("\n")
            self._fail(cell, code, next((x.strip() for x in lines[::-1] if x.strip()), "no output"))

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

    def _send(self, number: int) -> None:
        for child in self._children.values():
            if child.pid is not None and child.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def _kill(self) -> None:
        """End all children; a second SIGINT ends a run without saving."""
        try:
            self._send(signal.SIGINT)
            deadline = time.monotonic() + GRACE_SECONDS
            for child in self._children.values():
                child.join(max(0.0, deadline - time.monotonic()))
        finally:
            for cell, child in self._children.items():
                child.kill()
                child.join()
                cell.state = "stopped"
            self._children.clear()

    def _say(self, cell: StudyCell, what: str) -> None:
        if not self._console.live:
            self._console.info(f"{cell.label}: {what}")

    def _show(self) -> None:
        if not self._console.live:
            return
        for cell in self._children:
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
            shown = [cell for cell in shown if cell.state in ("running", "failed")]
        return [_row(cell) for cell in shown], ("run", "state", "step", "loss", "flip rate", "ETA")

    def _title(self) -> str:
        """Return the number of cells in each state and the remaining time."""
        counts = Counter(cell.state for cell in self.cells)
        parts = [f"{counts[state]} {state}" for state in counts]
        paces = [cell.pace for cell in self.cells if cell.pace is not None]
        open_ = [cell for cell in self.cells if cell.state in ("waiting", "running")]
        if paces and open_:
            steps = sum(cell.end - cell.line.get("step", 0) for cell in open_)
            seconds = steps * sum(paces) / len(paces)
            parts.append(f"ETA {clock(seconds / self.jobs)}")
        return f"{self.title}: {', '.join(parts)}"


def _train(plain: dict[str, Any], stop_after: int | None, console: Console) -> int:
    return train_or_launch(validate(plain), console, stop_after)
