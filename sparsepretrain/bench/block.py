"""An FFN and a transformer block of GPT-2, training and inference, over widths (``suite=block``).

S-STE Table 10 has this form; the sizes are those of the log that its authors published for their
predecessor (arXiv:2404.01847). As there, operands are made before the clock starts, since 64
micro-batches shared them. What making them costs is in ``suite=linear``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from sparsepretrain.bench import EVERYTHING, Choice
from sparsepretrain.bench.kernels import CUDA, Timed, Work, draw, skipped
from sparsepretrain.bench.linear import CPU, DENSE, described, timed
from sparsepretrain.bench.plain import Block

__all__ = ["cases", "draw", "report"]

SHAPES = [
    (4, 2048, 768, 12),
    (16, 2048, 768, 12),
    (4, 2048, 1024, 16),
    (16, 2048, 1024, 16),
    (4, 2048, 2048, 32),
    (16, 2048, 2048, 32),
    (4, 2048, 2560, 32),
    (4, 2048, 4096, 32),
    (4, 2048, 5120, 40),
]
"""(N sequences, n tokens each, d width, h heads); larger batches do not fit into 24 GB."""
TINY = (2, 16, 64, 2)
METHODS = ("sste", "tsrste")
"""Measured unless others are chosen: both papers'."""


def ffn(width: int, heads: int) -> nn.Module:
    """Two linear layers with GELU between them."""
    layers = {
        "up": nn.Linear(width, 4 * width),
        "gelu": nn.GELU(approximate="tanh"),
        "down": nn.Linear(4 * width, width),
    }
    return nn.Sequential(OrderedDict(layers))


MODULES: dict[str, Callable[[int, int], nn.Module]] = {"FFN": ffn, "block": Block}
PASSES = {"training": True, "inference": False}
"""Forward and backward, or the forward alone."""


def cases(quick: bool, choice: Choice = EVERYTHING) -> list[Timed | Work]:
    """Every size in turn; without a GPU these are skipped, and a tiny one is timed."""
    choice = choice._replace(methods=choice.methods or METHODS)
    shapes, device, rounds = SHAPES, CUDA, 5 if quick else 15
    found: list[Timed | Work] = []
    if not torch.cuda.is_available():
        found += [skipped(title, []) for title, *_ in _titles(choice)]
        shapes, device, rounds = [TINY], CPU, 2
    for title, build, training in _titles(choice):
        for batch, length, width, heads in shapes[: 2 if quick else None]:
            work = partial(
                timed,
                title,
                [batch, length, width, heads],
                partial(build, width, heads),
                (batch, length, width),
                device,
                rounds,
                choice,
                targets=["*.up", "*.down"],
                fresh=False,
                training=training,
            )
            found.append(work)
    return found


def _titles(choice: Choice) -> Iterator[tuple[str, Callable[[int, int], nn.Module], bool]]:
    for name, build in MODULES.items():
        for kind, training in PASSES.items():
            yield f"{name}, {kind}{described(choice)}", build, training


def report(result: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown in the form of S-STE Table 10: speed over dense layers, by size."""
    rows = [row for row in result["cases"] if row["us"] and row["impl"] != DENSE]
    found = {(row["impl"], *row["shape"], row["case"]): row["ratio_to"][DENSE] for row in rows}
    titles = list(dict.fromkeys(row["case"] for row in rows))
    yield f"| method | N | n | d | h | {' | '.join(titles)} |"
    yield "| --- " * (5 + len(titles)) + "|"
    for size in dict.fromkeys(key[:-1] for key in found):
        cells = [
            f"{found[*size, title]:.2f}×" if (*size, title) in found else "" for title in titles
        ]
        yield f"| {' | '.join(map(str, [*size, *cells]))} |"
