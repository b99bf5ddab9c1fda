"""Several runs, one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepretrain.training import loading

if TYPE_CHECKING:
    from sparsepretrain.studies.decay import Search
    from sparsepretrain.studies.tune import Outcome


def tune_decay(
    search: Search, out: Path, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> Outcome:
    """Search the decay factor of masked decay on the first steps of a run; writes to ``out``.

    Raises:
        Stopped, DivergedError, ConfigError: with one line for the user.
    """
    loading(search.run.name)
    from sparsepretrain.studies.tune import tune_decay as start

    return start(search, out, overrides, config_dirs)


def plan_tuning(search: Search, out: Path) -> None:
    """Print what :func:`tune_decay` would run; trains nothing."""
    loading(search.run.name)
    from sparsepretrain.studies.tune import show_plan

    show_plan(search, out)
