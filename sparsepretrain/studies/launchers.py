"""Keys of ``hydra/launcher=…``: where the runs of a study are trained.

The options of submitit have the names and keys of hydra-submitit-launcher 1.2. Other plug-ins bring
their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from sparsepretrain.errors import Problems


@dataclass(slots=True, kw_only=True)
class EngineConf:
    """Child processes on this machine, ended by Ctrl-C; the default."""

    plugin: ClassVar[str] = "EngineLauncher"


@dataclass(slots=True, kw_only=True)
class BaseQueueConf:
    """Jobs that outlive the command, submitted with submitit."""

    submitit_folder: str | None = None
    """Directory of scripts, pickled jobs and their output; null: runs_dir/.submitit."""
    timeout_min: Annotated[int, "> 0"] = 60
    """Time limit of a job in minutes. A job saves before its limit and continues as a new one."""
    cpus_per_task: Annotated[int | None, "> 0"] = None
    """CPUs of a job on each node; null: the cluster's default."""
    gpus_per_node: Annotated[int | None, "≥ 0"] = None
    """GPUs of a job on each node; null: one per rank, none with parallel.device=cpu, or on this
    machine if it has none."""
    tasks_per_node: int = 1
    """Must be 1: a job starts its ranks itself, parallel.nproc on each node."""
    mem_gb: Annotated[float | None, "> 0"] = None
    """Memory of a job on each node in GB; null: the cluster's default."""
    nodes: Annotated[int, "> 0"] = 1
    """Nodes of a job. A run has nodes · parallel.nproc ranks."""
    name: str | None = None
    """Name of the jobs; null: that of the study."""
    stderr_to_stdout: bool = False
    """true: one file for both outputs of a job."""
    array_parallelism: Annotated[int, "> 0"] = 256
    """Maximum number of jobs that run at a time."""
    max_num_timeout: Annotated[int, "≥ 0"] = 100
    """Number of times that a job continues after its time limit, before it fails."""
    signal_delay_s: Annotated[int, "> 0"] = 120
    """Seconds before the time limit at which a job is asked to save."""

    def problems(self) -> Problems:
        if self.tasks_per_node != 1:
            text = f"must be 1, got {self.tasks_per_node}: a job starts its ranks itself"
            yield "tasks_per_node", f"{text}, parallel.nproc={self.tasks_per_node} on each node"
        if self.signal_delay_s >= 60 * self.timeout_min:
            yield (
                "signal_delay_s",
                f"must be below timeout_min ({60 * self.timeout_min} s), got {self.signal_delay_s}",
            )


@dataclass(slots=True, kw_only=True)
class SlurmQueueConf(BaseQueueConf):
    """Array of Slurm jobs. Options without a comment are those of sbatch."""

    plugin: ClassVar[str] = "SlurmLauncher"

    partition: str | None = None
    """--partition; null: the cluster's default, as for the following."""
    qos: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    """--gres; use gpus_per_node for GPUs."""
    cpus_per_gpu: Annotated[int | None, "> 0"] = None
    gpus_per_task: Annotated[int | None, "> 0"] = None
    """--gpus-per-task; a task is a node here."""
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    account: str | None = None
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch: {reservation: mine}."""
    setup: list[str] | None = None
    """Shell lines of the job before it starts: [module load cuda]."""


@dataclass(slots=True, kw_only=True)
class LocalQueueConf(BaseQueueConf):
    """Processes on this machine that outlive the command, such as to rehearse a cluster."""

    plugin: ClassVar[str] = "LocalLauncher"

    array_parallelism: Annotated[int, "> 0"] = 1
    """Maximum number of jobs that run at a time."""

    def problems(self) -> Problems:
        yield from BaseQueueConf.problems(self)
        if self.nodes > 1:
            yield "nodes", f"must be 1 on this machine, got {self.nodes}"


@dataclass(slots=True, kw_only=True)
class Plugin:
    """Launcher of an installed plug-in of Hydra, instantiated as it is."""

    name: str
    """Option of ``hydra/launcher``."""


LAUNCHERS: dict[str, type[EngineConf | SlurmQueueConf | LocalQueueConf]] = {
    "basic": EngineConf,
    "submitit_local": LocalQueueConf,
    "submitit_slurm": SlurmQueueConf,
}
"""Option of ``hydra/launcher`` -> its keys."""

Launcher = EngineConf | SlurmQueueConf | LocalQueueConf | Plugin
