"""The loop and what it needs: building, schedules, precision, checkpoints, signals, guards."""

from __future__ import annotations

from typing import Any

from sparsepretrain.config.schema import Run


def train(run: Run, plain: dict[str, Any]) -> int:
    """Train (or continue) ``run``; returns the exit code. ``plain`` is its resolved configuration.

    Raises:
        ConfigError, DataError, CheckpointError, DivergedError: with one line for the user.
    """
    from sparsepretrain.training.trainer import train as start

    return start(run, plain)


def dry_run(run: Run, plain: dict[str, Any]) -> None:
    """Build ``run`` on the meta device and print what it would do; touches no data.

    Raises:
        ConfigError: targets match nothing, a width does not fit the pattern.
    """
    from sparsepretrain.training.plan import dry_run as show

    show(run, plain)
