"""Equations of ``torch.einsum`` as labels: one for each axis of each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Label = str | int
"""A letter, or a number below 0: an axis that ``...`` stands for, counted from the last."""


class Equation(NamedTuple):
    """Labels of the axes of the operands and of the result."""

    operands: list[list[Label]]
    result: list[Label]


def parse(text: str, ranks: Sequence[int]) -> Equation:
    """Read an equation that torch accepts for operands with these numbers of axes.

    Without ``->`` the result has the axes of ``...``, then the labels that occur once, in
    alphabetical order.
    """
    given, arrow, result = text.replace(" ", "").partition("->")
    terms = given.split(",")
    hidden = 0  # axes that the widest ... stands for
    operands = []
    for term, rank in zip(terms, ranks, strict=True):
        axes = rank - len(term.replace("...", ""))
        hidden = max(hidden, axes if "..." in term else 0)
        operands.append(_labels(term, axes))
    if arrow:
        return Equation(operands, _labels(result, hidden))
    letters = Counter(label for labels in operands for label in labels if isinstance(label, str))
    once = sorted(label for label, times in letters.items() if times == 1)
    return Equation(operands, [*range(-hidden, 0), *once])


def _labels(term: str, axes: int) -> list[Label]:
    """Return the labels of a term in which ``...`` stands for a number of axes."""
    before, dots, after = term.partition("...")
    return [*before, *(range(-axes, 0) if dots else ()), *after]
