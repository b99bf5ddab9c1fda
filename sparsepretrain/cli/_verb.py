"""Base classes of verbs, and shared arguments.

``sparsepretrain --help`` imports every verb. Methods therefore import slow libraries (torch, Hydra,
YAML) on first use.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from sparsepretrain.errors import ConfigError, SparsePretrainError


class UsageError(SparsePretrainError):
    """Unknown verb, flag or argument: exit code 2."""

    exit_code = 2
    label = "usage error"


class Verb(ABC):
    """Command such as ``sparsepretrain train``, registered under its name."""

    summary: ClassVar[str] = ""
    """Line of ``sparsepretrain --help``, and default description of the verb's help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - none by default
        """Add arguments to ``parser``; may replace its ``description``."""

    def words(self, before: list[str], current: str) -> list[str]:
        """Return completion candidates other than flags and choices of arguments.

        Args:
            before: words after the verb.
            current: word at the cursor; candidates with another prefix are dropped.
        """
        return []

    @abstractmethod
    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code.

        Raises:
            SparsePretrainError: becomes one line and its exit code.
        """


class ConfiguredVerb(Verb):
    """Verb with overrides of a run's configuration and ``--config-dir``."""

    settings: ClassVar[type | None] = None
    """Dataclass of the verb's own keys, see :func:`read_settings`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add ``overrides`` and ``config_dir``."""
        keys = fields(self.settings) if self.settings else ()
        own = "; also " * bool(keys) + " ".join(f"{f.name}={f.default}" for f in keys)
        parser.add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help=f"group=option or key=value{own}"
        )
        add_config_dir(parser)

    def words(self, before: list[str], current: str) -> list[str]:
        """Return groups, options, keys and values of the configuration typed so far."""
        if current[:1] == "-":
            return []
        key, equals, _ = current.partition("=")
        hints = get_type_hints(self.settings) if self.settings else {}
        own = (
            [f"{key}={v}" for v in _values(hints.get(key))] if equals else [f"{k}=" for k in hints]
        )
        return [*own, *_override_words(before, current)]


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
    from sparsepretrain.config.cells import read_seeds

    try:
        return read_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _override_words(typed: list[str], current: str) -> list[str]:
    """Return ``group=`` and ``key=`` of the configuration, or the values of a key."""
    from sparsepretrain.config.compose import compose
    from sparsepretrain.config.freeze import flat
    from sparsepretrain.config.places import catalog

    directories = [Path(b) for a, b in pairwise(typed) if a == "--config-dir"]
    groups = catalog(directories)
    group, equals, _ = current.partition("=")
    if group in groups and equals:
        return [f"{group}={option}" for option in groups[group]]
    overrides = [word for word in typed if "=" in word and not word.startswith("-")]
    try:
        plain = compose(overrides, directories)
    except ConfigError:
        plain = compose((), directories)
    if equals:
        return [f"{group}={value}" for value in _values_of(plain, group)]
    return [f"{word}=" for word in (*groups, *flat(plain)) if word != "experiment"]


def _values(hint: Any) -> list[str]:
    """Return the values of an enumerable type: Literal, bool, None, or a union of them."""
    if hint is bool:
        return ["true", "false"]
    if hint is type(None):
        return ["null"]
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [value for part in parts for value in _values(part)]


def _values_of(plain: dict[str, Any], key: str) -> list[str]:
    from sparsepretrain.config.groups import GROUPS, REGISTERED, key_of, options_of
    from sparsepretrain.config.schema import Run

    head, *rest = key.split(".")
    hint: Any = Run
    if rest and head in {*GROUPS, *REGISTERED}:
        hint = options_of(head, plain[head][key_of(head)])
    else:
        rest = [head, *rest]
    for part in rest:
        hint = get_type_hints(hint).get(part) if is_dataclass(hint) else None
    return _values(hint)
