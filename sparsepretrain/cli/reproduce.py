"""Verb ``reproduce``: run a table of a paper."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import (
    ConfiguredVerb,
    UsageError,
    add_records,
    add_study_flags,
    integer_from,
    run_study,
    seeds,
)
from sparsepretrain.registry import register

DESCRIPTION = """\
Run a table of a paper: every cell with every seed, each an ordinary run in
runs/TABLE/CELL/HASH-sSEED. A table may tune its rows first: the best setting of each is then run
with the table's seeds. All cells are checked before the first one starts. Finished runs are
skipped, partial ones continue. A failed run stays as a row while the other runs continue; the exit
code is then 1, and the next call tries it again. Runs print to console.log in their directories,
one at a time on each GPU; a run with parallel.nproc=K takes K GPUs. Ctrl-C ends cleanly, and the
same command continues. Overrides apply to all cells. hydra/launcher=submitit_slurm trains them as
jobs of a cluster, which outlive the command.
"""


@register("verb", "reproduce")
class Reproduce(ConfiguredVerb):
    summary = "run a table of a paper, all cells and seeds, or list the tables"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.add_argument("table", nargs="?", metavar="TABLE", help="a file of configs/table")
        super().add_arguments(parser)
        add_study_flags(parser)
        text = "end every run after N steps; the same command without it continues"
        parser.add_argument("--stop-after", type=integer_from(1), metavar="N", help=text)
        text = "print the cells with remaining work and costs, and stop"
        parser.add_argument("--dry-run", action="store_true", help=text)
        text = "paper: as published; nano: small runs on the CPU; default: nano where there is one"
        parser.add_argument("--scale", choices=["paper", "nano"], help=text)
        text = "number of seeds (5), a range (101..105) or a list (3,7,11); default: the table's"
        parser.add_argument("--seeds", type=seeds, metavar="SEEDS", help=text)
        add_records(parser)
        text = "only cells whose row or 'row @ column' matches"
        parser.add_argument("--only", default="*", metavar="GLOB", help=text)
        text = "print the tables, and minutes at nano scale"
        parser.add_argument("--list", action="store_true", help=text)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config.compose import shell_line
        from sparsepretrain.console import Console
        from sparsepretrain.studies import judged, multirun, overview, reproduce
        from sparsepretrain.studies.cells import Selection, seeds_text
        from sparsepretrain.studies.launchers import SlurmQueueConf
        from sparsepretrain.studies.plugins import is_hydras

        if args.list:
            overview.show_tables(args.config_dir, Console())
            return 0
        if args.table is None or "=" in args.table:
            raise UsageError("the table comes first: `sparsepretrain reproduce --list` shows them")
        hydras = [word for word in args.overrides if is_hydras(word)]
        overrides = [word for word in args.overrides if not is_hydras(word)]
        launcher = multirun.launcher_of_table(hydras, args.table, args.config_dir)
        nodes = getattr(launcher, "nodes", 1)
        asked = Selection(args.seeds, args.only, overrides, args.config_dir, nodes, args.records)
        given = (args.table, args.scale, asked, args.stop_after)
        found = reproduce.parts(*given)
        for part in found:
            for command in part.table.bench:
                print(f"{part.name} is measured from a checkout, on a GPU: {command}")
            if part.outdated:
                Console().warn(
                    f"{part.name}: {part.outdated} finished runs of the record have another "
                    "configuration than the table has now, and run again"
                )
        found = [part for part in found if part.cells]
        words = [args.table, *(["--scale", args.scale] if args.scale else [])]
        words += ["--seeds", seeds_text(args.seeds)] if args.seeds else []
        words += ["--records", str(args.records)] if args.records else []
        words += [word for d in args.config_dir for word in ("--config-dir", str(d))]
        report = shell_line([*words, *overrides])
        tuning = [part for part in found if part.is_tuning]
        if tuning and (args.dry_run or args.commands):
            Console().warn(
                "rows with unfinished tuning runs are left out: repeat the command after them"
            )
        elif tuning:
            later = judged.judged_jobs(*given) if isinstance(launcher, SlurmQueueConf) else {}
            run_study(args, tuning, "", launcher, later)
            parts = reproduce.parts(*given)
            found = [part for part in parts if part.cells and not part.is_tuning]
        if args.records and not found:
            print(f"all runs of {args.table} are in the record")
        return run_study(args, found, report, launcher) if found else 0
