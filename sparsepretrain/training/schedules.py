"""Length of a run and learning rate, as pure functions of the step."""

from __future__ import annotations

import dataclasses
import math

from sparsepretrain.config.groups import Decay, StableDecay, Triangle, Warmup
from sparsepretrain.config.schema import MOST_STEPS, Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.tasks import build_task

Schedule = Decay | Warmup | StableDecay | Triangle


def resolve_steps(run: Run) -> Run:
    """Replace ``steps=0`` by the steps of ``epochs``; open (and prepare) data only for that."""
    if run.steps:
        return run
    assert run.epochs is not None
    task = build_task(run)
    task.open_data(("train",))
    steps = max(1, round(run.epochs * task.samples("train") / run.batch.size))
    if steps > MOST_STEPS:
        raise ConfigError(f"epochs={run.epochs} are {steps} steps, more than {MOST_STEPS}")
    return dataclasses.replace(run, steps=steps)


def warmup_steps(schedule: Schedule, steps: int) -> int:
    """Optimizer steps of warm-up; fractions of the run are rounded to the nearest step."""
    if isinstance(schedule, Triangle):
        return int(schedule.peak * steps + 0.5)
    return int(schedule.warmup if schedule.warmup >= 1 else schedule.warmup * steps + 0.5)


def learning_rate(schedule: Schedule, peak: float, step: int, steps: int) -> float:
    """Learning rate of the update that follows ``step`` completed steps.

    Warm-up is linear and reaches the peak at update ``warmup`` + 1; with ``start=0`` the first
    update has rate 0 (nanoGPT until 2024, on which S-STE and T-SR-STE build). Decays reach
    ``end`` times the peak at ``steps``, or where a ``tail`` to zero begins; a triangle reaches zero
    at ``steps``. The stable phase of ``wsd`` does not depend on ``steps``, so a longer run can
    continue it.
    """
    if isinstance(schedule, Triangle):
        return peak * _triangle(schedule, step / steps)
    warmup = warmup_steps(schedule, steps)
    if step < warmup:
        if schedule.start is None:
            return peak * (step + 1) / (warmup + 1)
        return peak * (schedule.start + (1 - schedule.start) * step / warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / max(step, 1)) if step else peak
    assert isinstance(schedule, Decay | StableDecay)
    begin = warmup
    last = steps
    shape = schedule.name
    if isinstance(schedule, StableDecay):
        begin = max(warmup, steps - int(schedule.decay * steps + 0.5))
        shape = schedule.shape
    elif schedule.tail:
        last = steps - int(schedule.tail * steps + 0.5)
        if step >= last:
            return peak * schedule.end * (steps - step) / (steps - last)
    if step < begin:
        return peak
    progress = (step - begin) / max(last - begin, 1)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
    }[shape]
    floor = peak * schedule.end
    return floor + (peak - floor) * left


def _triangle(schedule: Triangle, progress: float) -> float:
    """Factor of the peak after this fraction of the run."""
    if progress < schedule.peak:
        return schedule.start + (1 - schedule.start) * progress / schedule.peak
    return (1 - progress) / (1 - schedule.peak) if schedule.peak < 1 else 1.0
