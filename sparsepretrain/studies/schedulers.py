"""States of jobs: of Slurm, asked with squeue and scontrol, and of detached local processes.

``sacct`` is never asked: small clusters keep no accounting. Slurm knows nothing about a run: a job
whose run failed is COMPLETED there, so results are read from the run directory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
RUNNING = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"}
)
SECONDS = 60
"""Time limit of one question; a busy controller answers late."""


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job in the words of Slurm."""

    name: str
    reason: str = ""

    @property
    def is_queued(self) -> bool:
        """True if the job waits for its start, its first one or another."""
        return self.name in QUEUED

    @property
    def is_running(self) -> bool:
        """True if the job has processes."""
        return self.name in RUNNING


def slurm_states(ids: Collection[str]) -> dict[str, JobState] | None:
    """Return the states of the jobs that Slurm still knows; None if it does not answer."""
    arrays = sorted({number.partition("_")[0] for number in ids})
    states: dict[str, JobState] = {}
    # all jobs of this user: an id that Slurm has forgotten would make the question an error
    shown = _ask("squeue", "--me", "-h", "-r", "--states=all", "-o", "%i|%A|%T|%r")
    if shown is None:
        return None
    for line in shown.splitlines():
        number, _, state, reason = (line.split("|") + [""] * 3)[:4]
        if number.partition("_")[0] in arrays:
            states[number] = JobState(state, "" if reason == "None" else reason)
    return states


def slurm_ending(number: str) -> str:
    """Return how a job ended, in words: ``CANCELLED``, ``killed by SIGKILL (FAILED)``."""
    facts = dict(re.findall(r"(\w+)=(\S+)", _ask("scontrol", "-o", "show", "job", number) or ""))
    state = facts.get("JobState", "forgotten by Slurm")
    status, _, killed = facts.get("ExitCode", "0:0").partition(":")
    # the shell of the job reports a signal of its step as 128 + number
    by = int(killed or 0) or max(0, int(status) - 128)
    if state in ("FAILED", "COMPLETED", "OUT_OF_MEMORY") and 0 < by < signal.NSIG:
        return f"killed by {signal.Signals(by).name} ({state})"
    return f"{state}, exit code {status}" if int(status) else state


def slurm_is_running(number: str) -> bool:
    """Return True for a job that neither ends nor was canceled, and may thus be requeued."""
    shown = _ask("scontrol", "-o", "show", "job", number) or ""
    return "JobState=RUNNING" in shown


def local_states(ids: Iterable[str]) -> dict[str, JobState]:
    """Return the states of the controllers of local jobs, which have their process ids."""
    return {number: JobState("RUNNING") for number in ids if _is_controller(number)}


def stop_command(ids: Iterable[str], *, local: bool) -> str:
    """Return the command that ends jobs for good after they have saved."""
    if local:
        return f"kill {' '.join(sorted(ids, key=int))}"
    tasks: dict[str, list[int]] = {}
    alone = []
    for number in ids:
        array, _, task = number.partition("_")
        if task:
            tasks.setdefault(array, []).append(int(task))
        else:
            alone.append(array)
    return " ".join(["scancel", *alone, *(f"{a}_[{_ranges(t)}]" for a, t in tasks.items())])


def _ranges(numbers: list[int]) -> str:
    """Return ``0-2,5`` for 0, 1, 2, 5."""
    texts: list[list[int]] = []
    for number in sorted(numbers):
        if texts and number == texts[-1][-1] + 1:
            texts[-1].append(number)
        else:
            texts.append([number])
    return ",".join(f"{t[0]}-{t[-1]}" if len(t) > 1 else str(t[0]) for t in texts)


def _is_controller(number: str) -> bool:
    try:
        command = Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return False
    return b"submitit.local" in command or b"submitit/local" in command


def _ask(*command: str) -> str | None:
    """Return what a program of Slurm prints, or None if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
