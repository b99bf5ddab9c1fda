"""Run the cells of a study as jobs of a cluster, or of this machine, that outlive the command.

The same command watches jobs that are still there and submits what has none. Which cell has which
job is in ``.submitit/jobs.json`` of ``runs_dir``, written before and after a submission: jobs of a
command that was killed between the two are found again by the files of submitit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from sparsepretrain.config.compose import shell_line
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.files import read_json, write_atomic
from sparsepretrain.studies import schedulers
from sparsepretrain.studies.cells import Part
from sparsepretrain.studies.jobs import Job
from sparsepretrain.studies.launchers import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from sparsepretrain.studies.progress import Progress, Stopped, StudyCell
from sparsepretrain.studies.schedulers import JobState
from sparsepretrain.training.hardware import visible_devices
from sparsepretrain.training.stopping import StopSignals

POLL_SECONDS = 2.0
"""Seconds between two questions to the scheduler."""

OWN_KEYS = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "mem_gb", "nodes", "tasks_per_node"),
    *("name", "stderr_to_stdout"),
)
"""Keys that submitit has for every cluster; others have the prefix ``slurm_``."""


class Detached(Stopped):
    """Signal that ended the watching of jobs, which go on."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.args = ("the jobs go on, and the same command watches them again",)


class Refused(ConfigError):
    """Refusal of the scheduler or the machine, which is no fault of the settings of a run."""


@dataclass
class Ledger:
    """Jobs of the cells in a ``runs_dir``, in a file."""

    folder: Path
    """Directory of submitit's files."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Cell -> ``folder`` and ``index`` of its submission, and ``id`` of its job."""

    @property
    def file(self) -> Path:
        """File with the jobs."""
        return self.folder / "jobs.json"

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Read the file and lock it against other commands."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            with contextlib.suppress(OSError, ValueError):
                self.jobs = read_json(self.file)
            for entry in self.jobs.values():
                if "id" not in entry:
                    _find_lost(entry)
            yield

    def save(self) -> None:
        """Write the file."""
        write_atomic(self.file, json.dumps(self.jobs, ensure_ascii=False, indent=1) + "\n")

    def id(self, key: str) -> str:
        """Return the job of a cell, or an empty string."""
        return str(self.jobs.get(key, {}).get("id", ""))


def _find_lost(entry: dict[str, Any]) -> None:
    """Find the id of a job whose submitting command was killed before it wrote the id."""
    for file in Path(entry["folder"]).glob("*_submitted.pkl"):
        number = file.name.removesuffix("_submitted.pkl")
        array, _, task = number.partition("_")
        if int(task or 0) == entry["index"] or not task:
            entry["id"] = f"{array}_{task}" if task else array


class Submission(Progress):
    """Submits cells as jobs and watches them.

    Args:
        title: see :class:`Progress`.
        console: see :class:`Progress`.
        conf: checked keys of ``hydra.launcher``.
        runs_dir: directory of all studies, with the list of jobs.
        parts: parts of the study, for the stages of their cells.
        later: key -> job that waits for the end of all jobs of the cells.
    """

    def __init__(
        self,
        title: str,
        console: Console,
        conf: SlurmQueueConf | LocalQueueConf,
        runs_dir: Path,
        parts: Sequence[Part],
        later: Mapping[str, Job] | None = None,
    ) -> None:
        super().__init__(title, console, jobs=conf.array_parallelism)
        self._conf = conf
        self._is_local = isinstance(conf, LocalQueueConf)
        self._ledger = Ledger(Path(conf.submitit_folder or runs_dir / ".submitit").absolute())
        self._cells = {cell.words: (part, cell) for part in parts for cell in part.cells}
        self._later = dict(later or {})
        self._known: dict[str, JobState] = {}
        self._open: list[StudyCell] = []  # with a job that is not over
        self._waiting: list[StudyCell] = []  # of these, those that wait for others on this machine
        self._stages: dict[StudyCell, list[StudyCell]] = {}

    def run(self, cells: Sequence[StudyCell]) -> None:  # noqa: D102
        self.cells = [*cells]
        with StopSignals() as signals:
            with self._ledger.open():
                self._open = [cell for cell in cells if not self._is_done(cell)]
                self._open += [
                    cell for cell in cells if cell not in self._open and self._left(cell)
                ]
                self._ask()
                new = [cell for cell in self._open if not self._is_alive(self._id(cell))]
                for cell in self._open:
                    if cell not in new:
                        cell.state = "queued"
                        self._say(cell, f"job {self._id(cell)} goes on")
                if self._is_local:
                    self._check_gpus(new)
                    self._waiting = new
                    self._start_local()
                else:
                    for group in _groups(new):
                        self._submit({_key(cell): self._job(cell) for cell in group}, group[0])
                        self._queued(group)
                    self._submit_later()
            while self._open and signals.exit_code is None:
                self._watch()
                deadline = time.monotonic() + POLL_SECONDS
                while self._open and signals.exit_code is None and time.monotonic() < deadline:
                    time.sleep(0.1)
        if signals.exit_code is not None:
            ids = [number for cell in self._open if (number := self._id(cell))]
            ids += [number for key in self._later if (number := self._ledger.id(key))]
            if ids:
                stop = schedulers.stop_command(ids, local=self._is_local)
                self._console.info(f"detached; to end the jobs: {stop}")
            if self._waiting:
                self._console.info(
                    f"not started, until the command runs again: {len(self._waiting)}"
                )
            raise Detached(signals.exit_code)

    def _left(self, cell: StudyCell) -> bool:
        """Return True if a trained cell has unfinished stages."""
        self._stages[cell] = self._next(cell)
        for stage in self._stages[cell]:
            self._is_done(stage)
        return any(stage.state == "waiting" for stage in self._stages[cell])

    def _queued(self, cells: Sequence[StudyCell]) -> None:
        for cell in cells:
            cell.directory.note_failure("train")  # of an earlier job
            self._say(cell, f"{cell.left}, job {self._id(cell)}")
            cell.state = "queued"

    def _watch(self) -> None:
        """Read the states of all open cells once, and start waiting local ones."""
        if self._waiting:
            with self._ledger.open():
                self._start_local()
        self._ask()
        for cell in [cell for cell in self._open if cell not in self._waiting]:
            state = self._known.get(self._id(cell))
            cell.look()
            if state is not None and state.is_queued:
                if cell.state == "running":
                    self._say(cell, "queued again; it continues from its checkpoint")
                cell.state = "queued"
            elif state is not None and state.is_running:
                if cell.state == "queued":
                    log = cell.directory.console_log
                    self._say(cell, f"job {self._id(cell)} runs; prints to {log}")
                    cell.state = "running"
            else:
                self._open.remove(cell)
                self._end(cell, state)
        self._show()

    def _end(self, cell: StudyCell, state: JobState | None) -> None:
        """Find how a cell and its stages ended whose job is over."""
        failures = cell.directory.failures()
        if cell.left != cell.goal:
            if state is not None and state.name == "CANCELLED":
                cell.state = "canceled"
                cell.error = f"CANCELLED: job {self._id(cell)}, {cell.left}"
                self._console.warn(f"{cell.label}: {cell.error}; the same command submits it again")
            elif entry := failures.get("train"):
                self._fail(cell, entry["exit_code"], entry["error"], note=False)
            else:
                self._fail(cell, 1, self._ending(cell))
            return
        cell.state = cell.goal
        self._say(cell, cell.state)
        if cell not in self._stages:
            self._stages[cell] = self._next(cell)
        for stage in self._stages[cell]:
            name = stage.stage_of[1] if stage.stage_of else ""
            if stage.state != "waiting" or self._is_done(stage):
                continue
            if entry := failures.get(name):
                self._fail(stage, entry["exit_code"], entry["error"], note=False)
            else:
                self._fail(stage, 1, self._ending(cell), note=False)

    def _ending(self, cell: StudyCell) -> str:
        """Return the reason of a job that ended without a word of its run."""
        number = self._id(cell)
        folder = self._ledger.jobs.get(_key(cell), {}).get("folder", self._ledger.folder)
        file = Path(folder) / f"{number}_0_log.err"
        why = "ended" if self._is_local else schedulers.slurm_ending(number)
        return f"job {number}: {why}; see {os.path.relpath(file)}"

    def _id(self, cell: StudyCell) -> str:
        return self._ledger.id(_key(cell))

    def _is_alive(self, number: str) -> bool:
        state = self._known.get(number)
        return state is not None and (state.is_queued or state.is_running)

    def _ask(self) -> None:
        """Ask for the states of the jobs; keep the last ones if there is no answer."""
        ids = {self._id(cell) for cell in self._open} | {self._ledger.id(k) for k in self._later}
        ids.discard("")
        if self._is_local:
            self._known = schedulers.local_states(ids)
        elif ids and (known := schedulers.slurm_states(ids)) is not None:
            self._known = known

    def _job(self, cell: StudyCell) -> Job:
        part, own = self._cells[cell.words]
        bare = dataclasses.replace(part, cells=[])
        place = (own.row, own.column, own.seed, own.words)
        return Job(cell.label, cell.command, cell.run.plain, cell.stop_after, bare, place)

    def _submit(
        self, jobs: Mapping[str, Job], like: StudyCell, extra: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Submit jobs as one array and write them down; return their ids.

        Raises:
            Refused: the scheduler refuses them.
        """
        folder = self._ledger.folder / uuid.uuid4().hex[:8]
        for index, key in enumerate(jobs):
            self._ledger.jobs[key] = {"folder": str(folder), "index": index}
        self._ledger.save()
        try:
            ids = submit(self._conf, folder, self.title, self._gpus(like), jobs, extra or {})
        except Refused:
            for key in jobs:
                del self._ledger.jobs[key]
            self._ledger.save()
            raise
        for key, number in zip(jobs, ids, strict=True):
            self._ledger.jobs[key]["id"] = number
        self._ledger.save()
        return ids

    def _submit_later(self) -> None:
        """Submit the jobs that wait for the end of those of the open cells."""
        new = {k: job for k, job in self._later.items() if not self._is_alive(self._ledger.id(k))}
        awaited = sorted({self._id(cell).partition("_")[0] for cell in self._open})
        if new and awaited:
            dependency = {"dependency": f"afterany:{':'.join(awaited)}"}
            ids = self._submit(new, self._open[0], dependency)
            numbers = schedulers.stop_command(ids, local=False).removeprefix("scancel ")
            self._console.info(f"{len(new)} runs wait for the chosen settings as job {numbers}")

    def _gpus(self, cell: StudyCell) -> int:
        """Return the number of GPUs of a job on each node."""
        if self._conf.gpus_per_node is not None:
            return self._conf.gpus_per_node
        # parallel.device=auto is the CPU on a machine without GPUs
        return 0 if self._is_local and not visible_devices() else cell.devices

    def _check_gpus(self, cells: Sequence[StudyCell]) -> None:
        """Refuse jobs that need more GPUs than this machine has."""
        most = max(map(self._gpus, cells), default=0)
        if most > (count := len(visible_devices())):
            given = self._conf.gpus_per_node is not None
            key = "hydra.launcher.gpus_per_node" if given else "parallel.nproc"
            raise Refused(f"{key}: expected at most {count} GPUs, got {most}; lower it")

    def _start_local(self) -> None:
        """Start as many waiting cells as may run at a time."""
        ids = {entry["id"] for entry in self._ledger.jobs.values() if "id" in entry}
        running = schedulers.local_states(ids)
        for cell in [cell for cell in self._waiting if self._id(cell) in running]:
            self._waiting.remove(cell)  # another command was faster
            cell.state = "queued"
        entries = [e for e in self._ledger.jobs.values() if e.get("id") in running]
        while self._waiting and len(entries) < self._conf.array_parallelism:
            cell = self._waiting[0]
            used = {device for entry in entries for device in entry.get("devices", ())}
            gpus = self._gpus(cell)
            free = [n for n in range(len(visible_devices())) if n not in used] if gpus else []
            if len(free) < gpus:
                return
            self._waiting.pop(0)
            extra = {"visible_gpus": free[:gpus]} if gpus else {}
            self._submit({_key(cell): self._job(cell)}, cell, extra)
            entry = self._ledger.jobs[_key(cell)]
            entry["devices"] = free[:gpus]
            self._ledger.save()
            entries.append(entry)
            self._queued([cell])


def submit(
    conf: BaseQueueConf,
    folder: Path,
    name: str,
    gpus: int,
    jobs: Mapping[str, Callable[[], int]],
    extra: Mapping[str, Any],
) -> list[str]:
    """Submit jobs as one array; return their ids in order.

    Args:
        conf: checked keys of ``hydra.launcher``.
        folder: directory of the files of submitit.
        name: of the jobs, unless ``conf`` names them.
        gpus: GPUs of a job on each node.
        jobs: name -> what a job calls.
        extra: further options of sbatch, or of a local executor.

    Raises:
        Refused: the scheduler refuses the jobs, or there is none.
    """
    import submitit

    local = isinstance(conf, LocalQueueConf)
    values = {f.name: getattr(conf, f.name) for f in dataclasses.fields(conf)}
    values |= {"name": conf.name or f"sparsepretrain-{name}", "gpus_per_node": gpus or None}
    del values["submitit_folder"]
    requeues = values.pop("max_num_timeout")
    try:
        # submitit and sbatch print what they also raise
        with _silent():
            if local:  # of one node; AutoExecutor knows neither visible_gpus nor signal_delay_s
                keys = ("timeout_min", "tasks_per_node", "stderr_to_stdout", "signal_delay_s")
                executor: Any = submitit.LocalExecutor(folder, max_num_timeout=requeues)
                options = {key: values[key] for key in keys} | {"gpus_per_node": gpus, **extra}
            else:
                executor = submitit.AutoExecutor(
                    folder, cluster="slurm", slurm_max_num_timeout=requeues
                )
                values["additional_parameters"] = {**values["additional_parameters"], **extra}
                options = {
                    key if key in OWN_KEYS else f"slurm_{key}": value
                    for key, value in values.items()
                    if value not in (None, {})
                }
            executor.update_parameters(**options)
            with _own_terminal():
                return [job.job_id for job in executor.submit_array(list(jobs.values()))]
    except (submitit.core.utils.FailedJobError, RuntimeError, ValueError, OSError) as error:
        text = one_line(error).removeprefix("sbatch: ").removeprefix("error: ")[:300]
        if gpus:  # unless it was typed, this number follows from parallel.nproc
            text += f" (a job asks for {gpus} GPUs per node: hydra.launcher.gpus_per_node)"
        raise Refused(f"hydra.launcher: the jobs cannot be submitted: {text}") from error


@contextlib.contextmanager
def _own_terminal() -> Iterator[None]:
    """Start processes that Ctrl-C and the end of this terminal do not reach: they inherit it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Print nothing, and let children that go on hold no pipe or terminal of this process."""
    with open(os.devnull, "r+") as null, contextlib.ExitStack() as saved:
        saved.enter_context(contextlib.redirect_stdout(null))
        saved.enter_context(contextlib.redirect_stderr(null))
        for number in (0, 1, 2):
            with contextlib.suppress(OSError):  # closed
                copy = os.dup(number)
                saved.callback(os.close, copy)
                saved.callback(os.dup2, copy, number)
                os.dup2(null.fileno(), number)
        yield


def _key(cell: StudyCell) -> str:
    """Return the name of a cell in the ledger."""
    return cell.key or shell_line(cell.words)


def _groups(cells: Sequence[StudyCell]) -> list[list[StudyCell]]:
    """Return the cells in groups that need the same number of GPUs: an array has one."""
    groups: dict[int, list[StudyCell]] = {}
    for cell in cells:
        groups.setdefault(cell.devices, []).append(cell)
    return list(groups.values())
