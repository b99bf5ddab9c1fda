"""Several processes on this machine, started by torch's elastic agent.

``torchrun`` is the same agent; it always ends with 1 if a process failed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run, shares
from sparsepretrain.config.validate import validate
from sparsepretrain.console import Console
from sparsepretrain.errors import INTERRUPTED, PREEMPTED, ConfigError, RankError
from sparsepretrain.processes import rank, started
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.training.step import STOPS
from sparsepretrain.training.trainer import train
from sparsepretrain.training.world import World


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Machines that train a run together; each of them launches its ranks."""

    count: int = 1
    """Number of machines."""
    endpoint: str = "localhost:0"
    """HOST:PORT of the first machine, where they meet."""


ONE = Nodes()
"""This machine alone."""


def train_or_launch(
    run: Run, console: Console, stop_after: int | None = None, nodes: Nodes = ONE
) -> int:
    """Train in this process, or launch the ranks of ``parallel`` unless a launcher did."""
    if run.parallel.name != "single" and not started():
        count = processes(run, nodes.count)
        if count * nodes.count > 1:
            return launch(run, count, stop_after, nodes)
    return train(run, console, stop_after=stop_after)


def processes(run: Run, nodes: int = 1) -> int:
    """Return the number of processes of ``parallel.nproc``: by default one per GPU, or one."""
    device = World.single(run.parallel.device).device
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    count = int(run.parallel.nproc or available)
    if device.type == "cuda" and count > available:
        raise ConfigError(
            f"parallel.nproc: expected at most {available} GPUs, got {count}; lower it"
        )
    if problems := [(key, f" {text}") for key, text in shares(run, count * nodes)]:
        raise ConfigError(problems)
    return count


def launch(run: Run, count: int, stop_after: int | None = None, nodes: Nodes = ONE) -> int:
    """Train in ``count`` processes on each of ``nodes``, of which this is one.

    Returns:
        0, or the exit code of a signal, which is passed on.
    """
    logging.disable()  # the agent repeats in forty lines what its processes reported in one
    # threads that fight for the cores make every process slower
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    directory = RunDirectory.of(run)
    with tempfile.TemporaryDirectory(prefix="sparsepretrain-") as scratch:
        config = Path(scratch) / "config.yaml"
        config.write_text(freeze.to_yaml(run.plain), encoding="utf-8")
        settings = LaunchConfig(
            min_nodes=nodes.count,
            max_nodes=nodes.count,
            nproc_per_node=count,
            run_id=directory.path.name,
            rdzv_backend="c10d",
            rdzv_endpoint=nodes.endpoint,
            local_addr="localhost" if nodes.count == 1 else None,
            max_restarts=0,
            **_patience(run.parallel.grace),
            logs_specs=DefaultLogsSpecs(log_dir=scratch, local_ranks_filter={0}),
        )
        words = (str(config), str(stop_after or 0), *sys.argv[1:])
        try:
            elastic_launch(settings, sys.executable)("-m", "sparsepretrain", "__worker", *words)
        except ChildFailedError as failed:
            return _outcome(failed)
        except SignalException as stopped:
            # The ranks got the signal too. If their last save failed, that code tells more.
            left = directory.status()
            return left if left not in (None, 0, *STOPS) else 128 + stopped.sigval
    return 0


def work(config: str, stop_after: str, *words: str) -> int:
    """Train in one rank: a frozen configuration, 0 or a last step, words of the launcher."""
    # a rank has a session of its own: without this it outlives a launcher killed by SIGKILL
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    sys.argv[1:] = words
    run = validate(freeze.from_yaml(Path(config)))
    console = Console() if rank() == 0 else Console.silent()
    return train(run, console, stop_after=int(stop_after) or None)


def _patience(seconds: int) -> dict[str, Any]:
    """Return the option of this name; torch 2.9 has none and always waits 30 s."""
    known = [field.name for field in dataclasses.fields(LaunchConfig)]
    return {"shutdown_timeout": seconds} if "shutdown_timeout" in known else {}


def _outcome(failed: ChildFailedError) -> int:
    """Return the exit code of the first failure, or raise the error that its process reported."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, int]:
        return _report_of(item[1]).get("follows", False), item[1].timestamp

    number, failure = min(failed.failures.items(), key=order)
    report = _report_of(failure)
    if failure.exitcode < 0:
        raise RankError(128 - failure.exitcode, f"rank {number} died of {failure.signal_name()}")
    if not report and failure.exitcode in (INTERRUPTED, PREEMPTED):
        return failure.exitcode
    if not report:
        raise RankError(failure.exitcode, f"rank {number} ended with {failure.exitcode}")
    messages = report.get("messages")
    # a loss that is not finite is so on all: then none is named
    failures = [f for f in failed.failures.values() if not _report_of(f).get("follows")]
    shared = len(failures) > 1 and all(_report_of(f).get("messages") == messages for f in failures)
    where = f"rank {number}: " if number and not shared else ""
    if messages is None:  # a defect; rank 0 has shown where
        sys.stderr.write(report["py_callstack"] if number else "")
        messages = [failure.error_file_data["message"]["message"]]
    error = RankError(failure.exitcode, "\n".join(where + message for message in messages))
    error.label = report.get("label", error.label)
    raise error


def _report_of(failure: ProcessFailure) -> dict[str, Any]:
    """Return the report of a failed rank (:func:`sparsepretrain.processes.report`), or {}."""
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}
