"""Ranges of options, as ``"> 0"``, ``"≥ 1"``, ``"[0, 1)"``, ``"(0, 10^9]"``, and their messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Problems = Iterator[tuple[str, str]]
"""Invalid options as (key, message)."""


def outside(value: Any, limit: str, *, nullable: bool = False) -> str:
    """Return a message if ``value`` (a number, a list of numbers, or None) is out of range.

    None is always valid; with ``nullable`` the message mentions null.
    """
    several = isinstance(value, list | tuple)
    if all(v is None or _within(v, limit) for v in (value if several else [value])):
        return ""
    verb = "be" if limit[0] in ">≥" else "lie in"
    null = f" or {'be ' * (verb != 'be')}null" * nullable
    return f"must {verb} {limit}{null}, got {list(value) if several else value}"


def _within(value: float, limit: str) -> bool:
    low, high = (_number(end) for end in f"{limit.strip('>≥[]()')},inf".split(",")[:2])
    at_end = (value == low and limit[0] in "≥[") or (value == high and limit[-1] == "]")
    return low < value < high or at_end


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else float(text)
