"""Time an FFN and a transformer block of GPT-2, training and inference, over widths.

As S-STE Table 10, with the sizes of its authors' log for arXiv:2404.01847. As there, operands are
computed before the clock starts, since 64 micro-batches share them; `linear.py` times them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from gpt2 import Block
from harness import CPU, CUDA, Options, Work, main
from linear import compare

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
"""(N sequences, n tokens, d width, h heads); larger batches do not fit into 24 GB."""
TINY = (2, 16, 64, 2)
METHODS = ("sste", "tsrste")


def ffn(width: int, heads: int) -> nn.Module:
    """Return two linear layers with GELU between them."""
    layers = {
        "up": nn.Linear(width, 4 * width),
        "gelu": nn.GELU(approximate="tanh"),
        "down": nn.Linear(4 * width, width),
    }
    return nn.Sequential(OrderedDict(layers))


MODULES: dict[str, Callable[[int, int], nn.Module]] = {"FFN": ffn, "block": Block}
PASSES = {"training": True, "inference": False}
"""Forward and backward, or the forward alone."""


def works(options: Options) -> dict[str, Work]:
    """Return a work per module, pass and size; without a GPU for a tiny size."""
    methods = options.methods or METHODS
    options = Options(options.quick, methods, options.sparse_matmuls, options.fp8)
    shapes, device, rounds = SHAPES[: 2 if options.quick else None], CUDA, 15
    found: dict[str, Work] = {}
    if not torch.cuda.is_available():
        shapes, device, rounds = [TINY], CPU, 2
    for name, build in MODULES.items():
        for kind, training in PASSES.items():
            for size in shapes:
                batch, length, width, heads = size
                title = f"{name}, {kind}, N={batch} n={length} d={width} h={heads}"
                found[title] = partial(
                    compare,
                    f"{title}, bf16{options.label}",
                    partial(build, width, heads),
                    (batch, length, width),
                    device,
                    5 if options.quick else rounds,
                    options,
                    targets=["*.up", "*.down"],
                    stored=True,
                    training=training,
                )
    return found


if __name__ == "__main__":
    sys.exit(main("blocks", works, methods=True))
