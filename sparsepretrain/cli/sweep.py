"""Verb ``sweep``: runs of every combination of values, or a search for the best."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import UsageError, integer_from
from sparsepretrain.cli.reproduce import StudyVerb
from sparsepretrain.registry import register

DESCRIPTION = """\
Train every combination of values: sparsity=ste,srste seed=0..4 optim.lr=1e-3,2e-3. Values are
separated by commas, or range(0,10,2), glob(s*) of the options of a group, 0..4 for integers; a list
in brackets is one value. Each run is an ordinary one in runs/NAME/VALUES/HASH-sSEED, checked,
skipped and continued as in reproduce. --search lets Optuna choose N trials from values and ranges,
as optim.lr=1e-4..1e-2 (logarithmic), interval(0,0.5) or 2..8, for the best metric of the last
evaluation, averaged over seeds.
"""


@register("verb", "sweep")
class Sweep(StudyVerb):
    summary = "train every combination of values, or search for the best"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        super().add_arguments(parser)
        text = "directory below runs_dir; default: sweep"
        parser.add_argument("--name", default="sweep", metavar="NAME", help=text)
        text = "search with N trials (needs the extra sweep)"
        parser.add_argument("--search", type=integer_from(1), metavar="N", help=text)
        text = "validation metric to search for; default: loss"
        parser.add_argument("--metric", default="loss", metavar="KEY", help=text)
        text = "search for the largest value instead of the smallest"
        parser.add_argument("--maximize", action="store_true", help=text)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config.compose import shell_line
        from sparsepretrain.errors import ConfigError
        from sparsepretrain.files import is_plain_name
        from sparsepretrain.studies import overview, reproduce, sweep
        from sparsepretrain.tracking.console import Console

        if not is_plain_name(args.name):
            raise ConfigError(f"--name must be a plain directory name, got {args.name!r}")
        axes = sweep.read_axes(args.overrides, args.config_dir, search=args.search is not None)
        if args.search is None:
            found = axes.part(args.name, args.stop_after, args.config_dir)
            return self.start(args, [found], sweep.report_words(found))
        if args.commands or args.slurm:
            raise UsageError("--commands and --slurm do not work with --search")
        console = Console()
        first = axes.first().part(args.name, args.stop_after, args.config_dir)
        ranges = [f"{key} in {limits}" for key, limits in axes.ranges.items()]
        ranges += [f"{key} of {', '.join(values)}" for key, values in axes.values.items()]
        if args.dry_run:
            overview.show_plan(reproduce.check([first], console, prepared=False), console)
            console.info(f"search: {args.search} trials like this, {'; '.join(ranges)}")
            return 0
        (first,) = reproduce.check([first], console)
        search = sweep.Search(first, axes, args.search, args.metric, args.maximize)
        command = search.run(console, jobs=args.jobs)
        console.info(f"to train with the best values:\n{command}")
        console.info(f"sparsepretrain report {shell_line([first.cells[0].run.runs_dir])}")
        return 0
