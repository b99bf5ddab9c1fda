"""The training loop, top to bottom.

Order of a step: all micro-batches -> (all-reduce) -> unscale -> clip -> J, inside the optimizer's
pre-hook -> optimizer -> refresh and flip count, inside its post-hook.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsepretrain.errors import DataError, DivergedError
from sparsepretrain.tasks import Batch
from sparsepretrain.training.guard import require_finite_weights
from sparsepretrain.training.precision import autocast
from sparsepretrain.training.schedules import learning_rate
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import ENDS, Step, total_and_stop
from sparsepretrain.training.validation import evaluate, moved, share_statistics


def run_steps(
    t: Session,
    log: Callable[[dict[str, Any]], None],
    save: Callable[[], None],
    save_masks: Callable[[], None],
) -> int | None:
    """Train to the end; return the exit code of a signal, or None when finished.

    The newest checkpoint is always at a step boundary, and the record's lines up to its step were
    written before it, so an interrupted run resumes exactly.
    """
    run = t.run
    while True:
        if _due(run.eval.every, t) and run.eval.batches != 0 and t.evaluated != t.step:
            metrics = evaluate(t, "validation", run.eval.batches, final=t.step >= t.end)
            if metrics is not None:
                t.evaluated = t.step
                log({"step": t.step, "tokens": t.tokens, "split": "validation", **metrics})
        stopping = t.stopping
        if t.step and (stopping is not None or _due(run.checkpoint.every, t)):
            if t.last is not None:
                _read_numbers(t, t.last)
            require_finite_weights(t.model, t.parameters, t.world, t.step)
            share_statistics(t)
            save()
        if stopping is not None or t.step >= t.end:
            return stopping
        step = train_step(t)
        layers = bool(run.log.layers_every) and t.step % run.log.layers_every == 0
        if _logs(t) or step.event:
            numbers = {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm}
            require_finite_weights(t.model, t.parameters, t.world, t.step)
            line = {"step": t.step, "tokens": t.tokens, **numbers}
            for observer in t.observers:
                line |= observer.at_log(t, per_layer=layers)
            if t.guard.skipped:
                line["skipped"] = t.guard.skipped
            log(line)
        if run.log.masks_every and t.step % run.log.masks_every == 0:
            save_masks()


def train_step(t: Session) -> Step:
    """Take one optimizer step over the global batch.

    Raises:
        DataError: the batch has no target tokens.
        DivergedError: the guard refuses the update, of this step or of the one before.
    """
    run, was_sparse = t.run, t.sparsifier.sparse
    if not t.model.training:  # after an evaluation; visiting every module takes time
        t.model.train()
    lr = learning_rate(run.schedule, run.optim.lr, t.step, run.steps)
    for group in t.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    for observer in t.observers:
        observer.before_step(t)
    started = time.perf_counter()
    batches = t.batches.step(t.step)
    waited = time.perf_counter() - started
    items = _items(t, batches)
    if not items:
        raise DataError(
            f"step {t.step + 1}: the batch has no target tokens (all labels are ignored)"
        )
    losses = _gradients(t, batches, items)
    # A stop request travels with the losses: it costs no further collective, and every rank reads
    # it at the same step.
    if t.own_stop is not None:
        losses[ENDS.index(t.own_stop) - len(ENDS)] = 1.0
    t.world.sum(losses)
    t.scaler.unscale_(t.optimizer)
    for observer in t.observers:
        observer.after_backward(t)
    parameters = [p for p in t.parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm([p.grad for p in parameters if p.grad is not None]))
    # before clipping, which spreads a NaN to every gradient
    norm = t.world.whole(torch.linalg.vector_norm(norms))
    step = Step(
        number=t.step + 1,
        lr=lr,
        items=items,
        waited=waited,
        losses=losses,
        parameters=parameters,
        norms=norms,
        norm=norm,
        judge=lambda loss, norm: _judge(t, step, loss, norm),
    )
    # With reads_late this step's numbers stay on the device until the next step is launched, which
    # then does not wait for them.
    before, t.last = t.last, step if t.reads_late else None
    if t.reads_late or step.read():
        if run.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, run.clip, norm)
        if t.reads_late:
            _step_if_finite(t.optimizer, step, before)
        else:
            t.scaler.step(t.optimizer)
    t.scaler.update()  # after an overflow: halves the scale
    t.optimizer.zero_grad(set_to_none=True)
    t.step += 1
    t.tokens += items
    if before is not None:
        _read_numbers(t, before)
    # A new phase or new masks get a line of the record, so their numbers are needed now.
    changed = t.sparsifier.sparse != was_sparse or t.sparsifier.refreshed
    if not t.reads_late or before is None or changed or _needs_numbers(t):
        _read_numbers(t, step)
    step.event = changed or not t.updated
    for observer in t.observers:
        observer.after_step(t, step)
    return step


def _read_numbers(t: Session, step: Step) -> None:
    """Wait for the numbers of a step; every rank does so at the same points of the loop."""
    try:
        step.read()
    except DivergedError:
        t.last = None  # a caller that trains on does so without the refused step
        raise
    t.agreed = step.stop


def _needs_numbers(t: Session) -> bool:
    """Return True if the log, an evaluation, a checkpoint or a probe needs the last loss now."""
    run = t.run
    masks = run.log.masks_every and t.step % run.log.masks_every == 0
    due = _due(run.eval.every, t) or _due(run.checkpoint.every, t)
    return bool(_logs(t) or due or masks or run.probe)


def _judge(t: Session, step: Step, loss: float, grad_norm: float) -> bool:
    """Let the guard judge a step; False if it refuses the update."""

    def culprits() -> list[str]:
        names = {id(p): name for name, p in t.model.named_parameters()}
        finite = torch.isfinite(t.world.whole(step.norms)).tolist()
        pairs = zip(step.parameters, finite, strict=True)
        return [names[id(parameter)] for parameter, good in pairs if not good]

    return t.guard.accepts(
        loss,
        grad_norm,
        step=step.number,
        sparse=t.sparsifier.sparse,
        scaled=t.scaler.is_enabled(),
        culprits=culprits,
    )


def _step_if_finite(optimizer: Any, step: Step, before: Step | None) -> None:
    """Take the step on the device unless its numbers, or those of the step before, are not finite.

    The numbers of the step before are still on the device; if it was refused, so is this step.
    """
    if before is not None:
        step.nonfinite |= before.nonfinite
    optimizer.grad_scale, optimizer.found_inf = None, step.nonfinite.float()
    try:
        optimizer.step()
    finally:  # as GradScaler does: a later step of another caller must not see them
        del optimizer.grad_scale, optimizer.found_inf


def _gradients(t: Session, batches: list[Batch], items: int) -> Tensor:
    """Compute scaled gradients of the global batch; return the losses of own micro-batches."""
    losses = _no_losses(t)
    for index, loss in _losses(t, t.step, batches):
        # by the global count: gradients do not depend on how items are divided into micro-batches
        t.scaler.scale(loss / items).backward()
        losses[index] = loss.detach()
    t.gradients.reduce()
    return losses


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


def _items(t: Session, batches: list[Batch]) -> int:
    """Return the number of items (such as target tokens) in the global batch."""
    own = sum(map(t.task.count, batches))
    return own if t.world.size == 1 else int(t.world.sum(torch.tensor(own)))


def _losses(t: Session, step: int, batches: list[Batch]) -> Iterator[tuple[int, Tensor]]:
    """Yield number and loss of each own micro-batch of ``step``, summed over its items.

    The number is within the global batch. All random draws depend on it, so they are the same for
    every world size.
    """
    for index, batch in zip(t.batches.share, moved(t, batches), strict=True):
        t.sparsifier.micro_batch(index, capacity=t.task.capacity * t.run.batch.micro)
        seed_draws(t.run.seed, step, index)
        with t.gradients.micro_batch(last=index == t.batches.share[-1]):
            with autocast(t.run.precision, t.device):
                loss = t.gradients.loss(batch)
            yield index, loss


def _no_losses(t: Session) -> Tensor:
    """Return zeros for the losses of the global batch and a flag per code of :data:`ENDS`.

    Each loss comes from one rank, so the sum over ranks is exact.
    """
    count = t.run.batch.size // t.run.batch.micro + len(ENDS)
    return torch.zeros(count, dtype=torch.float64, device=t.device)


@torch.no_grad()
def training_loss(t: Session, step: int, batches: list[Batch]) -> float:
    """Return the loss that training in ``step`` would report with the present weights."""
    losses = _no_losses(t)
    for index, loss in _losses(t, step, batches):
        losses[index] = loss
    return total_and_stop(t.world.sum(losses).tolist())[0] / _items(t, batches)


def _logs(t: Session) -> bool:
    """Return True if the record has a line for the last step; events add more lines."""
    every, layers = t.run.log.every, t.run.log.layers_every
    return t.step % every == 0 or bool(layers and t.step % layers == 0) or t.step in (1, t.end)


def _due(every: int, t: Session) -> bool:
    """Return True at multiples of ``every`` and at the end."""
    return t.step >= t.end or (every > 0 and t.step % every == 0)
