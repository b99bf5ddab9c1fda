"""Cells as jobs of a cluster, by submitit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError
from submitit.helpers import Checkpointable

from sparsepretrain.errors import ConfigError, one_line

REQUEUED = 1000
"""Most requeues of a job that reaches its time limit."""


class Line(Checkpointable):
    """Shell line; continues when the job is requeued after preemption or its time limit."""

    def __call__(self, line: str) -> None:
        """Run the line; a non-zero exit code fails the job."""
        subprocess.run(["bash", "-c", line], check=True)


def submit(name: str, lines: Sequence[str], settings: dict[str, str], folder: Path) -> list[Any]:
    """Submit a job per line as one array.

    Args:
        lines: see :func:`reproduce.commands`.
        settings: options of sbatch, as ``partition``, ``gpus``, ``time``; ``jobs`` is the number of
            jobs at a time.
        folder: directory for scripts and outputs of the jobs.
    """
    options: dict[str, Any] = dict(settings)
    most = int(options.pop("jobs", len(lines)))
    try:
        executor = SlurmExecutor(folder / "%j", max_num_timeout=REQUEUED)
        # None: the limit of the partition instead of submitit's five minutes
        executor.update_parameters(
            time=None, job_name=name, array_parallelism=most, additional_parameters=options
        )
        return executor.map_array(Line(), lines)
    except (RuntimeError, ValueError, OSError, FailedJobError) as error:
        raise ConfigError(f"--slurm: {one_line(error)}; --commands works anywhere") from error
