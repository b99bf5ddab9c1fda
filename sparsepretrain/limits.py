"""Ranges of options, declared beside the fields; the message is made here."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, ClassVar

Problems = Iterator[tuple[str, str]]
"""What is wrong with options, as (key, message)."""


class Limited:
    """Options whose numbers lie in ranges; those of a subclass take the place of its base's."""

    __slots__ = ()
    limits: ClassVar[dict[str, str]] = {}
    """Key -> ``"> 0"``, ``"≥ 1"``, ``"[0, 1)"`` …, for every value of a list; null is fine."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        for key, limit in self.limits.items():
            if message := outside(getattr(self, key), limit):
                yield key, message


def outside(value: Any, limit: str, *, nullable: bool = False) -> str:
    """What is wrong with a number, or with one of several; nothing is wrong with None.

    Args:
        value: a number, a list of them, or None.
        limit: written as in :class:`Limited`.
        nullable: whether the message says that null is possible.
    """
    several = isinstance(value, list | tuple)
    if all(v is None or within(v, limit) for v in (value if several else [value])):
        return ""
    verb = "be" if limit[0] in ">≥" else "lie in"
    null = f" or {'be ' * (verb != 'be')}null" * nullable
    return f"must {verb} {limit}{null}, got {list(value) if several else value}"


def within(value: float, limit: str) -> bool:
    """Whether ``value`` satisfies ``limit``, which is written as in :class:`Limited`."""
    if limit[0] in ">≥":
        compare: Any = operator.gt if limit[0] == ">" else operator.ge
        return bool(compare(value, _number(limit[1:])))
    low, high = (_number(part) for part in limit[1:-1].split(","))
    inside = low < value < high
    return inside or (value == low and limit[0] == "[") or (value == high and limit[-1] == "]")


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else float(text)
