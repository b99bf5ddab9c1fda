"""Base classes of verbs, and shared arguments.

``sparsepretrain --help`` imports every verb. Methods therefore import slow libraries (torch, Hydra,
YAML) on first use.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepretrain.errors import SparsePretrainError

if TYPE_CHECKING:
    from sparsepretrain.studies.cells import Part
    from sparsepretrain.studies.jobs import Job
    from sparsepretrain.studies.launchers import Launcher
    from sparsepretrain.studies.progress import Progress


class UsageError(SparsePretrainError):
    """Unknown verb, flag or argument: exit code 2."""

    exit_code = 2
    label = "usage error"


class Verb(ABC):
    """Command such as ``sparsepretrain train``, registered under its name."""

    summary: ClassVar[str] = ""
    """Line of ``sparsepretrain --help``, and default description of the verb's help."""

    settings: ClassVar[type | None] = None
    """Dataclass of the verb's own keys, see :func:`read_settings`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - none by default
        """Add arguments to ``parser``; may replace its ``description``."""

    @abstractmethod
    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code.

        Raises:
            SparsePretrainError: becomes one line and its exit code.
        """


class ConfiguredVerb(Verb):
    """Verb with overrides of a run's configuration and ``--config-dir``."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add ``overrides`` and ``config_dir``."""
        keys = fields(self.settings) if self.settings else ()
        settings = "; also " + " ".join(f"{f.name}={f.default}" for f in keys) if keys else ""
        parser.add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help=f"group=option or key=value{settings}"
        )
        add_config_dir(parser)


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--config-dir``, a list of paths."""
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="your own YAML files, laid out like configs/; may be repeated",
    )


def add_study_flags(parser: argparse._ActionsContainer) -> None:
    """Add ``--jobs`` and ``--commands``, the flags of several runs."""
    text = "cells at a time; on the CPU they share its threads; default: one per GPU, or 1"
    parser.add_argument("--jobs", type=integer_from(1), metavar="N", help=text)
    text = "print a shell line per cell, for any scheduler, and stop"
    parser.add_argument("--commands", action="store_true", help=text)


def add_records(parser: argparse._ActionsContainer) -> None:
    """Add ``--records``."""
    text = "count runs in DIR/TABLE.json.gz with the same configuration and seed as finished"
    parser.add_argument("--records", type=Path, metavar="DIR", help=text)


def run_study(
    args: argparse.Namespace,
    parts: Sequence[Part],
    report: str,
    launcher: Launcher | Progress,
    later: Mapping[str, Job] | None = None,
) -> int:
    """Act on the cells of a study as the flags say.

    Args:
        args: parsed arguments of :func:`add_study_flags`.
        parts: the cells.
        report: words after ``report`` for these runs, or empty.
        launcher: see :func:`reproduce.study_of`, as for ``later``.
    """
    from sparsepretrain.console import Console
    from sparsepretrain.studies import overview, reproduce

    console = Console()
    if args.dry_run:
        overview.show_plan(reproduce.check(parts, console, prepared=False), console)
        return 0
    # commands may be for another machine: no check, only lines are printed
    if args.commands:
        print(*reproduce.commands(parts), sep="\n")
        return 0
    parts = reproduce.check(parts, console)
    try:
        reproduce.run_parts(parts, console, jobs=args.jobs, launcher=launcher, later=later)
    finally:
        if report:
            console.info(f"sparsepretrain report {report}")
    return 0


def read_settings(settings: type, words: Sequence[str], *, others: list[str] | None = None) -> Any:
    """Return the dataclass ``settings`` filled from words ``key=value``.

    Args:
        settings: dataclass whose fields are the keys.
        words: words as typed; values are read as YAML.
        others: list that receives words with other keys; None: other keys are errors.

    Raises:
        UsageError: a word without a value.
        ConfigError: an unknown key or a wrong value.
    """
    import yaml

    from sparsepretrain.config.strict import build

    known = [f.name for f in fields(settings)]
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if others is not None and (key not in known or not equals):
            others.append(word)
            continue
        if not equals:
            raise UsageError(f"{word!r} has no value; write {key}=value")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{word!r}: the value is not valid YAML; quote it") from error
    return build(settings, values)


def integer_from(least: int) -> Any:
    """Return the argparse ``type`` of an integer ≥ ``least``."""

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer ≥ {least}, got {text!r}")
        return int(text)

    return read


def seeds(text: str) -> Any:
    """Return the seeds of a table, see :func:`cells.read_seeds`; an argparse ``type``."""
    from sparsepretrain.studies.cells import read_seeds

    try:
        return read_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
