"""Verb ``train``: print, plan or train a run, or several with ``-m``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsepretrain.cli._verb import (
    ConfiguredVerb,
    UsageError,
    add_study_flags,
    integer_from,
    run_study,
)
from sparsepretrain.processes import rank
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from sparsepretrain.config.schema import Run
    from sparsepretrain.runs.directory import RunDirectory

EXAMPLES = """\
examples:
  sparsepretrain train sparsity=sste sparsity.gamma=0.2
  sparsepretrain train model=gpt2_124m sparsity=srste optim.lr=1e-4 --dry-run
  sparsepretrain train -m sparsity=ste,sste seed=0,1 name=pair      four runs in runs/pair
  sparsepretrain train -m seed=0,1,2 hydra/launcher=submitit_slurm hydra.launcher.partition=gpu
  sparsepretrain train -m 'optim.lr=tag(log,interval(1e-4,1e-2))' hydra/sweeper=optuna

`sparsepretrain configs` lists groups and options; `sparsepretrain configs sparsity=sste` prints the
keys of an option with comments.
"""


class RunVerb(ConfiguredVerb):
    """Verb that trains a run."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        text = "print the resolved configuration and stop"
        parser.add_argument("--cfg", choices=["job"], help=text)
        text = "print coverage, parameters, FLOPs, memory and time, and stop"
        parser.add_argument("--dry-run", action="store_true", help=text)
        text = "end after N steps; the same command without it continues"
        parser.add_argument("--stop-after", type=integer_from(1), metavar="N", help=text)

    def start(self, args: argparse.Namespace, run: Run, notes: Sequence[str] = ()) -> int:
        """Act on a checked run as the flags say, after printing ``notes``."""
        from sparsepretrain.config.freeze import to_yaml
        from sparsepretrain.runs.directory import RunDirectory

        if args.cfg:
            print("".join(f"# {note}\n" for note in notes) + to_yaml(run.plain), end="")
            return 0
        from sparsepretrain.console import Console
        from sparsepretrain.training.schedules import resolve_steps

        console = Console() if rank() == 0 else Console.silent()
        if notes:
            console.info("\n".join(notes))
        run = resolve_steps(run)
        directory = RunDirectory.of(run)
        code = 0
        end = min(args.stop_after or run.steps, run.steps)
        if args.dry_run:
            console.loading(run.name)
            from sparsepretrain.training.plan import dry_run

            dry_run(run, console)
            return 0
        if run.resume == "auto" and directory.is_finished(run, end):
            console.info(directory.nothing_to_do(run, end))
        else:
            console.loading(run.name)
            from sparsepretrain.training.launch import train_or_launch

            code = train_or_launch(run, console, args.stop_after)
        if code == 0 and rank() == 0:
            illustrate(directory)
        return code


@register("verb", "train")
class Train(RunVerb):
    summary = "train a model; model=… is a paper's recipe, every key can be overridden; -m: several"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.epilog = EXAMPLES
        group = parser.add_argument_group("several runs")
        text = "train every combination of values KEY=A,B; name= names the directory of the runs"
        group.add_argument("-m", "--multirun", action="store_true", help=text)
        add_study_flags(group)

    def run(self, args: argparse.Namespace) -> int:
        if args.multirun:
            return self.run_several(args)
        if args.jobs or args.commands:
            flag = "--jobs" if args.jobs else "--commands"
            raise UsageError(f"{flag} is for several runs: add -m, or leave it out")
        from sparsepretrain.config.compose import read
        from sparsepretrain.config.validate import load_parsed

        parsed = read(args.overrides, args.config_dir)
        run = load_parsed(parsed)
        return self.start(args, run, parsed.notes)

    def run_several(self, args: argparse.Namespace) -> int:
        """Train all combinations of values, or the trials of a search."""
        if args.cfg:
            raise UsageError("--cfg prints one configuration: leave -m out")
        from sparsepretrain.config.compose import shell_line
        from sparsepretrain.studies import multirun

        found = multirun.read_command(args.overrides, args.config_dir, args.stop_after, args.jobs)
        if found.part is not None:
            report = shell_line([found.part.cells[0].run.runs_dir])
            return run_study(args, [found.part], report, found.study())
        if args.dry_run or args.commands:
            raise UsageError("a search chooses its runs one after the other: they cannot be listed")
        found.sweep()
        return 0


def illustrate(directory: RunDirectory) -> None:
    """Write plots and report of a finished run; a failure is a warning."""
    record = directory.record_file
    page = directory.report_file
    if page.exists() and record.exists() and page.stat().st_mtime >= record.stat().st_mtime:
        return  # up to date
    from sparsepretrain.console import Console

    console = Console()
    try:
        from sparsepretrain.reports.report import report

        written = report([directory.path])
    except Exception as error:
        console.warn(f"no report: {error}; try `sparsepretrain report {directory}`")
        return
    console.info(f"plots: {directory.plots}\nreport: {written[-1]}")
