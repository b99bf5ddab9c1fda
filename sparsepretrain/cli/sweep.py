"""Verb ``sweep``: runs of every combination of values."""

from __future__ import annotations

import argparse

from sparsepretrain.cli.reproduce import StudyVerb
from sparsepretrain.registry import register

DESCRIPTION = """\
Train every combination of values: sparsity=ste,srste seed=0..4 optim.lr=1e-3,2e-3. Values are
separated by commas, or range(0,10,2), or 0..4 for integers; a list in brackets is one value. Each
run is an ordinary one in runs/NAME/VALUES/HASH-sSEED, checked, skipped and continued as in
reproduce.
"""


@register("verb", "sweep")
class Sweep(StudyVerb):
    summary = "train every combination of values"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        super().add_arguments(parser)
        text = "directory below runs_dir; default: sweep"
        parser.add_argument("--name", default="sweep", metavar="NAME", help=text)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config.compose import shell_line
        from sparsepretrain.errors import ConfigError
        from sparsepretrain.files import is_plain_name
        from sparsepretrain.studies import sweep

        if not is_plain_name(args.name):
            raise ConfigError(f"--name must be a plain directory name, got {args.name!r}")
        axes = sweep.read_axes(args.overrides)
        part = axes.part(args.name, args.stop_after, args.config_dir)
        return self.start(args, [part], shell_line([part.cells[0].run.runs_dir]))
