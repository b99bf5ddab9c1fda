"""The verb ``prepare``: data without a model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain import config
from sparsepretrain.config.schema import GROUPS, REGISTERED
from sparsepretrain.config.validate import check
from sparsepretrain.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Prepare the data and say how much there is.

    Raises:
        ConfigError, DataError: with one line for the user.
    """
    options = data_options(args.overrides, args.config_dir)
    from sparsepretrain import data
    from sparsepretrain.tracking.console import Console, count

    console = Console()
    start = time.monotonic()
    prepared = data.prepare(options, workers=args.workers, on_progress=console.progress)
    console.stop()
    seconds = time.monotonic() - start
    unit, sizes = data.amounts(options, prepared)
    parts = ", ".join(f"{split} {count(size)}" for split, size in sizes.items())
    console.info(f"prepared {count(sum(sizes.values()))} {unit} ({parts}) in {prepared.directory}")
    console.info(f"{seconds:.1f} s, {count(sum(sizes.values()) / max(seconds, 1e-9))} {unit}/s")
    return 0


def data_options(overrides: Sequence[str], config_dirs: Sequence[Path]) -> Any:
    """The group ``data``, whatever model and task it is for; root keys are checked as well.

    Raises:
        ConfigError: every problem, one message each.
    """
    plain = config.compose(overrides, config_dirs)
    checked, errors = check(plain, {*GROUPS, *REGISTERED} - {"data"})
    if errors or checked is None:
        raise ConfigError(errors)
    return checked.data
