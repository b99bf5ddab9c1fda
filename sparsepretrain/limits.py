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
            value = getattr(self, key)
            several = isinstance(value, list | tuple)
            if not all(v is None or within(v, limit) for v in (value if several else [value])):
                verb = "be" if limit[0] in ">≥" else "lie in"
                yield key, f"must {verb} {limit}, got {list(value) if several else value}"


def within(value: float, limit: str) -> bool:
    """Whether ``value`` satisfies ``limit``, which is written as in :class:`Limited`."""
    if limit[0] in ">≥":
        compare: Any = operator.gt if limit[0] == ">" else operator.ge
        return bool(compare(value, float(limit[1:])))
    low, high = map(float, limit[1:-1].split(","))
    inside = low < value < high
    return inside or (value == low and limit[0] == "[") or (value == high and limit[-1] == "]")
