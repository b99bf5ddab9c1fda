"""Run the cells of a study as jobs of a cluster, or of this machine, that outlive the command.

The same command watches jobs that are still there and submits what has none. Which cell has which
job is in ``.submitit/jobs.json`` of the study, written before and after a submission: a command
that was killed between the two is found again by the files of submitit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
"""Keys of every executor of submitit; others have its name as prefix."""


class Detached(Stopped):
    """Signal that ended the watching of jobs, which go on."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.args = ("the jobs go on, and the same command watches them again",)


@dataclass
class Ledger:
    """Jobs of the cells of a study, in a file."""

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
        folder: directory of the study.
        parts: parts of the study, for the stages of their cells.
        later: key -> job that waits for the end of all jobs of the cells.
    """

    def __init__(
        self,
        title: str,
        console: Console,
        conf: SlurmQueueConf | LocalQueueConf,
        folder: Path,
        parts: Sequence[Part],
        later: Mapping[str, Job] | None = None,
    ) -> None:
        super().__init__(title, console, jobs=conf.array_parallelism)
        self._conf = conf
        self._is_local = isinstance(conf, LocalQueueConf)
        self._ledger = Ledger(Path(conf.submitit_folder or folder / ".submitit").absolute())
        self._cells = {cell.words: (part, cell) for part in parts for cell in part.cells}
        self._later = dict(later or {})
        self._known: dict[str, JobState] = {}
        self._waiting: list[StudyCell] = []

    def run(self, cells: Sequence[StudyCell]) -> None:  # noqa: D102
        self.cells = [*cells]
        open_ = [cell for cell in cells if not self._is_done(cell)]
        with StopSignals() as signals:
            with self._ledger.open():
                self._ask(open_)
                new = [c for c in open_ if not self._is_alive(c) and not self._is_done(c)]
                for cell in open_:
                    if cell not in new and cell.state == "waiting":
                        cell.state = "queued"
                        self._say(cell, f"job {self._id(cell)} goes on")
                if self._is_local:
                    self._waiting = new
                    self._start_local()
                else:
                    for group in _groups(new):
                        self._submit({_key(cell): self._job(cell) for cell in group}, group[0])
                        for cell in group:
                            cell.state = "queued"
                            self._say(cell, f"{cell.left}, job {self._id(cell)}")
                    self._submit_later(open_)
            self._watch(signals, open_)
        if signals.exit_code is not None:
            ids = [self._id(cell) for cell in self.cells if cell.state in ("queued", "running")]
            ids += [number for key in self._later if (number := self._ledger.id(key))]
            if ids:
                stop = schedulers.stop_command(ids, local=self._is_local)
                self._console.info(f"detached; to end the jobs: {stop}")
            raise Detached(signals.exit_code)

    def _watch(self, signals: StopSignals, open_: Sequence[StudyCell]) -> None:
        left = [cell for cell in open_ if cell.state in ("waiting", "queued")]
        while left and signals.exit_code is None:
            if self._waiting:
                with self._ledger.open():
                    self._start_local()
            self._ask(left)
            for cell in left:
                self._look(cell)
            left = [cell for cell in left if cell.state in ("waiting", "queued", "running")]
            self._show()
            deadline = time.monotonic() + POLL_SECONDS
            while left and signals.exit_code is None and time.monotonic() < deadline:
                time.sleep(0.1)

    def _look(self, cell: StudyCell) -> None:
        """Read the state of a cell from its job and its run directory."""
        if cell in self._waiting:
            return
        state = self._known.get(self._id(cell))
        if state is not None and state.is_queued:
            before, cell.state = cell.state, "queued"
            cell.look()
            if before == "running":
                self._say(cell, "queued again; it continues from its checkpoint")
        elif state is not None and state.is_running:
            if cell.state != "running":
                self._say(cell, f"runs as job {self._id(cell)}; {cell.directory.console_log}")
            cell.state = "running"
            cell.look()
        else:
            self._end(cell, state)

    def _end(self, cell: StudyCell, state: JobState | None) -> None:
        """Find how a cell ended whose job is over."""
        cell.look()
        failures = cell.directory.failures()
        if cell.left == cell.goal:
            cell.state = cell.goal
            self._say(cell, cell.state)
            for following in self._next(cell):
                following.look()
                name = following.stage_of[1] if following.stage_of else ""
                if following.left == following.goal:
                    following.state = following.goal
                elif name in failures:
                    entry = failures[name]
                    self._fail(following, entry["exit_code"], entry["error"], note=False)
                else:
                    self._fail(following, 1, self._ending(cell), note=False)
        elif state is not None and state.name == "CANCELLED":
            cell.state = "cancelled"
            cell.error = f"CANCELLED: job {self._id(cell)}, {cell.left}"
            self._console.warn(f"{cell.label}: {cell.error}; the same command submits it again")
        elif "train" in failures:
            self._fail(cell, failures["train"]["exit_code"], failures["train"]["error"], note=False)
        else:
            self._fail(cell, 1, self._ending(cell))

    def _ending(self, cell: StudyCell) -> str:
        """Return the reason of a job that ended without a word of its run."""
        number = self._id(cell)
        folder = self._ledger.jobs.get(_key(cell), {}).get("folder", self._ledger.folder)
        file = Path(folder) / f"{number}_0_log.err"
        why = "ended" if self._is_local else schedulers.slurm_ending(number)
        return f"job {number}: {why}; see {os.path.relpath(file)}"

    def _id(self, cell: StudyCell) -> str:
        return self._ledger.id(_key(cell))

    def _is_alive(self, cell: StudyCell) -> bool:
        state = self._known.get(self._id(cell))
        return state is not None and (state.is_queued or state.is_running)

    def _ask(self, cells: Sequence[StudyCell]) -> None:
        """Ask for the states of the jobs of cells; keep the last ones if there is no answer."""
        ids = {self._id(cell) for cell in cells} | {self._ledger.id(key) for key in self._later}
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
            ConfigError: the scheduler refuses them.
        """
        folder = self._ledger.folder / uuid.uuid4().hex[:8]
        for index, key in enumerate(jobs):
            self._ledger.jobs[key] = {"folder": str(folder), "index": index}
        self._ledger.save()
        try:
            ids = submit(self._conf, folder, self.title, _gpus(self._conf, like), jobs, extra or {})
        except ConfigError:
            for key in jobs:
                del self._ledger.jobs[key]
            self._ledger.save()
            raise
        for key, number in zip(jobs, ids, strict=True):
            self._ledger.jobs[key]["id"] = number
        self._ledger.save()
        return ids

    def _submit_later(self, cells: Sequence[StudyCell]) -> None:
        """Submit the jobs that wait for the end of those of ``cells``."""
        known = self._known
        new = {
            key: job
            for key, job in self._later.items()
            if (state := known.get(self._ledger.id(key))) is None
            or not (state.is_queued or state.is_running)
        }
        awaited = sorted({self._id(cell).partition("_")[0] for cell in cells} - {""})
        if new and awaited:
            dependency = {"dependency": f"afterany:{':'.join(awaited)}"}
            ids = self._submit(new, cells[0], dependency)
            stop = schedulers.stop_command(ids, local=False).removeprefix("scancel ")
            self._console.info(f"{len(new)} runs with the chosen settings wait as job {stop}")

    def _start_local(self) -> None:
        """Start as many waiting cells as may run at a time."""
        ids = {entry["id"] for entry in self._ledger.jobs.values() if "id" in entry}
        running = schedulers.local_states(ids)
        entries = [e for e in self._ledger.jobs.values() if e.get("id") in running]
        while self._waiting and len(entries) < self._conf.array_parallelism:
            cell = self._waiting[0]
            used = {device for entry in entries for device in entry.get("devices", ())}
            gpus = _gpus(self._conf, cell)
            free = [n for n in range(len(visible_devices())) if n not in used] if gpus else []
            if len(free) < gpus:
                if not entries:
                    has = f"needs {gpus} GPUs, and this machine has {len(free)}"
                    raise ConfigError(f"hydra.launcher.gpus_per_node: a job {has}")
                return
            self._waiting.pop(0)
            extra = {"visible_gpus": free[:gpus]} if gpus else {}
            self._submit({_key(cell): self._job(cell)}, cell, extra)
            entry = self._ledger.jobs[_key(cell)]
            entry["devices"] = free[:gpus]
            self._ledger.save()
            entries.append(entry)
            cell.state = "queued"
            self._say(cell, f"{cell.left}, process {entry['id']}")


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
        ConfigError: the scheduler refuses the jobs, or there is none.
    """
    import submitit

    cluster = "local" if isinstance(conf, LocalQueueConf) else "slurm"
    values = {f.name: getattr(conf, f.name) for f in dataclasses.fields(conf)}
    values |= {"name": conf.name or f"sparsepretrain-{name}", "gpus_per_node": gpus or None}
    options = {
        key if key in OWN_KEYS else f"{cluster}_{key}": value
        for key, value in values.items()
        if value not in (None, {}) and key not in ("submitit_folder", "max_num_timeout")
    }
    if cluster == "local":
        del options["local_array_parallelism"]
        options |= {"gpus_per_node": gpus, **{f"local_{key}": v for key, v in extra.items()}}
    else:
        options["slurm_additional_parameters"] = {
            **options.get("slurm_additional_parameters", {}),
            **extra,
        }
    try:
        # submitit and sbatch print what they also raise
        with _silent():
            executor = submitit.AutoExecutor(
                folder, cluster=cluster, **{f"{cluster}_max_num_timeout": values["max_num_timeout"]}
            )
            executor.update_parameters(**options)
            return [job.job_id for job in executor.submit_array(list(jobs.values()))]
    except (submitit.core.utils.FailedJobError, RuntimeError, ValueError, OSError) as error:
        text = one_line(error).removeprefix("sbatch: ").removeprefix("error: ")
        raise ConfigError(f"hydra.launcher: the jobs cannot be submitted: {text[:300]}") from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Print nothing, neither from this process nor from its children."""
    with open(os.devnull, "w") as null, contextlib.ExitStack() as saved:
        saved.enter_context(contextlib.redirect_stdout(null))
        saved.enter_context(contextlib.redirect_stderr(null))
        yield


def _key(cell: StudyCell) -> str:
    """Return the name of a cell in the ledger."""
    return cell.key or shell_line(cell.words)


def _gpus(conf: BaseQueueConf, cell: StudyCell) -> int:
    return cell.devices if conf.gpus_per_node is None else conf.gpus_per_node


def _groups(cells: Sequence[StudyCell]) -> list[list[StudyCell]]:
    """Return the cells in groups that need the same number of GPUs: an array has one."""
    groups: dict[int, list[StudyCell]] = {}
    for cell in cells:
        groups.setdefault(cell.devices, []).append(cell)
    return list(groups.values())
