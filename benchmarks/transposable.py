"""Measure transposable masks of other patterns than 2:4: distance from the optimum, and time.

`gap` compares the masks of TSENOR with the optimum of linear programming on 1,000 blocks of normal
weights for each pattern: share of the kept magnitude that is lost. `step` is the time of the mask
searches of T-SR-STE as a share of the training steps of `gpt2_nano`. Takes a minute.
"""

from __future__ import annotations

import functools
import statistics
import sys

import torch
from torch import Tensor

from harness import Case, Options, Work, interleave, main
from sparsepretrain.kernels import transposable_mask
from sparsepretrain.training.loop import train_step
from steps import training

PATTERNS = ((4, 8), (8, 16), (1, 4), (2, 8))
BLOCKS = 1000
REFRESH = 40
"""Steps between two searches, the default of T-SR-STE."""


def works(options: Options) -> dict[str, Work]:
    """Return a work per pattern."""
    blocks, rounds = (20, 2) if options.quick else (BLOCKS, 20)
    return {
        f"{kind}, {n}:{m}": functools.partial(work, n, m, size)
        for kind, work, size in (("gap", gap, blocks), ("step", step, rounds))
        for n, m in PATTERNS
    }


def gap(n: int, m: int, blocks: int) -> list[Case]:
    """Return the mean share of the optimal sum that TSENOR loses, and if all blocks are N:M."""
    w = torch.randn(m, m * blocks, generator=torch.Generator().manual_seed(0))
    mask = transposable_mask(w, n, m)
    lost = 1 - kept(w, mask, m) / kept(w, transposable_mask(w, n, m, exact=True), m)
    sums = mask.sum(0) == n, mask.view(m, -1, m).sum(2) == n
    detail = {
        "blocks": blocks,
        "largest percent": 100 * float(lost.max()),
        "optimal blocks": int((lost < 1e-6).sum()),
    }
    status = "ok" if all(bool(each.all()) for each in sums) else "wrong: not N:M"
    value = 100 * float(lost.mean())
    return [Case(name=f"gap, {n}:{m}", value=value, unit="%", status=status, detail=detail)]


def kept(w: Tensor, mask: Tensor, m: int) -> Tensor:
    """Return the sum of kept magnitudes of each block, fp64."""
    return (w.abs().double() * mask).view(m, -1, m).sum((0, 2))


def step(n: int, m: int, rounds: int) -> list[Case]:
    """Return the time of one search in `REFRESH` steps over that of the steps, in percent."""
    session = training(["sparsity=tsrste", f"sparsity.n={n}", f"sparsity.m={m}"])
    weights = [layer.weight.detach() for layer in session.sparsifier.layers.values()]

    def search() -> None:
        for weight in weights:
            transposable_mask(weight, n, m)

    series = interleave({"search": search, "step": lambda: train_step(session)}, rounds)
    seconds = {name: statistics.median(each.us) / 1e6 for name, each in series.items()}
    value = 100 * seconds["search"] / REFRESH / seconds["step"]
    name = f"step, {n}:{m}"
    return [Case(name=name, value=value, unit="%", detail={"median_seconds": seconds})]


if __name__ == "__main__":
    sys.exit(main("transposable", works))
