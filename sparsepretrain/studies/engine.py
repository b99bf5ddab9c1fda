"""Several runs, one table: each run in a child process, continued by the same call.

Nothing passes between the processes: what the table shows is read from the records of the runs, and
a cell is an ordinary run directory, so that what ran elsewhere is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Literal

from sparsepretrain.config import validate
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.runs import checkpoint, record
from sparsepretrain.runs.directory import RunDirectory, state_at
from sparsepretrain.studies.child import LOST, start_child
from sparsepretrain.tracking.console import Console, clock, significant
from sparsepretrain.training.signals import StopSignals

POLL_SECONDS = 0.5
"""Between two looks at the children and their records."""

GRACE_SECONDS = 5.0
"""What children get to end after a second interrupt, which asks them to drop everything."""

ROWS = 30
"""Of a table that is redrawn; of more cells only those that run or failed are shown."""

STOPPING = "stopping: what runs saves a checkpoint; another Ctrl-C ends it without"


class Stopped(SparsePretrainError):
    """A signal stopped a study, whose runs saved checkpoints: exit code of the signal."""

    label = "stopped"

    def __init__(self, code: int) -> None:
        self.exit_code = code
        super().__init__("the same command continues where this one stopped")


@dataclass(eq=False)
class Cell:
    """One run of a study, and what became of it."""

    label: str
    run: Run
    stop_after: int | None = None
    """End after so many steps; what is computed up to there is that of the whole run."""
    command: tuple[str, ...] = ()
    """Words after ``sparsepretrain`` that do the same; empty: those of this process."""
    stage_of: tuple[RunDirectory, str] | None = None
    """The run that it is a stage of, and the stage's name, where its failure is noted."""
    then: Callable[[], Iterable[Cell]] = tuple
    """The cells that it makes possible, asked for once it is finished."""
    state: Literal["waiting", "running", "finished", "partial", "stopped", "failed"] = "waiting"
    """``partial``: the run reached ``stop_after``; ``stopped``: a signal ended it before."""
    exit_code: int = 0
    """Of a failed cell; minus the number of the signal that killed it."""
    error: str = ""
    """Of a failed cell: the last line that it printed."""
    line: dict[str, Any] = field(default_factory=dict)
    """The newest training line of the record."""
    pace: float | None = None
    """Seconds per step of late."""
    begin: int = 0
    """Where what its child process prints begins in ``console.log``, in bytes."""

    @property
    def directory(self) -> RunDirectory:
        """Its run directory."""
        return RunDirectory.of(self.run)

    @property
    def end(self) -> int:
        """The last step of this cell: of the run, or ``stop_after``."""
        steps = self.run.steps
        return steps if self.stop_after is None else min(self.stop_after, steps)

    @property
    def goal(self) -> Literal["finished", "partial"]:
        """State of the cell after its last step, in the words of the reports."""
        return state_at(self.end, self.run.steps)

    @property
    def is_done(self) -> bool:
        """True if the cell reached its last step in this study or before."""
        return self.state in ("finished", "partial")

    @property
    def left(self) -> str:
        """The work left: ``finished`` or ``partial`` (none), ``from step 40`` or ``to run``."""
        if self.run.resume != "never":
            if self.directory.is_finished(self.run, self.end):
                return self.goal
            if saved := checkpoint.saved(self.directory.checkpoints):
                return f"from step {max(saved)}"
        return "to run"

    def work(self) -> Callable[[Console], int]:
        """What a child process calls, which can be pickled; returns the exit code."""
        return partial(_train, self.run.plain, self.stop_after)

    def note(self) -> None:
        """Keep in the run directory that it failed, or that it no longer does."""
        place, what = self.stage_of or (self.directory, "train")
        if self.state == "failed" or place.failures_file.exists():
            place.note_failure(what, self.exit_code, self.error)

    def look(self) -> None:
        """Read how far the run is."""
        tail = record.tail(self.directory.record_file)
        lines = [line for line in tail if "split" not in line]
        if not lines:
            return
        first, last = lines[0], lines[-1]
        flips = [line["flip_rate"] for line in lines if line.get("flip_rate") is not None]
        self.line = last | {"flip_rate": flips[-1] if flips else None}
        if last["step"] > first["step"]:
            self.pace = (last["time"] - first["time"]) / (last["step"] - first["step"])

    def row(self) -> list[str]:
        """What the table shows."""
        step, loss, flips = (self.line.get(key) for key in ("step", "loss", "flip_rate"))
        note = ""
        if self.state == "failed":
            note = f"exit code {self.exit_code}: {self.error}"
        elif self.state == "running" and self.pace is not None and step is not None:
            note = clock(max(0, self.end - step) * self.pace)
        return [
            self.label,
            self.state,
            f"{'–' if step is None else step}/{self.run.steps}",
            "–" if loss is None else significant(loss),
            "–" if flips is None else f"{flips:.1e}",
            note,
        ]


class CellError(SparsePretrainError):
    """A study cannot go on without a cell that failed: exit code of that cell."""

    def __init__(self, cell: Cell) -> None:
        self.exit_code = max(1, cell.exit_code)
        super().__init__(f"{cell.label} failed: {cell.error}; see {cell.directory.console_log}")


class Study(contextlib.AbstractContextManager["Study"]):
    """Runs cells in child processes and shows one table of all that it was given.

    Finished cells are not run again, partial ones continue, and one that fails stays as a row with
    its error while the others go on. Cells may be added as results come in::

        with Study("search", console) as study:
            study.run(cells)
            study.run([another])  # depends on what the first ones found

    Args:
        title: of the table.
        console: shows the table, redrawn on a terminal, else a line for every change.
        jobs: cells at a time; they divide the threads of the CPU among them.
        devices: entries of ``CUDA_VISIBLE_DEVICES``, of which each child sees the one that the
            fewest others use; empty: children see what this process sees.
    """

    def __init__(
        self, title: str, console: Console, *, jobs: int = 1, devices: Sequence[str] = ()
    ) -> None:
        self.title, self.jobs = title, jobs
        self._devices, self._used = devices, dict[Cell, str]()
        self.cells: list[Cell] = []
        self._console = console
        self._children: dict[Cell, ForkServerProcess] = {}
        self._begun: dict[Cell, tuple[float, int]] = {}  # time and step of those that run
        self._beside: list[float] = []  # seconds of finished cells that no step took

    def __exit__(self, *error: object) -> None:
        self._console.stop()

    def run(self, cells: Sequence[Cell]) -> None:
        """Add ``cells`` to the table and run what is left of them.

        Raises:
            Stopped: after SIGINT or SIGTERM, when every run has saved a checkpoint.
            KeyboardInterrupt: after a second SIGINT, when the children ended or were killed.
        """
        self.cells += cells
        waiting, told = list(cells), False
        with StopSignals() as signals:
            try:
                while self._children or (waiting and not told):
                    for cell in () if told else tuple(waiting):
                        # two cells of one run follow one another
                        busy = {other.directory for other in self._children}
                        if len(busy) < self.jobs and cell.directory not in busy:
                            waiting.remove(cell)
                            self._start(cell)
                            waiting[:0] = self._next(cell)
                    self._show()
                    connection.wait([c.sentinel for c in self._children.values()], POLL_SECONDS)
                    if signals.exit_code is not None and not told:
                        told = True
                        if self._children:
                            self._console.info(STOPPING)
                        self._send(signals.exit_code - 128)
                    for cell in [c for c, child in self._children.items() if not child.is_alive()]:
                        self._end(cell, stopping=told)
                        waiting[:0] = self._next(cell)
            except BaseException:
                self._kill()
                raise
            finally:
                self._show()
        if signals.exit_code is not None:
            raise Stopped(signals.exit_code)

    def _start(self, cell: Cell) -> None:
        left, log = cell.left, cell.directory.console_log
        if left == cell.goal:
            cell.state = cell.goal
            cell.look()
            cell.note()
            self._say(cell, cell.directory.nothing_to_do(cell.run, cell.end))
            return
        try:
            with cell.directory.claim():  # or another process trains it
                log.touch()
                cell.begin = log.stat().st_size
        except ConfigError as error:
            self._fail(cell, error.exit_code, f"{error.label}: {error}", note=False)
            return
        cell.state = "running"
        self._say(cell, f"{left}, {cell.end} steps; prints to {log}")
        self._show()
        environment = dict(os.environ)
        if self._devices:
            uses = Counter(self._used[other] for other in self._children)
            self._used[cell] = min(self._devices, key=lambda device: uses[device])
            environment["CUDA_VISIBLE_DEVICES"] = self._used[cell]
        cell.look()
        self._begun[cell] = time.monotonic(), cell.line.get("step", 0)
        self._children[cell] = start_child(
            cell.work(),
            family=cell.run.model.family,
            command=cell.command,
            log=str(log),
            jobs=self.jobs,
            environment=environment,
        )

    def _end(self, cell: Cell, *, stopping: bool) -> None:
        child = self._children.pop(cell)
        child.join()
        code = child.exitcode
        assert code is not None and child.pid is not None
        if code == LOST:  # it may still run, and hold the run's lock
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        cell.look()
        begun, step = self._begun.pop(cell)
        if code == 0:
            trained = (cell.line.get("step", 0) - step) * (cell.pace or 0.0)
            self._beside.append(max(0.0, time.monotonic() - begun - trained))
        if code == 0 or stopping:
            cell.state = "stopped" if code else cell.goal
            if not code:
                cell.note()
            self._say(cell, cell.state)
        elif code < 0:
            self._fail(cell, code, f"killed by {signal.Signals(-code).name}")
        else:
            said = cell.directory.console_log.read_bytes()[cell.begin :]
            lines = said.decode(errors="replace").strip().splitlines()
            self._fail(cell, code, lines[-1].strip() if lines else "no output")

    def _next(self, cell: Cell) -> list[Cell]:
        """Return the cells that ``cell`` makes possible; cells that are refused have failed."""
        found = list(cell.then()) if cell.is_done else []
        self.cells += found
        for refused in [other for other in found if other.state == "failed"]:
            self._fail(refused, refused.exit_code, refused.error)
        return [other for other in found if other.state == "waiting"]

    def _fail(self, cell: Cell, code: int, error: str, *, note: bool = True) -> None:
        cell.state, cell.exit_code, cell.error = "failed", code, error
        if note:
            cell.note()
        self._console.warn(f"{cell.label} failed ({cell.row()[-1]}); the others go on")

    def _send(self, number: int) -> None:
        for child in self._children.values():
            if child.pid is not None and child.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def _kill(self) -> None:
        """End what still runs: a second SIGINT makes a run drop everything."""
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

    def _say(self, cell: Cell, what: str) -> None:
        if not self._console.live:
            self._console.info(f"{cell.label}: {what}")

    def _show(self) -> None:
        if not self._console.live:
            return
        for cell in self._children:
            cell.look()
        self._console.redraw(self._title(), *self._table())

    def show_all(self) -> None:
        """Print the table where none was redrawn; of many cells only those that failed."""
        self._console.stop()
        if not self._console.live:
            self._console.table(self._title(), *self._table())

    def _table(self) -> tuple[list[list[str]], tuple[str, ...]]:
        shown = self.cells
        if len(shown) > ROWS:
            shown = [cell for cell in shown if cell.state in ("running", "failed")]
        return [cell.row() for cell in shown], ("run", "state", "step", "loss", "flip rate", "ETA")

    def _title(self) -> str:
        """How many cells are in which state, and the time left for all of them."""
        counts = Counter(cell.state for cell in self.cells)
        parts = [f"{counts[state]} {state}" for state in counts]
        paces = [cell.pace for cell in self.cells if cell.pace is not None]
        open_ = [cell for cell in self.cells if cell.state in ("waiting", "running")]
        if paces and open_:
            steps = sum(cell.end - cell.line.get("step", 0) for cell in open_)
            seconds = steps * sum(paces) / len(paces)
            if self._beside:  # starting and evaluating, which is most of a short run
                seconds += counts["waiting"] * sum(self._beside) / len(self._beside)
            parts.append(f"ETA {clock(seconds / self.jobs)}")
        return f"{self.title}: {', '.join(parts)}"


def _train(plain: dict[str, Any], stop_after: int | None, console: Console) -> int:
    from sparsepretrain.training.trainer import train

    return train(validate(plain), console, stop_after=stop_after)
