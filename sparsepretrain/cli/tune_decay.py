"""Verb ``tune-decay``: search for the decay factor λ."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path

from sparsepretrain.cli._verb import ConfiguredVerb, integer_from
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register

DESCRIPTION = """\
Find the decay factor λ of masked decay without training to the end (arXiv:2404.01847 section 4).
A dense reference and one run per λ of a logarithmic grid train the learning-rate warm-up only, with
equal data, initial weights and learning rates. μ is the flip rate of a run over that of the
reference at the end, averaged over the last {last} mask comparisons or the last tenth. λ is
feasible if μ lies in the interval. The feasible λ with μ nearest to the middle of the interval is
chosen, and the command that trains with it is printed. Results are a table and tune.json.
Overrides are those of train; the default method is {default}. Each run is a process that prints to
console.log in its directory; a failed run is a row of the table. The same command continues a
stopped search; another --grid reuses finished runs. Exit codes are those of train, and 2 if no λ
is feasible.
"""


@register("verb", "tune-decay")
class TuneDecay(ConfiguredVerb):
    summary = "find the decay factor of tsrste or srste on the warm-up alone"
    order = 3

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from sparsepretrain.studies import decay

        parser.description = DESCRIPTION.format(last=decay.LAST, default=decay.DEFAULT)
        super().add_arguments(parser)
        for flag, (low, high), meaning in (
            ("--grid", decay.GRID, "smallest and largest λ of the grid"),
            ("--interval", decay.INTERVAL, "feasible μ"),
        ):
            text = f"{meaning}; default: {low:g},{high:g}"
            parser.add_argument(
                flag, type=_pair, default=(low, high), metavar="LOW,HIGH", help=text
            )
        text = f"λ in the grid, evenly spaced in the logarithm; default: {decay.POINTS}"
        parser.add_argument(
            "--points", type=integer_from(2), default=decay.POINTS, metavar="K", help=text
        )
        text = "steps of each run; default: schedule.warmup"
        parser.add_argument("--steps", type=integer_from(1), metavar="T", help=text)
        text = "directory of the results; default: next to the runs"
        parser.add_argument("--out", type=Path, metavar="DIR", help=text)
        text = "print the runs, what they cost, and stop"
        parser.add_argument("--dry-run", action="store_true", help=text)

    def words(self, before: list[str], current: str) -> list[str]:
        """Complete keys of the default method too."""
        from sparsepretrain.studies import decay

        return super().words([decay.DEFAULT, *before], current)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain import config
        from sparsepretrain.config.compose import shell_line
        from sparsepretrain.studies import decay
        from sparsepretrain.training.schedules import warmup_steps

        overrides = decay.with_default(args.overrides)
        run = config.load(overrides, args.config_dir)
        steps = args.steps or warmup_steps(run.schedule, run.steps)
        low, high = args.grid
        grid = decay.log_grid(low, high, args.points)
        search = decay.DecaySearch(run, grid, args.interval, steps)
        out = args.out or search.out
        from sparsepretrain.tracking.console import Console

        console = Console()
        if args.dry_run:
            from sparsepretrain.studies.overview import show_cells

            show_cells(f"decay search for {run.sparsity.name}", search.cells, console)
            return 0
        result = decay.tune_decay(search, out, overrides, args.config_dir, console)
        runs = [run["directory"] for run in (result["dense"], *result["runs"])]
        console.info(shell_line(["sparsepretrain", "report", *runs]))
        if result["chosen"] is None:
            raise ConfigError(result["message"])
        console.info(f"to train with λ = {result['chosen']:.3g}:\n{result['message']}")
        return 0


def _pair(text: str) -> tuple[float, float]:
    with contextlib.suppress(ValueError):
        low, high = (float(part) for part in text.split(","))
        if 0 < low < high < math.inf:
            return low, high
    raise argparse.ArgumentTypeError(f"must be LOW,HIGH with 0 < LOW < HIGH, got {text!r}")
