"""Equations of ``torch.einsum`` that multiply tokens by slices of a bank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Label = str | int
"""A letter, or a number below 0: an axis that ``...`` stands for, counted from the last."""


class Product(NamedTuple):
    """Labels of an equation in which each token is multiplied by slices of a bank."""

    x: list[Label]
    result: list[Label]
    slices: list[Label]  # all axes of the bank but the last two
    tokens: list[Label]  # axes that X alone has
    summed: Label  # of the last two axes of the bank, the one that X has too
    kept: Label  # the other one
    sums_last: bool


def product_of(text: str, ranks: Sequence[int], place: int) -> Product | None:
    """Return what an equation computes; None: it is no matmul of tokens with slices of a bank.

    Args:
        text: the equation.
        ranks: number of axes of each operand.
        place: the bank's place among the operands.
    """
    if len(ranks) != 2 or text.count(",") != 1:
        return None
    operands, result = _parse(text, ranks)
    # torch refuses other numbers of labels; a label that occurs twice is a diagonal
    if any(len({*labels}) != rank for labels, rank in zip(operands, ranks, strict=True)):
        return None
    x = operands[1 - place]
    *slices, row, column = operands[place]
    sums_last = column in x
    summed, kept = (column, row) if sums_last else (row, column)
    tokens = [label for label in x if label not in operands[place]]
    is_matmul = summed in x and summed not in result and kept in result and kept not in x
    # a slice that neither X nor the result tells apart would be a sum of weights
    if not is_matmul or not {*tokens} <= {*result} or not {*slices} <= {*x, *result}:
        return None
    return Product(x, result, slices, tokens, summed, kept, sums_last)


def _parse(text: str, ranks: Sequence[int]) -> tuple[list[list[Label]], list[Label]]:
    """Return the labels of operands with these numbers of axes, and those of the result.

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
        return operands, _labels(result, hidden)
    letters = Counter(label for labels in operands for label in labels if isinstance(label, str))
    once = sorted(label for label, times in letters.items() if times == 1)
    return operands, [*range(-hidden, 0), *once]


def _labels(term: str, axes: int) -> list[Label]:
    """Return the labels of a term in which ``...`` stands for a number of axes."""
    before, dots, after = term.partition("...")
    return [*before, *(range(-axes, 0) if dots else ()), *after]
