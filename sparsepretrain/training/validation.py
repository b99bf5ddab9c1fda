"""Losses and metrics of a split during training."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sparsepretrain.data.preparation import Progress
from sparsepretrain.tasks import Batch, Observation, read
from sparsepretrain.training.batches import Request, split_requests, stream
from sparsepretrain.training.compilation import eager
from sparsepretrain.training.ema import AVERAGED
from sparsepretrain.training.precision import autocast, compute_dtype
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import ENDS

PRUNED = "pruned_"
"""Beginning of the names of metrics of the N:M weights alone, without adapters or branches."""
SILENT_SECONDS = 1.0
"""Seconds of an evaluation before a progress bar appears."""


@torch.no_grad()
def evaluate(
    session: Session, split: str, batches: int | None, *, final: bool
) -> dict[str, float] | None:
    """Return metrics of the task over a split, with the weights that the method evaluates with.

    With averaged weights, metrics of their projection follow as ``ema_<metric>``. If the method
    adds adapters or branches to the N:M weights, the last evaluation also measures the model
    without them, as ``pruned_<metric>``. The training state does not change. Returns None if a
    signal interrupted the evaluation; several ranks finish it first.

    Args:
        session: the run.
        split: of the data.
        batches: number of full micro-batches from its start; None: every sample once.
        final: the last evaluation; see :meth:`Task.observe`.
    """
    share_statistics(session)
    session.model.eval()
    requests = split_requests(split, session.task.samples(split), session.run.batch.micro, batches)
    share = requests[session.world.rank :: session.world.size]
    generates = session.task.generates(final=final)
    if session.is_sharded and not generates:  # ranks gather together, so all run as many forwards
        most = len(requests[:: session.world.size])
        share += requests[:1] * (most - len(share))

    def measure() -> dict[str, float] | None:
        if session.stopping is not None:
            return None
        observations: list[Observation] = []
        with _gathering(session, whole=generates), eager(session.setup.compiled):
            for batch in _shown(session, split, share):
                if session.stopping is not None:  # one process; several agree after the evaluation
                    return None
                with autocast(session.run.precision, session.device):
                    observations.append(
                        session.task.observe(session.forward_model, batch, final=final)
                    )
        # A signal may reach ranks at different batches: they agree here, when all have finished.
        stops, parts = zip(
            *session.world.gather((session.stop.requested, read(observations))), strict=True
        )
        session.stop.agreed = next((code for code in ENDS if code in stops), None)
        ranks = itertools.cycle(map(iter, parts))  # in the order of the requests
        return session.task.metrics([next(next(ranks)) for _ in requests])

    metrics = measure()
    others = []
    if final and session.sparsifier.method.has_residual:
        others.append((PRUNED, session.sparsifier.without_residual()))
    if session.ema is not None:
        others.append((AVERAGED, session.ema.applied(session.sparsifier)))
    for prefix, weights in others:
        if metrics is None:
            return None
        with weights:
            found = measure()
        if found is None:
            return None
        numbers = {k: v for k, v in found.items() if not isinstance(v, str)}
        metrics |= {f"{prefix}{name}": value for name, value in numbers.items()}
    return metrics


def _gathering(session: Session, *, whole: bool) -> contextlib.AbstractContextManager[None]:
    if not session.is_sharded:
        return contextlib.nullcontext()
    from sparsepretrain.training.shards import evaluating

    return evaluating(session.run, session.model, whole=whole)


def _shown(session: Session, split: str, requests: list[Request]) -> Iterator[Batch]:
    """Yield batches of an evaluation, and show progress if it takes longer than a second."""
    samples = sum(len(r.positions) for r in requests)
    done = 0
    started = time.monotonic()
    batches = moved(session, stream(session.task, requests, session.device, session.run.workers))
    for request, batch in zip(requests, batches, strict=True):
        yield batch
        done += len(request.positions)
        seconds = time.monotonic() - started
        if session.on_progress is not None and seconds > SILENT_SECONDS:
            unit = session.task.sample
            session.on_progress(
                Progress(phase=split, done=done, total=samples, unit=unit, seconds=seconds)
            )


@torch.no_grad()
def share_statistics(session: Session) -> None:
    """Average running statistics (BatchNorm), which depend on the micro-batches of a rank.

    Both updates are linear, so the result does not depend on how often this is done.
    """
    if session.world.size == 1:
        return
    for module in session.model.modules():
        for name in ("running_mean", "running_var"):
            if (statistic := getattr(module, name, None)) is not None:
                session.world.sum(statistic).div_(session.world.size)


def moved(session: Session, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches on the device, without waiting for copies to a GPU."""
    wide = compute_dtype(session.run.precision) == torch.float64

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if session.device.type == "cuda" and not value.is_pinned():  # else the copy would wait
            value = value.pin_memory()
        dtype = torch.float64 if wide and value.is_floating_point() else None
        return value.to(session.device, dtype, non_blocking=True)

    for batch in batches:
        yield {key: move(value) for key, value in batch.items()}
