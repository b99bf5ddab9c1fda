"""The ``sparsepretrain`` command: verbs that import what they need when they are called."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sparsepretrain import __version__, registry
from sparsepretrain.cli._streams import replace_closed_streams, silence_stdout, stdout_is_closed
from sparsepretrain.cli.completion import COMPLETION, override_words, recipe_words, setting_words
from sparsepretrain.errors import (
    INTERRUPTED,
    CheckpointError,
    ConfigError,
    SparsePretrainError,
    own_warnings,
)

if TYPE_CHECKING:
    from sparsepretrain.config.schema import Run
    from sparsepretrain.runs.directory import RunDirectory

USAGE_ERROR = 2

EXAMPLES = """\
examples:
  sparsepretrain train                                     gpt2_nano with S-STE: offline, minutes
  sparsepretrain train sparsity=srste sparsity.decay=1e-4 seed=1
  sparsepretrain train model=gpt2_124m sparsity=sste --dry-run
  sparsepretrain train --config-dir my_configs plugins=[my_method.py] sparsity=mine
exit codes:
  0 done, 2 config, 3 data, 4 checkpoint, 5 diverged, 130 interrupted, 143 preempted after a save
"""


class UsageError(SparsePretrainError):
    """A verb, flag or argument that does not exist: exit code 2."""

    exit_code = USAGE_ERROR
    label = "usage error"


class Parser(argparse.ArgumentParser):
    """argparse with our one-line errors and a suggestion for a mistyped flag."""

    def error(self, message: str) -> NoReturn:
        """Replace argparse's usage text and exit."""
        raise UsageError(message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positionals in any order."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        for word in argv:
            flag = word.partition("=")[0]
            if word.startswith("--") and flag != "--" and flag not in flags:
                raise UsageError(f"unknown flag {flag!r}{registry.suggestion(flag, flags)}")
        return self.parse_intermixed_args(argv)


@dataclass(slots=True, kw_only=True)
class Bench:
    """Arguments of ``bench``."""

    suite: str = "cpu"
    """Which measurements."""
    out: str | None = None
    """JSON file for the results."""
    quick: bool = False
    """Fewer repetitions: does it run, not how fast."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; errors of the user are one line each.

    Args:
        argv: arguments without the program name; ``sys.argv`` by default.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # before torch loads OpenMP: threads that spin while they wait make a run on a busy machine up
    # to twenty times slower, and gain nothing on an idle one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for ᵀ
    try:
        with own_warnings(lambda line: _complain(f"warning: {line}")):
            code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except SparsePretrainError as error:
        for line in getattr(error, "messages", None) or [str(error)]:
            _complain(f"{error.label}: {line}")
        return error.exit_code
    except SystemExit as stop:  # nothing of ours: a plugin's code
        place = registry.origin(stop) or "some code"
        _complain(f"error: {place} called sys.exit({stop.code!r}), which ended the command")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        silence_stdout()
        _complain(f"error: disk full: cannot write {error.filename or 'the output'}")
        return CheckpointError.exit_code
    except Exception as error:
        # argparse and OmegaConf can turn an interrupt into an error of their own
        context = error.__context__
        while context is not None and not isinstance(context, KeyboardInterrupt):
            context = context.__context__
        if context is None:
            raise
        _complain("interrupted")
        return INTERRUPTED


def _complain(text: str) -> None:
    """One line on the standard error, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"sparsepretrain: {' '.join(text.split())}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if argv else USAGE_ERROR
    if verb in ("-V", "--version"):
        print(f"sparsepretrain {__version__}")
        return 0
    if verb == "__complete":
        return _complete(rest)
    if verb not in VERBS:
        hint = registry.suggestion(verb, VERBS)
        if "=" in verb:
            hint = f" (did you mean 'sparsepretrain train {verb}'?)"
        raise UsageError(f"unknown verb {verb!r}{hint}")
    run, _ = VERBS[verb]
    try:
        args = _parser(verb).read(rest)
    except SystemExit as stop:  # argparse ends --help this way
        return int(stop.code or 0)
    return run(args)


def _help() -> str:
    width = max(map(len, VERBS)) + 2
    lines = [f"  {verb:<{width}}{summary}" for verb, (_, summary) in VERBS.items()]
    return "\n".join(
        [
            "usage: sparsepretrain VERB [arguments]   (sparsepretrain VERB --help says more)",
            "",
            "Pre-train 2:4 and N:M sparse networks.",
            "",
            *lines,
            "",
            EXAMPLES,
        ]
    )


def _parser(verb: str) -> Parser:
    """The arguments of one verb."""
    parser = Parser(prog=f"sparsepretrain {verb}", description=VERBS[verb][1], allow_abbrev=False)
    if verb == "eval":
        from sparsepretrain.cli import eval as evaluating

        evaluating.add_arguments(parser)
    if verb == "finetune":
        parser.add_argument(
            "checkpoint",
            metavar="CHECKPOINT",
            help="run directory, checkpoint in it, or Hugging Face checkpoint",
        )
    if verb in ("train", "finetune", "tune-decay", "prepare", "methods"):
        parser.add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help="group=option or key=value"
        )
    if verb in ("train", "finetune", "tune-decay", "eval", "prepare", "methods", "configs"):
        parser.add_argument(
            "--config-dir",
            action="append",
            default=[],
            type=Path,
            metavar="DIR",
            help="your own YAML files, laid out like configs/; may be repeated",
        )
    if verb in ("train", "finetune"):
        parser.add_argument(
            "--cfg", choices=["job"], help="print the resolved configuration and stop"
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="print coverage, parameters, FLOPs, memory and time, and stop",
        )
    elif verb == "tune-decay":
        from sparsepretrain.cli import tune_decay as tuning

        tuning.add_flags(parser)
    elif verb == "prepare":
        parser.add_argument("--workers", type=_count, help="processes; default: one per core")
    elif verb == "report":
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
        parser.add_argument("--out", type=Path, metavar="DIR", help="where to write")
    elif verb == "bench":
        keys = " ".join(f"{f.name}={f.default}" for f in fields(Bench))
        parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=f"defaults: {keys}")
    elif verb == "completion":
        parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 1, got {text!r}")
    return int(text)


def _train(args: argparse.Namespace) -> int:
    from sparsepretrain.config.compose import read
    from sparsepretrain.config.validate import load_request

    request = read(args.overrides, args.config_dir)
    run = load_request(request)
    if args.cfg:
        print("".join(f"# {note}\n" for note in request.notes), end="")
    elif request.notes:
        from sparsepretrain.tracking.console import Console

        Console().info("\n".join(request.notes))
    return _start(args, run)


def _finetune(args: argparse.Namespace) -> int:
    from sparsepretrain.tracking.console import Console
    from sparsepretrain.training import derive

    if "=" in args.checkpoint:
        raise UsageError(f"the checkpoint comes first, got {args.checkpoint!r}")
    found = derive.finetuned(args.checkpoint, args.overrides, args.config_dir, Console())
    return _start(args, found)


def _start(args: argparse.Namespace, run: Run) -> int:
    """Print, plan or train a run."""
    from sparsepretrain.config.freeze import to_yaml
    from sparsepretrain.runs.directory import RunDirectory

    if args.cfg:
        print(to_yaml(run.plain), end="")
        return 0
    from sparsepretrain import training

    run = training.settle(run)
    if args.dry_run:
        training.dry_run(run)
        return 0
    code = training.train(run)
    if code == 0:
        _illustrate(RunDirectory.of(run))
    return code


def _illustrate(directory: RunDirectory) -> None:
    """Plots and report of a finished run; a failure here does not undo the training."""
    record, page = directory.record_file, directory.report_file
    if page.exists() and record.exists() and page.stat().st_mtime >= record.stat().st_mtime:
        return  # the run was finished before
    from sparsepretrain import reports
    from sparsepretrain.tracking.console import Console

    try:
        written = reports.report([directory.path])
    except Exception as error:
        Console().warn(f"no report: {error}; try `sparsepretrain report {directory}`")
        return
    Console().info(f"plots: {directory.plots}\nreport: {written[-1]}")


def _tune_decay(args: argparse.Namespace) -> int:
    from sparsepretrain.cli import tune_decay as tuning

    return tuning.run(args)


def _eval(args: argparse.Namespace) -> int:
    from sparsepretrain.cli import eval as evaluating

    return evaluating.run(args)


def _prepare(args: argparse.Namespace) -> int:
    from sparsepretrain.cli import prepare as preparing

    return preparing.run(args)


def _methods(args: argparse.Namespace) -> int:
    from sparsepretrain.cli._listing import print_methods

    print_methods(args.overrides, args.config_dir)
    return 0


def _configs(args: argparse.Namespace) -> int:
    from sparsepretrain.cli._listing import print_configs

    print_configs(args.config_dir)
    return 0


def _report(args: argparse.Namespace) -> int:
    from sparsepretrain import reports
    from sparsepretrain.tracking.console import Console

    with Console().own_warnings():
        written = reports.report(args.runs, args.out)
    for path in written:
        print(path)
    return 0


def _bench(args: argparse.Namespace) -> int:
    import yaml

    from sparsepretrain.config.strict import build

    settings: dict[str, Any] = {}
    for word in args.settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} has no value; write {key}=value")
        try:
            settings[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{word!r} cannot be read") from error
    request = build(Bench, settings)
    from sparsepretrain import bench

    if request.suite not in bench.SUITES:
        hint = registry.suggestion(request.suite, bench.SUITES)
        raise ConfigError(f"unknown suite {request.suite!r}{hint}")
    out = Path(request.out) if request.out else None
    result = bench.run(suite=request.suite, out=out, quick=request.quick)
    return 0 if result["within_limits"] else 1


def _completion(args: argparse.Namespace) -> int:
    print(COMPLETION[args.shell], end="")
    return 0


def _complete(words: list[str]) -> int:
    """Hidden verb behind the completion scripts: candidates for the last of ``words``."""
    *before, current = words or [""]
    if not before:
        found = [*VERBS, "--help", "--version"]
    elif before[0] not in VERBS:
        found = []
    else:
        actions = _parser(before[0])._actions
        found = [flag for action in actions for flag in action.option_strings if flag[:2] == "--"]
        found += [c for a in actions if not a.option_strings for c in a.choices or ()]
        if before[0] == "bench":
            from sparsepretrain.bench import SUITES

            found += [*setting_words(Bench, current), *(f"suite={name}" for name in SUITES)]
        if before[0] == "eval":
            from sparsepretrain.cli.eval import Settings

            found += setting_words(Settings, current)
        if before[0] == "finetune":
            found += recipe_words(current)
        if any(action.dest == "overrides" for action in actions) and current[:1] != "-":
            # the keys of the method that is tuned when none is chosen
            default = ["sparsity=tsrste"] if before[0] == "tune-decay" else []
            found += override_words([*default, *before[1:]], current)
    matching = [word for word in found if word.startswith(current)]
    print("\n".join(matching), end="\n" if matching else "")
    return 0


VERBS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "train": (
        _train,
        "train a model; model=… brings the paper's recipe, everything can be changed",
    ),
    "finetune": (_finetune, "fine-tune a run or a Hugging Face checkpoint on task=…"),
    "tune-decay": (_tune_decay, "find the decay factor of tsrste or srste on the warm-up alone"),
    "eval": (_eval, "metrics of a checkpoint on a whole split; sparse or densified, averaged"),
    "prepare": (_prepare, "download, tokenize and store a data set without training"),
    "methods": (_methods, "list the methods: what each matrix product sees, and the paper"),
    "configs": (_configs, "list the configuration groups, their options and where they come from"),
    "report": (_report, "draw plots and write a report from run directories"),
    "bench": (_bench, "measure step times and memory; writes JSON"),
    "completion": (_completion, "print a completion script for bash, zsh or fish"),
}
