"""Train `gpt2_nano` for 20 steps with compile=none and blocks, saved and resumed halfway.

The first script to run on a new machine. Needs the package installed with its dependencies,
hydra-core among them.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
from functools import partial
from itertools import pairwise

import torch

from harness import Case, Options, Work, main, timed
from sparsepretrain.config import compose, validate
from sparsepretrain.console import Console
from sparsepretrain.kernels.timing import Series
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.training.trainer import train

RUNS = [
    ("none", "bf16", "sste"),
    ("blocks", "fp16", "sste"),
    ("none", "fp16", "tsrste"),
    ("blocks", "bf16", "tsrste"),
]
"""(compile mode, precision, method): every pair of values occurs."""
TINY = ["model.n_layer=1", "batch.size=2", "batch.micro=2", "task.sequence_length=16"]
"""Overrides without a GPU: a CPU takes seconds for an fp16 matmul."""


def works(options: Options) -> dict[str, Work]:
    """Return four runs that cover every pair of mode, precision and method."""
    steps = 4 if options.quick else 20
    names = {words: "{} steps, compile={}, {}, {}".format(steps, *words) for words in RUNS}
    return {name: partial(check, name, *words, steps) for words, name in names.items()}


def check(name: str, mode: str, precision: str, method: str, steps: int) -> list[Case]:
    """Train, stop halfway, resume, and check that each step is recorded once and the loss falls."""
    cuda = torch.cuda.is_available()
    words = [f"compile={mode}", f"precision={precision}", f"sparsity={method}", f"steps={steps}"]
    words += ["schedule.warmup=2", "eval.batches=1", "log.every=1", "tracker=jsonl"]
    with tempfile.TemporaryDirectory() as directory:
        words += [f"runs_dir='{directory}'", *(() if cuda else TINY)]
        run = validate(compose(words, []))
        try:
            for stop in (steps // 2, None):  # the second call resumes from the checkpoint
                train(run, Console(io.StringIO()), stop_after=stop)
        finally:
            torch.compiler.reset()
        text = RunDirectory.of(run).record_file.read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "split" not in line]
    losses = [line["loss"] for line in lines]
    if [line["step"] for line in lines] != [*range(1, steps + 1)]:
        return [Case(name=name, status=f"wrong: {len(lines)} lines of {steps} steps")]
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        status = f"wrong: the loss begins at {losses[0]:.4g} and ends at {losses[-1]:.4g}"
        return [Case(name=name, status=status)]
    us = [1e6 * (b["time"] - a["time"]) for a, b in pairwise(lines)]
    return [timed(name, Series(us=us, mode="step"), {})]


if __name__ == "__main__":
    sys.exit(main("smoke", works))
