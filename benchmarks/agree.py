"""Compare the losses of the default run on the GPU with those on the CPU of the same machine.

Weights, batches and draws are the same, so fp32 losses differ by rounding only. They would drift
apart where a mask flips in one of the runs: a difference that is there at the first step is a
defect, one that appears after some steps may be none.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence

import torch

from harness import Case, Options, Work, main
from smoke import TINY
from sparsepretrain.training.loop import train_step
from steps import training

METHODS = {"dense": 1e-4, "sste": 1e-3, "srste": 1e-3, "tsrste": 1e-3, "sdgp": 1e-3, "slope": 1e-3}
"""Method -> largest relative difference of a loss in fp32."""
MODES = {"fp32": (), "bf16": ("precision=bf16",)}
BF16 = 30.0
"""Factor of that difference in bf16, which has 16 bits fewer than fp32."""
STEPS = 15


def works(options: Options) -> dict[str, Work]:
    """Return a work per mode and method; those that compile, which takes longest, come last."""
    cuda = torch.cuda.is_available()
    quick = options.quick or not cuda
    found: dict[str, Work] = {}
    compiled = ("none", "blocks") if cuda else ("none",)
    for mode, precision, method in itertools.product(compiled, MODES, METHODS):
        name = f"{method}, {precision}, compile={mode}"
        found[name] = functools.partial(
            compare, name, method, precision, mode, 2 if quick else STEPS
        )
    return found


def compare(name: str, method: str, precision: str, mode: str, steps: int) -> list[Case]:
    """Return the largest relative difference over the steps."""
    words = (*MODES[precision], f"sparsity={method}", f"compile={mode}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here, there = on_cpu(method, steps), losses(steps, *words, f"parallel.device={device}")
    apart = [abs(a / b - 1) for a, b in zip(there, here, strict=True)]
    limit = METHODS[method] * (BF16 if precision == "bf16" else 1)
    detail = {"first": apart[0], "losses": there, "cpu_losses": here}
    return [Case(name=name, value=max(apart), unit="of the loss", at_most=limit, detail=detail)]


@functools.cache
def on_cpu(method: str, steps: int) -> list[float]:
    """Return the losses in fp32 on the CPU, which all modes of a method are compared with."""
    return losses(steps, f"sparsity={method}", "compile=none", "parallel.device=cpu")


def losses(steps: int, *words: str) -> list[float]:
    """Return the losses of the first steps of the default run."""
    # without a GPU the CPU is compared with itself
    tiny: Sequence[str] = () if torch.cuda.is_available() else TINY
    session = training([*words, *tiny, "eval.batches=0", "log.every=1"])
    try:
        return [train_step(session).loss for _ in range(steps)]
    finally:
        session.batches.close()
        torch.compiler.reset()


if __name__ == "__main__":
    sys.exit(main("agree", works))
