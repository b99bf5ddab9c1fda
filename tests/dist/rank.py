"""What every process of a test with several runs: ``rank.py CASES``, one run after the other."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sparsepretrain import config
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.tracking.console import Console
from sparsepretrain.training import gradients, loop
from sparsepretrain.training.trainer import train

place, seed_draws, loss = Sparsifier.micro_batch, loop.seed_draws, gradients.Loss.forward


def mean(state: Any, bucket: Any) -> Any:
    """What DistributedDataParallel does by default."""
    return summed(state, bucket).then(lambda done: done.value() / 2)


summed = gradients._sum
mean.__annotations__ = summed.__annotations__


def noise(number: Any) -> Any:
    """Draws that depend on another number than that of the micro-batch."""
    return patch.object(
        Sparsifier,
        "micro_batch",
        lambda own, index, **options: place(own, number(index), **options),
    )


MUTANTS: dict[str, list[Any]] = {
    "mean": [
        patch.object(gradients, "_sum", mean),
        patch.object(gradients.Loss, "forward", lambda own, batch: 2 * loss(own, batch)),
    ],
    "local noise": [noise(lambda index: index % 2)],
    "noise by rank": [noise(lambda index: index + 4 * int(os.environ["RANK"]))],
    "local dropout": [
        patch.object(loop, "seed_draws", lambda *key: seed_draws(*key[:2], key[2] % 2))
    ],
    "no no_sync": [
        patch.object(gradients.Summed, "micro_batch", lambda own, *, last: contextlib.nullcontext())
    ],
}
"""Mistakes that the gates must notice, in two processes with two micro-batches each."""


def main(cases: str) -> None:
    """Train each case in a world of its own."""
    for case in json.loads(Path(cases).read_text()):
        os.environ["MASTER_PORT"] = str(case["port"])
        run = config.load(case["words"])
        with contextlib.ExitStack() as stack:
            for mistake in MUTANTS.get(case["mutant"], []):
                stack.enter_context(mistake)
            code = train(run, Console.silent(), stop_after=case["stop_after"])
        assert code == 0, (case, code)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
