"""What users of a CPU feel: the cost of each method over dense, memory, start-up, kernels."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sparsepretrain import kernels
from sparsepretrain.bench.plain import PlainGPT2
from sparsepretrain.bench.timing import Case, interleaved, ratio
from sparsepretrain.config import compose, validate
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.loop import Training, train_step
from sparsepretrain.training.trainer import build_training

METHODS: dict[str, tuple[list[str], float | None]] = {
    "dense": (["sparsity=dense"], None),
    "ste": (["sparsity=ste"], 1.10),
    "srste": (["sparsity=srste"], 1.10),
    "sste, mvue=none": (["sparsity=sste", "sparsity.mvue=none"], 1.10),
    "sste": (["sparsity=sste"], 1.60),
}
"""Name -> overrides of the nano run, most that a step may take over the dense one."""

MEMORY_LIMIT = 1.05
PLAIN_LIMIT = 1.05
START_LIMIT = 10.0


def cases(quick: bool) -> list[Case]:
    """All cases of the suite."""
    rounds = 4 if quick else 40
    return [*_steps(rounds), *_memory(quick), _start(2 if quick else 5), *_kernels(rounds)]


def training(overrides: list[str]) -> Training:
    """The default run with ``overrides``, built and ready to step; nothing is written."""
    plain = compose([*overrides, "tracker=jsonl"], [])
    return build_training(validate(plain), Console())


def _steps(rounds: int) -> list[Case]:
    built = {name: training(overrides) for name, (overrides, _) in METHODS.items()}
    works: dict[str, Callable[[], object]] = {
        name: functools.partial(train_step, t) for name, t in built.items()
    }
    works["plain"] = _plain_step(built["dense"])
    seconds = interleaved(works, rounds=rounds)
    result = [
        ratio(f"step time, {name} over dense", seconds[name], seconds["dense"], at_most=limit)
        for name, (_, limit) in METHODS.items()
        if limit is not None
    ]
    return [
        *result,
        ratio(
            "step time, our dense over plain PyTorch",
            seconds["dense"],
            seconds["plain"],
            at_most=PLAIN_LIMIT,
        ),
    ]


def _plain_step(t: Training) -> Callable[[], object]:
    """The same step without this project: data, loss, clipping, fused AdamW."""
    torch.manual_seed(0)
    model = PlainGPT2(t.run.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    size = t.run.batch.size
    state = {"step": 0}

    def step() -> None:
        batch = t.task.batch("train", state["step"], range(size), size, t.device)
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        loss.item()

    return step


def _memory(quick: bool) -> list[Case]:
    """Peak resident memory above what the process had before it built the model."""
    repeats = 1 if quick else 3
    peaks = {
        name: sorted(_peak(overrides) for _ in range(repeats))[repeats // 2]
        for name, (overrides, _) in METHODS.items()
    }
    return [
        Case(
            name=f"peak memory, {name} over dense",
            value=peak / peaks["dense"],
            unit="×",
            at_most=MEMORY_LIMIT,
            detail={"bytes": [peak, peaks["dense"]], "processes": repeats},
        )
        for name, peak in peaks.items()
        if name != "dense"
    ]


def _peak(overrides: list[str]) -> int:
    command = [sys.executable, "-m", "sparsepretrain.bench.memory", *overrides]
    # one arena and immediate return of freed blocks: the figure is the program's, not malloc's
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def _start(repeats: int) -> Case:
    """From typing the command to the end of the first training step, data prepared."""
    seconds = sorted(_first_step() for _ in range(repeats))
    return Case(
        name="start to first training step",
        value=seconds[len(seconds) // 2],
        unit="s",
        at_most=START_LIMIT,
        detail={"seconds": seconds},
    )


def _first_step() -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sparsepretrain", "train", f"runs_dir={folder}"]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step +1/", line):
                break
        seconds = time.perf_counter() - start
        process.kill()
        process.communicate()
    return seconds


def _kernels(rounds: int) -> list[Case]:
    """References against the formulation with topk or sort, on a GPT-2 124M weight."""
    weight = torch.randn(3072, 768, generator=torch.Generator().manual_seed(0))

    def by_topk() -> Any:
        groups = weight.abs().view(-1, 4)
        return torch.zeros_like(groups).scatter_(1, groups.topk(2, 1).indices, 1).view_as(weight)

    def by_sort() -> Any:
        groups = weight.view(-1, 4)
        threshold = groups.abs().sort(1).values[:, 1:2]
        return (groups.sign() * (groups.abs() - threshold).clamp(min=0)).view_as(weight)

    seconds = interleaved(
        {
            "mask": lambda: kernels.nm_mask(weight),
            "topk": by_topk,
            "soft": lambda: kernels.soft_threshold(weight),
            "sort": by_sort,
        },
        rounds=rounds,
    )
    return [
        ratio("2:4 mask, topk over ours, 3072×768", seconds["topk"], seconds["mask"]),
        ratio("soft threshold, sort over ours, 3072×768", seconds["sort"], seconds["soft"]),
    ]
