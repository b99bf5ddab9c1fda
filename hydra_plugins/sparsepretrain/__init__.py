"""Launchers and the sweeper of ``sparsepretrain train -m``, where Hydra accepts plug-ins.

Hydra imports this module at every start of any of its programs: torch, submitit and Optuna are
imported on first use, and no option of another program is replaced (see
:func:`sparsepretrain.studies.plugins.register`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class _Launcher(Launcher):
    """Runs the cells that a sweeper asks for."""

    def __init__(self, **keys: Any) -> None:
        self.keys = keys

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.loader: Any = hydra_context.config_loader

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from sparsepretrain.studies.plugins import launch

        return launch(self.loader, job_overrides)


class EngineLauncher(_Launcher):
    """``hydra/launcher=basic``: child processes on this machine."""


class SlurmLauncher(_Launcher):
    """``hydra/launcher=submitit_slurm``: an array of Slurm jobs."""


class LocalLauncher(_Launcher):
    """``hydra/launcher=submitit_local``: detached processes on this machine."""


class OptunaSweeper(Sweeper):
    """``hydra/sweeper=optuna``: settings that Optuna chooses."""

    def __init__(self, **keys: Any) -> None:
        self.keys = keys

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from hydra.core.plugins import Plugins

        self.loader: Any = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from sparsepretrain.studies import search

        return search.sweep(self.loader.sweeper, arguments, self.launcher, self.loader)
