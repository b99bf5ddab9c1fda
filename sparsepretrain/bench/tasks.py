"""Every task in small: does its data keep ahead of the model, does decoding cost nothing extra."""

from __future__ import annotations

import copy
import functools
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsepretrain.bench.timing import Case, interleaved, ratio
from sparsepretrain.config.places import catalogue
from sparsepretrain.sparsity import densify
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session

WAIT_LIMIT = 3.0
"""Percent of step time in which the next batch may be missing."""
WORKERS = 2
"""Most processes that may make batches."""
DECODE_LIMIT = 0.95
"""Least speed over transformers' ``generate``: equal, but for the noise of a busy machine."""
WARMUP = 3
"""Steps before those that count: workers start, caches fill."""

PART = 5
"""Steps of which one share is taken."""

Build = Callable[[list[str]], Session]


def experiments() -> list[str | None]:
    """The default run (None) and every shipped experiment that is called nano."""
    names = [name for name in catalogue().get("experiment", {}) if name.startswith("nano")]
    return [None, *names]


def cases(build: Build, rounds: int, on_case: Callable[[int], object]) -> list[Case]:
    """Waiting of all :func:`experiments`, and decoding of those that translate.

    Args:
        build: overrides -> a run that is ready to step.
        rounds: steps, or decodings, that are timed.
        on_case: called with the number of experiments that are complete.
    """
    found = []
    for index, name in enumerate(experiments()):
        on_case(index)
        overrides = [] if name is None else [f"experiment={name}"]
        t = build(overrides)
        if t.run.workers > WORKERS:
            t = build([*overrides, f"workers={WORKERS}"])
        label = name or t.run.name
        try:
            found.append(waiting(label, t, rounds))
            if hasattr(t.task, "translate"):
                found.append(decoding(label, t, max(3, rounds // 8)))
        finally:
            t.batches.close()
    on_case(len(experiments()))
    return found


def waiting(label: str, t: Session, steps: int) -> Case:
    """Share of step time in which the next batch was not there, median over parts of the run."""
    for _ in range(WARMUP):
        train_step(t)
    shares = []
    for _ in range(max(1, steps // PART)):
        waited, started = 0.0, time.perf_counter()
        for _ in range(PART):
            waited += train_step(t).waited
        shares.append(100 * waited / (time.perf_counter() - started))
    return Case(
        name=f"waiting for data, {label}, {t.run.workers} worker(s)",
        value=statistics.median(shares),
        unit="%",
        at_most=WAIT_LIMIT,
        detail={"percent": shares, "steps": PART},
    )


def decoding(label: str, t: Session, rounds: int) -> Case:
    """Speed of the task's search over transformers' ``generate`` with plain layers.

    Both search the first held-out samples with equal weights: the method's own projection, which
    evaluation caches, and the same written into the layers.
    """
    t.model.eval()
    size = t.run.batch.micro
    batch = t.task.batch("validation", 0, range(min(size, t.task.samples("validation"))), size)
    source, mask = batch["source"].to(t.device), batch["mask"].to(t.device)
    plain, arguments = _plain_search(t, source, mask)
    task: Any = t.task
    works: dict[str, Callable[[], object]] = {
        "ours": functools.partial(task.translate, t.model, source, mask),
        "plain": lambda: plain.generate(**arguments),
    }
    seconds = interleaved(works, rounds=rounds, warmup=1)
    return ratio(
        f"decoding, {label}, speed over transformers' generate",
        seconds["plain"],
        seconds["ours"],
        at_least=DECODE_LIMIT,
    )


def _plain_search(t: Session, source: Tensor, mask: Tensor) -> tuple[Any, dict[str, Any]]:
    """A densified copy of the model, and the arguments of ``generate`` that the task uses."""
    model: Any = t.model
    task: Any = t.task
    original, seen = model.generate, {}

    def generate(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        seen.update({k: v for k, v in bound.items() if k != "kwargs"} | bound.get("kwargs", {}))
        seen["attention"] = model.config._attn_implementation
        return original(*args, **kwargs)

    model.generate = generate
    try:
        task.translate(model, source, mask)
    finally:
        del model.generate
    plain: Any = densify(copy.deepcopy(model))
    plain.config._attn_implementation = seen.pop("attention")
    return plain, seen
