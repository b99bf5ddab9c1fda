"""What a whole run of a recipe would cost, from the speed of its first steps (``suite=hours``).

S-STE Table 12 has this form. A recipe trains as it is, in the trainer, but on data that needs no
download: random access, sizes and work are those of the recipe, but for translation, whose short
sentences fill the same buckets with more pairs. Evaluations and checkpoints are not counted.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparsepretrain.bench import EVERYTHING, Choice, gpu
from sparsepretrain.bench.kernels import Timed, Work, skipped
from sparsepretrain.config import compose, validate
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session

__all__ = ["cases", "report", "training"]

TEXT = "data=python_source"
RECIPES = {
    "GPT-2 124M": ["model=gpt2_124m", TEXT],
    "GPT-2 350M": ["model=gpt2_350m", TEXT],
    "GPT-2 774M": ["model=gpt2_774m", TEXT],
    "Transformer-base": ["model=transformer_base", "data=cldr_ende"],
    "DeiT-base": ["model=deit_base", "data=digits"],
}
WARMUP = 2
"""Steps before those that count: graphs are compiled, workers start."""


@dataclass(slots=True, kw_only=True)
class Recipe(Timed):
    """A timed step of a recipe, and what follows for a run."""

    steps: int = 0
    hours: float = 0.0
    """Of all its steps, on the devices that were measured."""


def cases(quick: bool, choice: Choice = EVERYTHING) -> list[Timed | Work]:
    """Every recipe, one after the other; without a GPU these are skipped for a tiny one."""
    methods = ("dense", *(choice.methods or ("sste",)))
    recipes, steps, found = RECIPES, 2 if quick else 10, list[Timed | Work]()
    if not torch.cuda.is_available():
        found += [skipped(f"step, {name}", []) for name in RECIPES]
        recipes, steps = {"GPT-2 micro": ["model=gpt2_micro"]}, 2
    for name, overrides in recipes.items():
        for method in dict.fromkeys(methods):
            words = [*overrides, f"sparsity={method}", f"backend={choice.backend}"]
            found.append(functools.partial(_recipe, name, method, words, steps))
    return found


def training(overrides: list[str]) -> Session:
    """The default run with ``overrides``, built and ready to step; nothing is written."""
    plain = compose([*overrides, "tracker=jsonl"], [])
    return build_session(validate(plain), Console())


def _recipe(name: str, method: str, overrides: list[str], steps: int) -> list[Timed]:
    try:
        t = training(overrides)
        us = []
        for index in range(WARMUP + steps):
            started = time.perf_counter()
            train_step(t).read()  # waits for the device
            if index >= WARMUP:
                us.append(1e6 * (time.perf_counter() - started))
        t.batches.close()
    except torch.OutOfMemoryError:
        return [skipped(f"step, {name}", [], "skipped: out of memory")]
    series = gpu.Series(us=us, mode="step")
    recipe = Recipe(
        case=f"step, {name}",
        shape=[t.run.batch.size],
        impl=method,
        mode="step",
        us=series.percentiles(),
        steps=t.run.steps,
        hours=t.run.steps * statistics.median(us) / 3.6e9,
    )
    return [recipe]


def report(result: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown in the form of S-STE Table 12: GPU hours of whole runs."""
    yield "| model | method | seconds per step | steps | GPU hours |"
    yield "| --- | --- | --- | --- | --- |"
    for row in result["cases"]:
        if row["us"]:
            name, seconds = row["case"].removeprefix("step, "), row["us"]["p50"] / 1e6
            cells = [
                name,
                row["impl"],
                f"{seconds:.3g}",
                f"{row['steps']:,}",
                f"{row['hours']:.3g}",
            ]
            yield f"| {' | '.join(cells)} |"
