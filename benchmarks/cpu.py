"""Measure step time and memory of every method on a CPU.

`make bench` writes `benchmarks/results/cpu.json`. Needs the package installed with its
dependencies.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sparsepretrain
from gpt2 import PlainGPT2
from harness import Case, Options, Work, interleave, main, ratio, ratios
from linear import timed_methods
from sparsepretrain import registry
from sparsepretrain.kernels.cpu import KERNELS
from sparsepretrain.kernels.timing import Series
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session
from steps import training

THREADS = (1, 2)
MODEL = "transformers' GPT-2 in a plain loop"
MEASURED = ("dense", "ste", "srste", "sste, mvue=none", "sste")
"""Variants whose peak memory is measured, each in a new process."""
SEARCHES = {"bimask": "every", "tsrste": "refresh"}
"""Method -> option with the steps between two searches for masks, which are rare and long."""
LOOPS = {
    ("mvue",): "sste",
    ("mvue_nm",): "sste",
    ("soft_threshold", "soft_prune"): "sste",
    ("nm_mask", "nm_prune"): "srste",
    ("masked_decay_",): "srste",
    ("pack_24", "packed_flip_count"): "dense",
    ("apply_mask",): "act24",
    ("uniform_noise",): "sdgp",
}
"""Operations with a loop -> the method whose step is timed with and without."""
LOOP_OPTIONS: dict[tuple[str, ...], list[str]] = {
    ("uniform_noise",): ["sparsity.variant=random"],
    ("mvue_nm",): ["sparsity.n=4", "sparsity.m=8"],
}
"""Operations -> options of that method with which it runs them."""
NEVER = 10**6
"""Steps between two mask searches in a run without a second search."""
MEMORY_STEPS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """A method with options, as overrides of the default run."""

    overrides: list[str]
    rare: tuple[str, int] | None = None
    """Key of the steps between two searches for masks, and its default."""

    def searching(self, every: int) -> list[str]:
        """Return the overrides with a search every `every` steps."""
        assert self.rare is not None
        return [*self.overrides, f"{self.rare[0]}={every}"]


def variants() -> dict[str, Variant]:
    """Return every timed variant of a registered method, ``dense`` first."""
    result = {"dense": Variant(["sparsity=dense"])}
    for label, (name, options) in timed_methods().items():
        if name == "dense":
            continue
        method: Any = registry.get("method", name)
        checked, every = method.Options(name=name, **options), SEARCHES.get(name)
        result[label] = Variant(
            [f"sparsity={name}", *(f"sparsity.{k}={v}" for k, v in options.items())],
            None if every is None else (f"sparsity.{every}", getattr(checked, every)),
        )
    return result


def works(options: Options) -> dict[str, Work]:
    """Return a work per group of cases."""
    quick = options.quick
    rounds, repeats = (2, 1) if quick else (40, 3)
    chosen = {k: v for k, v in variants().items() if not quick or k in ("dense", "sste", "bimask")}
    return {
        **{
            f"step time, {count(threads)}": functools.partial(steps, chosen, rounds, threads)
            for threads in THREADS
            if threads <= (os.cpu_count() or 1)
        },
        "peak memory": functools.partial(memory, repeats),
        "loops": functools.partial(loops, rounds),
    }


def count(threads: int) -> str:
    """Return "1 thread" or "2 threads"."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


def steps(chosen: dict[str, Variant], rounds: int, threads: int) -> list[Case]:
    """Compare training steps of `gpt2_nano` under every variant with steps in plain PyTorch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _steps(chosen, rounds, count(threads))
    finally:
        torch.set_num_threads(before)


def _steps(chosen: dict[str, Variant], rounds: int, threads: str) -> list[Case]:
    built = {
        name: training(v.overrides if v.rare is None else v.searching(NEVER))
        for name, v in chosen.items()
    }
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(train_step, session) for name, session in built.items()
    }
    dense = built["dense"]
    calls["plain"] = plain_step(dense, PlainGPT2(dense.run.model))
    calls[MODEL] = plain_step(dense, sparsepretrain.densify(copy.deepcopy(dense.model)))
    rare = {name: v for name, v in chosen.items() if v.rare is not None}
    searching: dict[str, Callable[[], object]] = {
        name: functools.partial(train_step, training(v.searching(1))) for name, v in rare.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # STEP warns of an early switch
        series = interleave(calls, rounds)
        searches = interleave({**searching, "plain": calls["plain"]}, max(2, rounds // 5))
    result = {}
    for name in (MODEL, *chosen):
        case = f"step time, {name} over plain PyTorch, {threads}"
        result[name] = ratio(case, series[name], series["plain"])
    for name, v in rare.items():
        assert v.rare is not None
        amortize(result[name], searches[name], searches["plain"], period=v.rare[1])
    return list(result.values())


def loops(rounds: int) -> Iterator[Case]:
    """Compare training steps with the reference of some operations with steps with their loops."""
    for operations, name in LOOPS.items():
        session = training([f"sparsity={name}", *LOOP_OPTIONS.get(operations, ())])
        step = functools.partial(train_step, session)
        without = functools.partial(without_loops, operations, step)
        series = interleave({"with": step, "without": without}, rounds)
        label = " and ".join(operations)
        yield ratio(f"{label}, step of {name}", series["without"], series["with"])


def without_loops(operations: Sequence[str], step: Callable[[], object]) -> None:
    """Take a step in which ``operations`` run their reference."""
    removed = {name: KERNELS.pop(name) for name in operations}
    try:
        step()
    finally:
        KERNELS.update(removed)


def amortize(case: Case, searching: Series, plain: Series, *, period: int) -> None:
    """Add the cost of a mask search every `period` steps to the ratio of steps without a search."""
    assert case.value is not None
    every = statistics.median(ratios(searching, plain))
    case.detail |= {"without": case.value, "every_step": every, "period": period}
    case.value += (every - case.value) / period


def plain_step(session: Session, model: nn.Module) -> Callable[[], object]:
    """Return the same step in plain PyTorch, as nanoGPT trains.

    Data, loss, clipping, and AdamW with decay on matrices only. Where nanoGPT differs (exact GELU,
    AdamW that is fused on GPUs only, the loss read in every tenth step), this is what the recipe
    and our trainer do, so that the ratio shows the trainer and the method alone.
    """
    run = session.run
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    numbers = itertools.count()

    def step() -> None:
        size = run.batch.size
        batch = session.task.batch("train", next(numbers), range(size), size)
        logits = model(batch["tokens"])
        logits = getattr(logits, "logits", logits)  # transformers returns a dataclass
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def memory(repeats: int) -> list[Case]:
    """Compare the growth of peak resident memory in new processes."""
    peaks = {}
    for name, variant in variants().items():
        if name in MEASURED:
            peaks[name] = sorted(peak(variant.overrides) for _ in range(repeats))[repeats // 2]
    return [
        Case(
            name=f"peak memory, {name} over dense",
            value=found / peaks["dense"],
            unit="×",
            detail={"bytes": [found, peaks["dense"]], "processes": repeats},
        )
        for name, found in peaks.items()
        if name != "dense"
    ]


def peak(overrides: list[str]) -> int:
    """Return the result of `print_peak` in a new process, in bytes."""
    command = [sys.executable, __file__, "--peak", *overrides]
    # one arena, and freed blocks returned at once: exclude effects of malloc
    settings = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
    return int(done.stdout.split()[-1])


def print_peak(overrides: list[str]) -> None:
    """Build a run, take a few steps and print its peak memory in bytes."""

    def status(key: str) -> int:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(rf"{key}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    warm = training(["sparsity=sste", "batch.size=1", "batch.micro=1"])
    train_step(warm)  # loads libraries
    del warm
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    session = training(overrides)
    for _ in range(MEMORY_STEPS):
        train_step(session)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2:])
    else:
        sys.exit(main("cpu", works))
