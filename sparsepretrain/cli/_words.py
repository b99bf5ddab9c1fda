"""Words of the configuration that complete what is typed."""

from __future__ import annotations

from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sparsepretrain.config.compose import compose
from sparsepretrain.config.freeze import flat
from sparsepretrain.config.groups import GROUPS, REGISTERED, key_of, options_of
from sparsepretrain.config.places import catalogue
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError


def override_words(typed: list[str], current: str) -> list[str]:
    """``group=`` and ``key=`` of the configuration typed so far, or the values of one of them."""
    directories = [Path(b) for a, b in pairwise(typed) if a == "--config-dir"]
    groups = catalogue(directories)
    group, equals, _ = current.partition("=")
    if group in groups and equals:
        return [f"{group}={option}" for option in groups[group]]
    settled = [word for word in typed if "=" in word and not word.startswith("-")]
    try:
        plain = compose(settled, directories)
    except ConfigError:
        plain = compose((), directories)
    if equals:
        return [f"{group}={value}" for value in _values_of(plain, group)]
    return [f"{word}=" for word in (*groups, *flat(plain)) if word != "experiment"]


def values(hint: Any) -> list[str]:
    """What a key of this type can be, where that is a list: words of a Literal, booleans, null."""
    if hint is bool:
        return ["true", "false"]
    if hint is type(None):
        return ["null"]
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    parts = get_args(hint) if isinstance(hint, UnionType) else ()
    return [value for part in parts for value in values(part)]


def setting_words(settings: type, current: str) -> list[str]:
    """``key=`` and ``key=value`` of a dataclass of settings."""
    hints = get_type_hints(settings)
    key, equals, _ = current.partition("=")
    if not equals:
        return [f"{name}=" for name in hints]
    return [f"{key}={value}" for value in values(hints.get(key))]


def _values_of(plain: dict[str, Any], key: str) -> list[str]:
    """Values of a dotted key of the configuration."""
    head, *rest = key.split(".")
    hint: Any = Run
    if rest and head in {*GROUPS, *REGISTERED}:
        hint = options_of(head, plain[head][key_of(head)])
    else:
        rest = [head, *rest]
    for part in rest:
        hint = get_type_hints(hint).get(part) if is_dataclass(hint) else None
    return values(hint)
