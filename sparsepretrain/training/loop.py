"""The training loop, top to bottom.

Order of a step: all micro-batches (DistributedDataParallel and FSDP2 reduce gradients during the
last backward) -> unscale -> norm -> guard -> clip -> J, inside the optimizer's pre-hook ->
optimizer -> refresh and flip count, inside its post-hook.

The guard judges a step by its loss and norm. Waiting for them before the optimizer would leave a
GPU idle, so where the optimizer can skip a step on the device by itself, it does, and the numbers
are read and judged one step late (:func:`_update_then_judge_previous`).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsepretrain.errors import DataError, DivergedError, SparsePretrainError
from sparsepretrain.tasks import Batch
from sparsepretrain.training.guard import require_finite_weights
from sparsepretrain.training.precision import autocast
from sparsepretrain.training.schedules import learning_rate
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import ENDS, Step, Totals, sum_in_order
from sparsepretrain.training.validation import evaluate, moved, share_statistics


def run_steps(
    session: Session,
    log: Callable[[dict[str, Any]], None],
    save: Callable[[], None],
    save_masks: Callable[[], None],
) -> int | None:
    """Train to the end; return the exit code of a signal, or None when finished.

    The newest checkpoint is always at a step boundary, and the record's lines up to its step were
    written before it, so an interrupted run resumes exactly.
    """
    run = session.run
    while True:
        # Evaluate and save before a step, not after it: a run that was interrupted here continues
        # with the evaluation and the checkpoint that it owes.
        if _owes_evaluation(session):
            metrics = _evaluate(session, save)
            if metrics is not None:
                session.counters.evaluated = session.step
                position = {"step": session.step, "tokens": session.counters.tokens}
                log(position | {"split": "validation"} | metrics)
        stopping = session.stopping
        if session.step and (stopping is not None or _due(session, run.checkpoint.every)):
            _save(session, save)
        if stopping is not None or session.step >= session.end:
            return stopping
        step = train_step(session)
        if _logs(session) or step.event:
            numbers = {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm}
            require_finite_weights(session.model, session.parameters, session.world, session.step)
            line = {"step": session.step, "tokens": session.counters.tokens, **numbers}
            line |= step.terms
            per_layer = _every(run.log.layers_every, session.step)
            for observer in session.observers:
                line |= observer.at_log(session, per_layer=per_layer)
            if session.guard.skipped:
                line["skipped"] = session.guard.skipped
            log(line)
        if _every(run.log.masks_every, session.step):
            save_masks()


def _evaluate(session: Session, save: Callable[[], None]) -> dict[str, float] | None:
    """Evaluate; if that fails, save what was trained first, so that a restart evaluates again."""
    is_final = session.step >= session.end
    try:
        return evaluate(session, "validation", session.run.eval.batches, final=is_final)
    except Exception:
        # of several ranks one may have failed alone, and saving waits for all of them
        if session.step and session.world.size == 1:
            with contextlib.suppress(SparsePretrainError):  # the first error is the one to read
                _save(session, save)
        raise


def _save(session: Session, save: Callable[[], None]) -> None:
    """Save a checkpoint of finite numbers."""
    if session.last is not None:
        _read_numbers(session, session.last)
    require_finite_weights(session.model, session.parameters, session.world, session.step)
    share_statistics(session)
    save()


def train_step(session: Session) -> Step:
    """Take one optimizer step over the global batch.

    Raises:
        DataError: the batch has no target tokens.
        DivergedError: the guard refuses the update, of this step or of the one before.
    """
    run = session.run
    was_sparse = session.sparsifier.sparse
    if not session.model.training:  # after an evaluation; visiting every module takes time
        session.model.train()
    lr = learning_rate(run.schedule, run.optim.lr, session.step, run.steps)
    for group in session.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    for observer in session.observers:
        observer.before_step(session)
    started = time.perf_counter()
    batches = session.batches.step(session.step)
    waited = time.perf_counter() - started
    items = _items(session, batches)
    if not items:
        raise DataError(
            f"step {session.step + 1}: the batch has no target tokens (all labels are ignored)"
        )
    totals = _totals(session)
    _gradients(session, batches, items, totals.sums)
    # A stop request travels with the losses: it costs no further collective, and every rank reads
    # it at the same step.
    requested = session.stop.requested
    if requested is not None:
        totals.stop_flags[ENDS.index(requested)] = 1.0
    session.world.sum(totals.both)
    session.scaler.unscale_(session.optimizer)
    for observer in session.observers:
        observer.after_backward(session)
    parameters = [p for p in session.parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm([p.grad for p in parameters if p.grad is not None]))
    # before clipping, which spreads a NaN to every gradient
    norm = session.world.whole(torch.linalg.vector_norm(norms))
    step = Step(
        number=session.step + 1,
        lr=lr,
        items=items,
        waited=waited,
        totals=totals,
        parameters=parameters,
        norms=norms,
        norm=norm,
        guard=partial(_accepts, session),
    )
    previous = session.last
    if _reads_late(session):
        _update_then_judge_previous(session, step, previous)
    else:
        _judge_then_update(session, step)
    # A new phase or new masks get a line of the record, so their numbers are needed now.
    changed = session.sparsifier.sparse != was_sparse or session.sparsifier.refreshed
    if previous is None or changed or _needs_numbers(session):
        _read_numbers(session, step)
    step.event = changed or not session.updated
    for observer in session.observers:
        observer.after_step(session, step)
    return step


def _reads_late(session: Session) -> bool:
    """Return True if loss and norm of a step are read after the optimizer step of the next one.

    The optimizer then has to skip refused gradients on the device, as fused ones do for GradScaler.
    A guard that goes on after a refused step, and the loss scale, need the numbers before the
    optimizer runs.
    """
    skips = getattr(session.optimizer, "_step_supports_amp_scaling", False)
    return skips and session.guard.rule == "stop" and not session.scaler.is_enabled()


def _judge_then_update(session: Session, step: Step) -> None:
    """Wait for loss and norm of the step; update the weights if the guard accepts them."""
    session.last = None
    if step.judge():
        _clip(session, step)
        session.scaler.step(session.optimizer)
    session.scaler.update()  # after an overflow: halves the scale
    _complete(session, step)
    _read_numbers(session, step)


def _update_then_judge_previous(session: Session, step: Step, previous: Step | None) -> None:
    """Launch the update, then wait for the numbers of the step before.

    The optimizer skips the update on the device if loss or norm of the step, or of the step before,
    is not finite; the guard then ends training one step later.
    """
    session.last = step
    _clip(session, step)
    _step_if_finite(session.optimizer, step, previous)
    _complete(session, step)
    if previous is not None:
        _read_numbers(session, previous)


def _clip(session: Session, step: Step) -> None:
    if session.run.clip is not None:
        torch.nn.utils.clip_grads_with_norm_(step.parameters, session.run.clip, step.norm)


def _complete(session: Session, step: Step) -> None:
    session.optimizer.zero_grad(set_to_none=True)
    session.counters.step += 1
    session.counters.tokens += step.items


def _read_numbers(session: Session, step: Step) -> None:
    """Wait for the numbers of a step; every rank does so at the same points of the loop."""
    try:
        step.judge()
    except DivergedError:
        session.last = None  # a caller that trains on does so without the refused step
        raise
    session.stop.agreed = step.stop


def _needs_numbers(session: Session) -> bool:
    """Return True if the log, an evaluation, a checkpoint or a probe needs the last loss now."""
    run = session.run
    return bool(
        _logs(session)
        or _due(session, run.eval.every)
        or _due(session, run.checkpoint.every)
        or _every(run.log.masks_every, session.step)
        or run.probe
    )


def _accepts(session: Session, step: Step, loss: float, grad_norm: float) -> bool:
    """Let the guard judge a step; False if it refuses the update."""

    def culprits() -> list[str]:
        names = {id(p): name for name, p in session.model.named_parameters()}
        finite = torch.isfinite(session.world.whole(step.norms)).tolist()
        pairs = zip(step.parameters, finite, strict=True)
        return [names[id(parameter)] for parameter, good in pairs if not good]

    return session.guard.accepts(
        loss,
        grad_norm,
        step=step.number,
        sparse=session.sparsifier.sparse,
        scaled=session.scaler.is_enabled(),
        culprits=culprits,
    )


def _step_if_finite(optimizer: Any, step: Step, previous: Step | None) -> None:
    """Take the step on the device unless its numbers, or those of the step before, are not finite.

    The numbers of the step before are still on the device; if it was refused, so is this step.
    """
    if previous is not None:
        step.nonfinite |= previous.nonfinite
    optimizer.grad_scale = None
    optimizer.found_inf = step.nonfinite.float()
    try:
        optimizer.step()
    finally:  # as GradScaler does: a later step of another caller must not see them
        del optimizer.grad_scale, optimizer.found_inf


def _gradients(session: Session, batches: list[Batch], items: int, sums: Tensor) -> None:
    """Compute scaled gradients of the global batch; write the losses of own micro-batches."""
    if session.sparsifier.method.follows_policy:
        _policy_gradients(session, batches, items, sums)
        return
    for index, loss, *terms in _losses(session, session.step, batches):
        # by the global count: gradients do not depend on how items are divided into micro-batches
        session.scaler.scale(loss / items).backward()
        for row, value in zip(sums, (loss.detach(), *terms), strict=True):
            row[index] = value
    session.gradients.reduce()


@torch.no_grad()
def _policy_gradients(session: Session, batches: list[Batch], items: int, sums: Tensor) -> None:
    """Compute gradients of a method that learns from losses (:meth:`Sparsifier.policy_step`)."""
    for index, *values in _losses(session, session.step, batches):
        for row, value in zip(sums, values, strict=True):
            row[index] = value
    # with drawn and with first masks; each from one rank, so the sum over ranks is exact
    pairs = torch.stack((sums[0], torch.zeros_like(sums[0])))
    with session.sparsifier.first_masks():
        for index, loss, *_ in _losses(session, session.step, batches):
            pairs[1, index] = loss
    session.world.sum(pairs)
    difference = (pairs[0] - pairs[1]).sum() / items
    session.sparsifier.follow_policy(difference, session.scaler.scale(difference.new_ones(())))


def seed_draws(seed: int, step: int, micro: int) -> None:
    """Seed all generators from (seed, step, micro-batch), for dropout and other draws.

    No generator state has to be saved, and an evaluation in between changes nothing.
    """
    word = int(np.random.SeedSequence([seed, step, micro]).generate_state(1, np.uint64)[0])
    random.seed(word)
    np.random.seed(word % 2**32)
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():  # without a GPU torch.manual_seed formats a traceback: 0.3 ms
        torch.cuda.manual_seed_all(word)


def _items(session: Session, batches: list[Batch]) -> int:
    """Return the number of items (such as target tokens) in the global batch."""
    items = sum(map(session.task.count, batches))
    return items if session.world.size == 1 else int(session.world.sum(torch.tensor(items)))


def _losses(session: Session, step: int, batches: list[Batch]) -> Iterator[tuple[Any, ...]]:
    """Yield number, loss and its terms of each own micro-batch of ``step``, summed over its items.

    The number is within the global batch. All random draws depend on it, so they are the same for
    every world size.
    """
    for index, batch in zip(session.batches.share, moved(session, batches), strict=True):
        session.sparsifier.micro_batch(
            index, capacity=session.task.capacity * session.run.batch.micro
        )
        seed_draws(session.run.seed, step, index)
        with session.gradients.micro_batch(last=index == session.batches.share[-1]):
            with autocast(session.run.precision, session.device):
                sums = session.gradients.loss(batch)
            yield index, *sums


def _totals(session: Session) -> Totals:
    """Return zeros for the losses of the global batch, and no request to stop."""
    count = session.run.batch.size // session.run.batch.micro
    return Totals.zeros(count, session.device, session.gradients.terms)


@torch.no_grad()
def training_loss(session: Session, step: int, batches: list[Batch]) -> float:
    """Return the loss that training in ``step`` would report with the present weights."""
    totals = _totals(session)
    for index, loss, *_ in _losses(session, step, batches):
        totals.sums[0, index] = loss
    session.world.sum(totals.both)
    return sum_in_order(totals.sums[0].tolist()) / _items(session, batches)


def _logs(session: Session) -> bool:
    """Return True if the record has a line for the last step; events add more lines."""
    log = session.run.log
    step = session.step
    return _every(log.every, step) or _every(log.layers_every, step) or step in (1, session.end)


def _owes_evaluation(session: Session) -> bool:
    """Return True if an evaluation is due that no earlier process has made."""
    options = session.run.eval
    is_new = session.counters.evaluated != session.step
    return is_new and options.batches != 0 and _due(session, options.every)


def _due(session: Session, every: int) -> bool:
    """Return True at multiples of ``every`` and at the end."""
    return session.step >= session.end or _every(every, session.step)


def _every(count: int, step: int) -> bool:
    """Return True at multiples of ``count``; 0: never."""
    return count > 0 and step % count == 0
