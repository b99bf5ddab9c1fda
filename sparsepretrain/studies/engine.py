"""Run the cells of a study on this machine, each in a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.child import start_child
from sparsepretrain.studies.progress import Progress, Stopped, StudyCell
from sparsepretrain.training.stopping import StopSignals

POLL_SECONDS = 0.5
"""Seconds between two polls of the children and their records."""

GRACE_SECONDS = 5.0
"""Seconds that children have to end after a second interrupt."""

STOPPING = (
    "stopping: running cells save a checkpoint; press Ctrl-C again to end them without saving"
)


class Study(Progress):
    """Runs cells in child processes.

    ``jobs`` cells at a time divide the threads of the CPU. Of ``devices``, entries of
    ``CUDA_VISIBLE_DEVICES``, each child sees the least used, one per rank; cells share a device
    only if there are more jobs than devices. Without ``devices``, children see all of this process.
    """

    def __init__(
        self, title: str, console: Console, *, jobs: int = 1, devices: Sequence[str] = ()
    ) -> None:
        super().__init__(title, console, jobs=jobs)
        self._devices = devices
        self._used = dict[StudyCell, list[str]]()
        self._children: dict[StudyCell, ForkServerProcess] = {}

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
        if self._is_done(cell):
            return
        left = cell.left
        log = cell.directory.console_log
        try:
            with cell.directory.claim():  # refused if another process trains the run
                log.touch()
        except ConfigError as error:
            self._fail(cell, error.exit_code, f"{error.label}: {error}", note=False)
            return
        cell.state = "running"
        self._say(cell, f"{left}, {cell.extent}; prints to {log}")
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
