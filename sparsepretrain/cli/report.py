"""The verb ``report``: plots and a page from run directories."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import Verb
from sparsepretrain.registry import register


@register("verb", "report")
class Report(Verb):
    summary = "draw plots and write a report from run directories"
    place = 8

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
        parser.add_argument("--out", type=Path, metavar="DIR", help="where to write")

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain import reports
        from sparsepretrain.tracking.console import Console

        with Console().own_warnings():
            written = reports.report(args.runs, args.out)
        print(*written, sep="\n")
        return 0
