"""Range rules that the options of several methods share; each yields (key, message)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Problems = Iterator[tuple[str, str]]


def at_least(minimum: int, options: Any, *keys: str) -> Problems:
    """Values must be ≥ ``minimum``."""
    for key in keys:
        if getattr(options, key) < minimum:
            yield key, f"must be ≥ {minimum}, got {getattr(options, key)}"


def fraction(options: Any, *keys: str) -> Problems:
    """Values must lie in [0, 1]."""
    for key in keys:
        if not 0 <= getattr(options, key) <= 1:
            yield key, f"must lie in [0, 1], got {getattr(options, key)}"


def proper_fraction(options: Any, *keys: str) -> Problems:
    """Values must lie in [0, 1): at 1 no step would be left."""
    for key in keys:
        if not 0 <= getattr(options, key) < 1:
            yield key, f"must lie in [0, 1), got {getattr(options, key)}"


def two_of_four(options: Any, what: str) -> Problems:
    """A possible pattern must be 2:4, because ``what`` exists for no other."""
    if 1 <= options.n <= options.m and (options.n, options.m) != (2, 4):
        key = "m" if options.m != 4 else "n"
        yield key, f"does not fit {what}: 2:4 only, got {options.n}:{options.m}"
