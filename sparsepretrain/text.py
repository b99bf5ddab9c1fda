"""Text for people, without a library."""

from __future__ import annotations

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equal length as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in aligned]
