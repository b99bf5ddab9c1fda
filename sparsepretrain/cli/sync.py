"""The verb ``sync``: W&B runs from the records of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import Verb
from sparsepretrain.registry import register

DESCRIPTION = """\
Rebuild the W&B run of each RUN from its metrics.jsonl, whatever the mirror of training did: the
same W&B run every time, nothing in it twice. Without a login it is written offline, for
`wandb sync`.
"""


@register("verb", "sync")
class Sync(Verb):
    summary = "rebuild a W&B run from the record of a run; again: only what is new"
    place = 9

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
        parser.add_argument(
            "--report", type=Path, metavar="DIR", help="also send the plots and tables of a report"
        )
        parser.add_argument(
            "--mode", choices=["online", "offline"], help="default: online with a login"
        )
        parser.add_argument("--project", help="W&B project; default: the run's")
        parser.add_argument("--entity", help="W&B user or team; default: the run's")

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.runs.directory import find_runs
        from sparsepretrain.tracking.sync import sync

        for run in find_runs(args.runs):
            sync(
                run,
                mode=args.mode,
                project=args.project,
                entity=args.entity,
                report=args.report,
            )
        return 0
