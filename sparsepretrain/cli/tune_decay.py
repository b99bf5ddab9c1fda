"""The verb ``tune-decay``: its flags, and from there to the search and its picture."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies import decay
from sparsepretrain.training.schedules import warmup_steps

DESCRIPTION = f"""\
Find the decay factor λ of masked decay without training to the end (arXiv:2404.01847 section 4).
A dense reference and one run per λ of a logarithmic grid train the learning-rate warm-up only, with
equal data, initial weights and learning rates. μ is the flip rate of a run over that of the
reference at the end, averaged over the last {decay.LAST} comparisons of masks or the last tenth.
λ is feasible if μ lies in the interval; where μ jumps over it, at most {decay.BISECTIONS} more runs
bisect log λ. Of several feasible λ the one whose μ is nearest to the middle of the interval is
chosen. It is written as a file for --config-dir, beside the table (tune.json) and a plot. Overrides
are those of train; without a choice of a method {decay.DEFAULT}. A stopped search continues with
the same command. The exit code is 2 also when no λ is feasible; the others are those of train.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the search to ``parser``."""
    parser.description = DESCRIPTION
    (low, high), (least, most) = decay.GRID, decay.INTERVAL
    parser.add_argument(
        "--grid",
        type=_pair,
        default=decay.GRID,
        metavar="LOW,HIGH",
        help=f"smallest and largest λ of the grid; default: {low:g},{high:g}",
    )
    parser.add_argument(
        "--points",
        type=_points,
        default=decay.POINTS,
        metavar="K",
        help=f"λ in the grid, evenly spaced in the logarithm; default: {decay.POINTS}",
    )
    parser.add_argument(
        "--interval",
        type=_pair,
        default=decay.INTERVAL,
        metavar="LOW,HIGH",
        help=f"feasible μ; default: {least:g},{most:g}",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="T", help="steps of each run; default: schedule.warmup"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for the results; default: beside the runs"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs, what they cost, and stop"
    )


def run(args: argparse.Namespace) -> int:
    """Search, draw, and print the command that trains with the chosen λ.

    Raises:
        ConfigError: no λ is feasible; table and plot are there all the same.
    """
    overrides = decay.with_default(args.overrides)
    run = config.load(overrides, args.config_dir)
    warmup = warmup_steps(run.schedule, run.steps)
    steps = warmup if args.steps is None else args.steps
    low, high = args.grid
    grid = decay.log_grid(low, high, args.points)
    search = decay.Search(run, grid, args.interval, steps)
    out = args.out or search.out
    from sparsepretrain import reports
    from sparsepretrain.studies import tune

    if args.dry_run:
        tune.show_plan(search, out)
        return 0
    outcome = tune.tune_decay(search, out, overrides, args.config_dir)
    from sparsepretrain.tracking.console import Console

    console = Console()
    try:
        console.info(f"plot: {reports.decay_report(out)}")
    except Exception as error:  # which does not undo the search
        console.warn(f"no plot: {' '.join(str(error).split())}")
    if outcome.decay is None:
        raise ConfigError(outcome.message)
    console.info(f"to train with λ = {outcome.decay:.3g}:\n{outcome.message}")
    return 0


def _pair(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low < high < math.inf:
        raise argparse.ArgumentTypeError(f"must be LOW,HIGH with 0 < LOW < HIGH, got {text!r}")
    return low, high


def _points(text: str) -> int:
    return _at_least(2, text)


def _steps(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer ≥ {least}, got {text!r}")
    return int(text)
