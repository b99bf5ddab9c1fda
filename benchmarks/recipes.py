"""Time the first steps of recipes and extrapolate the GPU hours of a run, as S-STE Table 12.

Recipes train unchanged in the trainer, on data that needs no download. Shapes and FLOPs are those
of the recipe, except for translation: shorter sentences fill the same buckets with more pairs.
Evaluations and checkpoints are not counted. Needs the package installed with its dependencies.
"""

from __future__ import annotations

import functools
import sys
import time

import torch

from harness import Case, Options, Work, main, timed
from sparsepretrain.config import compose, validate
from sparsepretrain.kernels.timing import Series
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session

TEXT = "data=python_source"
RECIPES = {
    "GPT-2 124M": ["model=gpt2_124m", TEXT],
    "GPT-2 350M": ["model=gpt2_350m", TEXT],
    "GPT-2 774M": ["model=gpt2_774m", TEXT],
    "Transformer-base": ["model=transformer_base", "data=cldr_ende"],
    "DeiT-base": ["model=deit_base", "data=digits"],
}
WARMUP = 2
"""Untimed steps, which compile graphs and start workers."""


def works(options: Options) -> dict[str, Work]:
    """Return a work per recipe and method; without a GPU only for a tiny recipe."""
    if options.fp8:
        raise SystemExit("recipes.py: recipes set their own precision. Leave --fp8 out.")
    recipes, steps, found = RECIPES, 2 if options.quick else 10, dict[str, Work]()
    if not torch.cuda.is_available():
        recipes, steps = {"GPT-2 micro": ["model=gpt2_micro"]}, 2
    for name, overrides in recipes.items():
        for method in dict.fromkeys(("dense", *(options.methods or ("sste",)))):
            words = [*overrides, f"sparsity={method}", f"backend={options.backend}"]
            title = f"{name}, {method}{options.label}"
            found[title] = functools.partial(recipe, title, words, steps)
    return found


def training(overrides: list[str]) -> Session:
    """Build a run that is ready to step; nothing is written."""
    return build_session(validate(compose([*overrides, "tracker=jsonl"], [])), Console())


def recipe(title: str, overrides: list[str], steps: int) -> list[Case]:
    """Time `steps` steps."""
    session = training(overrides)
    us = []
    try:
        for index in range(WARMUP + steps):
            started = time.perf_counter()
            train_step(session).read()  # read waits for the device
            if index >= WARMUP:
                us.append(1e6 * (time.perf_counter() - started))
    finally:
        session.batches.close()
    total = session.run.steps
    step = timed(f"step, {title}", Series(us=us, mode="step"), {}, batch=session.run.batch.size)
    hours = total * step.detail["p50"] / 3.6e9
    name = f"GPU hours of a run, {title}"
    return [step, Case(name=name, value=hours, unit="h", detail={"steps": total})]


if __name__ == "__main__":
    sys.exit(main("recipes", works, methods=True))
