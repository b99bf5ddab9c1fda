"""Cells as jobs of a cluster, through submitit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit import AutoExecutor, Job, SlurmExecutor
from submitit.core.utils import FailedJobError
from submitit.helpers import Checkpointable

from sparsepretrain.errors import ConfigError, one_line

REQUEUED = 1000
"""Times that a job may be requeued when it is out of time; hours of a job that runs here."""


class Line(Checkpointable):
    """A line for a shell; requeued when the job is preempted or out of time, it continues."""

    def __call__(self, line: str) -> None:
        """Run it.

        Raises:
            CalledProcessError: with its exit code, which fails the job.
        """
        subprocess.run(["bash", "-c", line], check=True)


def submit(name: str, lines: Sequence[str], settings: dict[str, str], folder: Path) -> list[Any]:
    """Submit a job per line as one array.

    Args:
        name: of the jobs.
        lines: see :func:`reproduce.commands`.
        settings: options of sbatch, as ``partition``, ``gpus``, ``time``; ``cluster=local`` runs
            here instead, ``jobs`` is the number of jobs at a time.
        folder: for scripts and outputs of the jobs.

    Raises:
        ConfigError: there is no such cluster here, or it refuses the jobs.
    """
    options: dict[str, Any] = dict(settings)
    cluster, most = options.pop("cluster", "slurm"), int(options.pop("jobs", len(lines)))
    executor: Any
    try:
        if cluster == "slurm":
            executor = SlurmExecutor(folder / "%j", max_num_timeout=REQUEUED)
            # no time: that of the partition, not submitit's five minutes
            executor.update_parameters(
                time=None, job_name=name, array_parallelism=most, additional_parameters=options
            )
        else:
            executor = AutoExecutor(folder / "%j", cluster=cluster)
            executor.update_parameters(timeout_min=REQUEUED * 60)
        jobs: list[Job[None]] = executor.map_array(Line(), lines)
    except (RuntimeError, ValueError, OSError, FailedJobError) as error:
        raise ConfigError(f"--slurm: {one_line(error)}; --commands suit any cluster") from error
    return jobs
