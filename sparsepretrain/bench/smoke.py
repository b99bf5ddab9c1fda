"""Steps of ``gpt2_nano`` in every compile mode, saved and resumed halfway (``suite=smoke``).

The first suite to run on a new machine: it shows that training works there, not how fast it is.
"""

from __future__ import annotations

import io
import json
import math
import tempfile
from functools import partial
from itertools import pairwise

import torch

from sparsepretrain.bench import gpu
from sparsepretrain.bench.kernels import SKIPPED, Timed, Work, failure, skipped
from sparsepretrain.config import compose, validate
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.trainer import train

FIRST = [
    ("none", "bf16", "sste"),
    ("blocks", "fp16", "sste"),
    ("graphs", "bf16", "sste"),
    ("none", "fp16", "tsrste"),
    ("blocks", "bf16", "tsrste"),
    ("graphs", "fp16", "tsrste"),
]
"""Compile mode, precision and method: every two of their values meet."""
OTHERS = {"bf16": "fp16", "fp16": "bf16"}
TINY = ["model.n_layer=1", "batch.size=2", "batch.micro=2", "task.sequence_length=16"]
"""For a rehearsal: fp16 products take a CPU seconds."""


def cases(quick: bool) -> list[Work]:
    """Six runs that cover every pair of mode, precision and method, then the other six."""
    rest = [(mode, OTHERS[precision], method) for mode, precision, method in FIRST]
    return [partial(_run, *words, 4 if quick else 20) for words in [*FIRST, *rest]]


def _run(mode: str, precision: str, method: str, steps: int) -> list[Timed]:
    row = Timed(
        case=f"{steps} steps, compile={mode}, {precision}, {method}", shape=[], impl="", mode="step"
    )
    cuda = torch.cuda.is_available()
    if mode == "graphs" and not cuda:
        return [skipped(row.case, [], SKIPPED)]
    words = [f"compile={mode}", f"precision={precision}", f"sparsity={method}", f"steps={steps}"]
    words += ["schedule.warmup=2", "eval.batches=1", "log.every=1", "tracker=jsonl"]
    if not cuda:
        words += TINY
    with tempfile.TemporaryDirectory() as place:
        run = validate(compose([*words, f"runs_dir='{place}'"], []))
        try:
            for stop in (steps // 2, None):  # the second call resumes from the checkpoint
                train(run, Console(io.StringIO()), stop_after=stop)
            text = RunDirectory.of(run).record_file.read_text(encoding="utf-8")
        except Exception as error:  # the next run may work
            row.status = failure(error)
            return [row]
        finally:
            torch.compiler.reset()
    lines = [line for line in map(json.loads, text.splitlines()) if "split" not in line]
    losses = [line["loss"] for line in lines]
    if [line["step"] for line in lines] != [*range(1, steps + 1)]:
        row.status = f"wrong: {len(lines)} lines of {steps} steps"
    elif not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        row.status = f"wrong: the loss begins at {losses[0]:.4g} and ends at {losses[-1]:.4g}"
    else:
        times = [line["time"] for line in lines]
        us = [1e6 * (after - before) for before, after in pairwise(times)]
        row.us = gpu.Series(us=us, mode="step").percentiles()
    return [row]
