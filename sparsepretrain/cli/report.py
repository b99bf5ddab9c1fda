"""Verb ``report``: plots and a page of run directories, or of a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import UsageError, Verb, add_config_dir, add_records, seeds
from sparsepretrain.registry import register


@register("verb", "report")
class Report(Verb):
    summary = "draw plots and write a report from run directories, or of a table"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        text = "run directories; or a table of `sparsepretrain reproduce --list` and the "
        text += "KEY=VALUE of its runs"
        parser.add_argument("words", nargs="+", metavar="RUN|TABLE", help=text)
        parser.add_argument("--out", type=Path, metavar="DIR", help="where to write")
        table = parser.add_argument_group("of a table")
        table.add_argument("--scale", choices=("nano", "paper"), help="nano where there is one")
        table.add_argument("--seeds", type=seeds, metavar="SEEDS", help="those of reproduce")
        text = "also write DIR/records/TABLE.json.gz, from which the report can be rewritten"
        table.add_argument("--record", action="store_true", help=text)
        text = "read this file instead of runs"
        table.add_argument("--from-record", action="store_true", help=text)
        add_records(table)
        add_config_dir(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.reports.report import report
        from sparsepretrain.studies.cells import Selection
        from sparsepretrain.studies.report import report_table
        from sparsepretrain.studies.tables import names

        name, *overrides = args.words
        if name not in names(args.config_dir):
            if args.scale or args.seeds or args.record or args.from_record or args.records:
                raise UsageError(f"{name} is not a table: leave out the flags of tables")
            written = report([*map(Path, args.words)], args.out, page=True)
        else:
            if wrong := [word for word in overrides if "=" not in word]:
                raise UsageError(f"{wrong[0]!r} after the table {name}: give KEY=VALUE")
            asked = Selection(
                args.seeds,
                overrides=overrides,
                config_dirs=args.config_dir,
                records=args.records,
            )
            written = report_table(
                name, args.out, args.scale, asked, record=args.record, from_record=args.from_record
            )
        print(*written, sep="\n")
        return 0
