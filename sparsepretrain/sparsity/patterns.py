"""N:M patterns of single layers: ``patterns`` of a method's options."""

from __future__ import annotations

import re
from collections.abc import Iterable

Pattern = tuple[int, int]
"""(N, M): N entries are kept of every M."""

DENSE = "dense"
"""Value in ``patterns`` of layers that are not made sparse."""


def pattern_in(text: str) -> Pattern | None:
    """Return (N, M) of ``2:4``, or None for ``dense``.

    Raises:
        ValueError: the text is neither.
    """
    if text == DENSE:
        return None
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"must be N:M with 1 ≤ N ≤ M, such as 2:4, or dense, got {text!r}")
    return int(match[1]), int(match[2])


def texts_of(patterns: Iterable[Pattern]) -> list[str]:
    """Return the distinct patterns as texts such as ``2:4``, the sparsest first."""
    by_density = sorted(set(patterns), key=lambda pattern: (pattern[0] / pattern[1], pattern))
    return [f"{n}:{m}" for n, m in by_density]


def pattern_text(*patterns: Pattern) -> str:
    """Return ``2:4``, or several patterns as ``1:4+2:4``, the sparsest first."""
    return "+".join(texts_of(patterns))
