"""Work of one job of a cluster, called by submitit in the job: a run and its stages.

A job that is asked to save (USR2, some time before its limit) stops its run as SIGTERM does, after
a whole step and a checkpoint, and is then requeued; the same work continues where it stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from sparsepretrain.config import validate
from sparsepretrain.console import Console
from sparsepretrain.errors import PREEMPTED, SparsePretrainError
from sparsepretrain.studies import stages
from sparsepretrain.studies.cells import Cell, Part
from sparsepretrain.studies.child import run_here
from sparsepretrain.studies.progress import StudyCell
from sparsepretrain.studies.schedulers import slurm_is_running
from sparsepretrain.training.launch import Nodes, train_or_launch
from sparsepretrain.training.step import STOPS

PORT = 15000
"""Smallest port where the nodes of a job meet."""


@dataclass
class Job:
    """Trains a cell, then its stages. submitit pickles it: it holds plain values only."""

    label: str
    command: tuple[str, ...]
    plain: dict[str, Any]
    """Configuration of the run."""
    stop_after: int | None
    part: Part
    """Table of the cell, without its cells."""
    place: tuple[str, str, int, tuple[str, ...]]
    """Row, column, seed and words of the cell."""

    def cell(self, console: Console) -> StudyCell:
        """Return the cell to run."""
        run = validate(self.plain)
        row, column, seed, words = self.place
        made = StudyCell(self.label, run, self.stop_after, self.command, words=words)
        if self.part.stages:
            cell = Cell(row, column, seed, words, run)
            made.then = partial(stages.following, self.part, cell, self.label, console)
        return made

    def __call__(self) -> int:
        """Run the cell; return the exit code of the last one."""
        return work(self.cell, Stops())

    def checkpoint(self) -> Any:
        """Return what continues: the same, since runs continue from their checkpoints."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Stops:
    """Signals of a job, from here to the end of its process.

    Slurm sends USR2 to every process of the job, and its default action kills ranks and workers.
    The signal is blocked before they start, which they inherit, and one thread waits for it here.
    """

    def __init__(self) -> None:
        name = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
        self._number: signal.Signals = getattr(signal, f"SIG{name}")
        self.asked = False
        """True if the job was asked to save and to continue later."""
        self.stopping = False
        """True after this or SIGTERM."""
        self._requeue: Any = signal.getsignal(self._number)  # submitit's
        signal.signal(signal.SIGTERM, self._stop)  # submitit's ignores it
        signal.pthread_sigmask(signal.SIG_BLOCK, {self._number})
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        signal.sigwait({self._number})
        self.asked = True
        os.kill(os.getpid(), signal.SIGTERM)  # the trainer's flag, or ours between two runs

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def requeue(self) -> None:
        """Continue in another job if this one was asked to save; return if not.

        Raises:
            SparsePretrainError: the job was requeued ``max_num_timeout`` times already.
        """
        job = os.environ.get("SLURM_JOB_ID")
        # scancel and preemption end the job: requeueing would bring it back
        if not self.asked or (job is not None and not slurm_is_running(job)):
            return
        import submitit

        try:
            self._requeue(self._number, None)  # exits
        except submitit.core.utils.UncompletedJobError as error:
            text = f"{error} Raise hydra.launcher.max_num_timeout or timeout_min"
            raise SparsePretrainError(text) from error


def work(first: Callable[[Console], StudyCell], stops: Stops) -> int:
    """Run a cell and those that follow; requeue the job if it was asked to save."""
    console = Console(sys.stdout)
    node = int(os.environ.get("SLURM_NODEID", "0"))
    nodes = nodes_of_job()
    try:
        waiting = [first(console)]
    except SparsePretrainError as error:
        console.info(f"{error.label}: {error}")
        return error.exit_code
    code = 0
    while waiting and not stops.stopping:
        cell = waiting.pop(0)
        if cell.state == "failed":
            cell.note()
            continue
        if cell.left == cell.goal:
            cell.state = cell.goal
            if node == 0:
                cell.note()
        elif node == 0:
            train = partial(_train, cell, nodes) if type(cell) is StudyCell else None
            code = run_here(cell, train)
            console.info(f"{cell.label}: {cell.state}, exit code {code}")
        else:
            _follow(cell, nodes, stops)
        if code in STOPS:
            break
        if cell.state == cell.goal:
            waiting[:0] = list(cell.then())
    if code in STOPS or stops.stopping:
        code = PREEMPTED
        try:
            stops.requeue()
        except SparsePretrainError as error:
            cell.state, cell.exit_code, cell.error = "failed", PREEMPTED, str(error)
            cell.note()
            raise
    return code


def _train(cell: StudyCell, nodes: Nodes, console: Console) -> int:
    code = train_or_launch(cell.run, console, cell.stop_after, nodes)
    # ranks on other nodes may fail first: rank 0 says how the run ended
    left = cell.directory.status() if nodes.count > 1 else None
    return code if left is None else left


def _follow(cell: StudyCell, nodes: Nodes, stops: Stops) -> None:
    """Launch the ranks of this node, or wait until the first node has done the rest."""
    if type(cell) is StudyCell:
        try:
            train_or_launch(cell.run, Console.silent(), cell.stop_after, nodes)
        except SparsePretrainError:
            return  # the first node reports
    directory, stage = cell.stage_of or (cell.directory, "train")
    while cell.left != cell.goal and stage not in directory.failures() and not stops.stopping:
        time.sleep(1.0)
        if cell.directory.status() in STOPS:
            return
    cell.state = cell.goal if cell.left == cell.goal else "failed"


def nodes_of_job() -> Nodes:
    """Return the machines of this job."""
    count = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if count == 1:
        return Nodes()
    import submitit

    head = submitit.JobEnvironment().hostnames[0]
    # two jobs can have the same first machine
    port = PORT + int(os.environ["SLURM_JOB_ID"]) % PORT
    return Nodes(count, f"{head}:{port}")
