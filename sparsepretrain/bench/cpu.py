"""What users of a CPU feel: cost of each method over dense, memory, start-up, data, kernels."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain import registry
from sparsepretrain.bench import cpu_kernels, tasks
from sparsepretrain.bench.hours import training
from sparsepretrain.bench.linear import timed_methods
from sparsepretrain.bench.plain import PlainGPT2
from sparsepretrain.bench.progress import Phase
from sparsepretrain.bench.timing import Case, amortised, interleaved, ratio
from sparsepretrain.sparsity.method import G
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session

MASKED_LIMIT = 1.05
"""Most that a step may take over the dense one."""
SAMPLED_LIMIT = 1.15
"""The same with MVUE."""
MEMORY_LIMIT = 1.03
PLAIN_LIMIT = 1.03
NANOGPT_LIMIT = 1.0
START_LIMIT = 8.0
COLD_LIMIT = 12.0
"""Seconds, with kernels that are not compiled yet."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method with options, as overrides of the default run."""

    overrides: list[str]
    limit: float | None = MASKED_LIMIT
    rare: tuple[str, int] | None = None
    """Key of the steps between two searches, and how many they are by default."""

    def searching(self, every: int) -> list[str]:
        """The overrides with a search every so many steps."""
        assert self.rare is not None
        return [*self.overrides, f"{self.rare[0]}={every}"]


MEASURED = ("dense", "ste", "srste", "sste, mvue=none", "sste")
"""Variants whose peak memory is measured, in processes of their own."""
NEVER = 10**6
"""Steps between two searches in a run that does none after its first step."""


def variants() -> dict[str, Variant]:
    """What every registered method says is worth timing, ``dense`` first."""
    result = {"dense": Variant(["sparsity=dense"], None)}
    for label, (name, options) in timed_methods().items():
        if name == "dense":
            continue
        method: Any = registry.get("method", name)
        checked, every = method.Options(name=name, **options), method.searches
        sampled = method(checked, 1000).sparse_row.U != G
        result[label] = Variant(
            [f"sparsity={name}", *(f"sparsity.{k}={v}" for k, v in options.items())],
            SAMPLED_LIMIT if sampled else MASKED_LIMIT,
            None if every is None else (f"sparsity.{every}", getattr(checked, every)),
        )
    return result


def cases(quick: bool) -> list[Case]:
    """All cases of the suite."""
    rounds = 4 if quick else 40
    return [
        # first: a heap that training has used makes allocations, and so short operations, slower
        *cpu_kernels.cases(rounds, Phase("kernels", rounds, "rounds")),
        *_steps(rounds),
        *_memory(1 if quick else 3),
        _start(2 if quick else 5, START_LIMIT),
        _start(1 if quick else 3, COLD_LIMIT, cold=True),
        *tasks.cases(training, rounds, Phase("tasks", len(tasks.experiments()), "experiments")),
    ]


def _steps(rounds: int) -> list[Case]:
    all_variants = variants()
    built = {
        name: training(v.overrides if v.rare is None else v.searching(NEVER))
        for name, v in all_variants.items()
    }
    works: dict[str, Callable[[], object]] = {
        name: functools.partial(train_step, t) for name, t in built.items()
    }
    works["plain"] = _plain_step(built["dense"])
    works["nanoGPT"] = _plain_step(built["dense"], nanogpt=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # STEP warns of a switch as early as this one
        seconds = interleaved(
            works, rounds=rounds, on_round=Phase("training steps", rounds, "rounds")
        )
    dense = seconds["dense"]
    result = {
        name: ratio(f"step time, {name} over dense", seconds[name], dense, at_most=v.limit)
        for name, v in all_variants.items()
        if v.limit is not None
    }
    rare = {n: v for n, v in all_variants.items() if v.rare is not None}
    result |= _searches(rare, result, works["dense"], max(2, rounds // 5))
    plain = ratio(
        "step time, our dense over plain PyTorch", dense, seconds["plain"], at_most=PLAIN_LIMIT
    )
    nanogpt = ratio(
        "step time, our dense over nanoGPT's loop", dense, seconds["nanoGPT"], at_most=NANOGPT_LIMIT
    )
    return [*result.values(), plain, nanogpt]


def _searches(
    rare: dict[str, Variant], steady: dict[str, Case], dense: Callable[[], object], rounds: int
) -> dict[str, Case]:
    """The cases of ``steady`` with the rare steps that search for masks shared out."""
    works: dict[str, Callable[[], object]] = {
        name: functools.partial(train_step, training(v.searching(1))) for name, v in rare.items()
    }
    works["dense"] = dense
    seconds = interleaved(
        works, rounds=rounds, on_round=Phase("steps that search", rounds, "rounds")
    )
    return {
        name: amortised(steady[name], seconds[name], seconds["dense"], period=v.rare[1])
        for name, v in rare.items()
        if v.rare is not None
    }


def _plain_step(t: Session, *, nanogpt: bool = False) -> Callable[[], object]:
    """The same step without this project: data, loss, clipping, fused AdamW.

    ``nanogpt``: as that project's train.py has it on a CPU: batches are stacked from windows of a
    memory-mapped file, which is opened anew, and AdamW is not fused.
    """
    torch.manual_seed(0)
    model = PlainGPT2(t.run.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not nanogpt)
    size, length = t.run.batch.size, t.run.task.sequence_length
    state = {"step": 0}
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as the step
    np.random.default_rng(0).integers(256, size=10**6, dtype=np.uint16).tofile(file.name)

    def windows() -> dict[str, Tensor]:
        data = np.memmap(file.name, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - length, (size,))
        return {
            name: torch.stack(
                [torch.from_numpy(data[i + k : i + k + length].astype(np.int64)) for i in starts]
            )
            for k, name in enumerate(("tokens", "targets"))
        }

    def step() -> None:
        batch = windows() if nanogpt else t.task.batch("train", state["step"], range(size), size)
        logits = model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        loss.item()

    return step


def _memory(repeats: int) -> list[Case]:
    """Peak resident memory above what the process had before it built the model."""
    measured = {n: v for n, v in variants().items() if n in MEASURED}
    show = Phase("peak memory", len(measured) * repeats, "processes")
    peaks = {}
    for index, (name, variant) in enumerate(measured.items()):
        found = []
        for repeat in range(repeats):
            show(index * repeats + repeat)
            found.append(_peak(variant.overrides))
        peaks[name] = sorted(found)[repeats // 2]
    show(len(measured) * repeats)
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


def _start(repeats: int, limit: float, *, cold: bool = False) -> Case:
    """From typing the command to the end of the first training step, data prepared.

    ``cold``: with an empty folder for compiled kernels.
    """
    name = "start to first training step" + ", kernels to be compiled" * cold
    show = Phase(name, repeats, "processes")
    seconds = []
    for index in range(repeats):
        show(index)
        seconds.append(_first_step(cold))
    show(repeats)
    seconds.sort()
    return Case(
        name=name,
        value=seconds[len(seconds) // 2],
        unit="s",
        at_most=limit,
        detail={"seconds": seconds},
    )


def _first_step(cold: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sparsepretrain", "train", f"runs_dir={folder}"]
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder} if cold else None
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step +1/", line):
                break
        seconds = time.perf_counter() - start
        process.kill()
        process.communicate()
    return seconds
