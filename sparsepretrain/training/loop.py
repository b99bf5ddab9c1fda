"""The training loop, top to bottom.

Order of a step: all micro-batches -> (all-reduce) -> unscale -> clip -> J, inside the optimiser's
pre-hook -> optimiser -> refresh and flip count, inside its post-hook.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.config.schema import Run
from sparsepretrain.errors import DivergedError
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.tasks import Batch, Task
from sparsepretrain.training.precision import autocast
from sparsepretrain.training.schedules import learning_rate
from sparsepretrain.training.signals import StopSignals

MAX_SKIPS = 10
"""Skipped steps in a row after which ``guard=skip`` gives up."""

MAX_OVERFLOWS = 50
"""The same for gradients under loss scaling: so many halvings make any usable scale useless."""


@dataclass
class Training:
    """Everything the loop touches."""

    run: Run
    device: torch.device
    task: Task
    model: nn.Module
    forward_model: nn.Module
    """The model, or its compiled form."""
    optimizer: Optimizer
    sparsifier: Sparsifier
    scaler: torch.amp.GradScaler
    peak_flops: float | None = None
    """Dense peak of the device, for MFU; None: not known."""
    flops_per_item: float = 0.0
    """Forward and backward, for MFU."""
    step: int = 0
    """Completed steps."""
    tokens: int = 0
    """Items trained on so far."""
    evaluated: int = -1
    """Completed steps at the last evaluation."""
    skipped: int = 0
    """Steps without an update because something was not finite."""
    skips_in_a_row: int = 0
    stop_after: int | None = None
    """End early, after so many completed steps; schedules and windows stay those of the run."""
    timer: Timer = field(default_factory=lambda: Timer())

    @property
    def end(self) -> int:
        """Completed steps after which the loop returns."""
        return self.run.steps if self.stop_after is None else self.stop_after


@dataclass
class Timer:
    """Training time between two log lines, without evaluations and checkpoints."""

    seconds: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        """Count one step."""
        self.seconds += seconds
        self.tokens += tokens

    def rate(self) -> float:
        """Tokens per second since the last call."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.seconds, self.tokens = 0.0, 0
        return rate


def run_steps(
    t: Training,
    log: Callable[[dict[str, Any]], None],
    save: Callable[[], None],
    save_masks: Callable[[], None],
    signals: StopSignals,
) -> int | None:
    """Train to the end; returns the exit code of a signal, or None when finished.

    Whatever stops it, the newest checkpoint is at a step boundary, and everything that the record
    has for its step was written before it: an interrupted run continues as if nothing happened.
    """
    run = t.run
    while True:
        if _due(run.eval.every, t) and run.eval.batches and t.evaluated != t.step:
            loss = evaluate(t, signals)
            if loss is not None:
                t.evaluated = t.step
                log({"step": t.step, "tokens": t.tokens, "split": "validation", "loss": loss})
        stopping = signals.exit_code is not None
        if t.step and (stopping or _due(run.checkpoint.every, t)):
            save()
        if stopping:
            return signals.exit_code
        if t.step >= t.end:
            return None
        started, was_sparse = time.perf_counter(), t.sparsifier.sparse
        values = train_step(t)
        t.timer.add(time.perf_counter() - started, values.pop("items"))
        layers = bool(run.log.layers_every) and t.step % run.log.layers_every == 0
        # in the record whatever is due: a switch of phase, and flips that no later line repeats
        event = t.sparsifier.sparse != was_sparse or t.sparsifier.refreshed
        if t.step % run.log.every == 0 or layers or event or t.step in (1, t.end):
            rate = t.timer.rate()
            values |= {"tokens_per_second": rate, **_measure(t, per_layer=layers)}
            if t.peak_flops is not None:
                values["mfu"] = rate * t.flops_per_item / t.peak_flops
            if t.skipped:
                values["skipped"] = t.skipped
            log({"step": t.step, "tokens": t.tokens, **values})
        if run.log.masks_every and t.step % run.log.masks_every == 0:
            save_masks()


def train_step(t: Training) -> dict[str, Any]:
    """One optimiser step over the global batch; returns loss, lr, grad_norm and items."""
    run, size, micro = t.run, t.run.batch.size, t.run.batch.micro
    if not t.model.training:  # after an evaluation; visiting every module takes time
        t.model.train()
    lr = learning_rate(run.schedule, run.optim.lr, t.step, run.steps)
    for group in t.optimizer.param_groups:
        group["lr"] = lr
    batches = [
        t.task.batch("train", t.step, range(i, i + micro), size, t.device)
        for i in range(0, size, micro)
    ]
    items = sum(map(t.task.count, batches))
    total = torch.zeros((), dtype=torch.float64, device=t.device)
    for index, batch in enumerate(batches):
        t.sparsifier.micro_batch(index)
        total += _forward_backward(t, batch, items)
    t.scaler.unscale_(t.optimizer)
    parameters = [p for p in t.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    loss, grad_norm = float(total) / items, float(norm)
    if _finite(t, loss, grad_norm):  # before clipping, which spreads a NaN to every gradient
        if run.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, run.clip, norm)
        t.scaler.step(t.optimizer)
    t.scaler.update()  # after an overflow: halves the scale
    t.optimizer.zero_grad(set_to_none=True)
    t.step += 1
    t.tokens += items
    return {"loss": loss, "lr": lr, "grad_norm": grad_norm, "items": items}


def _forward_backward(t: Training, batch: Batch, items: int) -> Tensor:
    with autocast(t.run.precision, t.device):
        loss, _ = t.task.loss(t.forward_model, batch)
    t.scaler.scale(loss / items).backward()
    return loss.detach().double()


@torch.no_grad()
def evaluate(t: Training, signals: StopSignals | None = None) -> float | None:
    """Mean loss over the first ``eval.batches`` micro-batches of the validation split.

    The weights are those the method evaluates with; nothing of the training state changes.
    None when a signal cut it short.
    """
    t.model.eval()
    available = t.task.samples("validation")
    size = min(t.run.batch.micro, available)
    total, items = 0.0, 0
    for index in range(min(t.run.eval.batches, available // size)):
        if signals is not None and signals.exit_code is not None:
            return None
        batch = t.task.batch("validation", index, range(size), size, t.device)
        with autocast(t.run.precision, t.device):
            loss, count = t.task.loss(t.forward_model, batch)
        total += float(loss)
        items += count
    return total / items


def _measure(t: Training, *, per_layer: bool) -> dict[str, float]:
    values = t.sparsifier.metrics(per_layer=per_layer)
    if t.skips_in_a_row:  # no update, so no masks were compared: the flips are of an older step
        values = {k: v for k, v in values.items() if not k.startswith("flip_")}
    return values


def _finite(t: Training, loss: float, grad_norm: float) -> bool:
    """Whether to update; raises or counts according to ``guard``.

    Under loss scaling an infinite gradient is an overflow: skipped whatever ``guard`` says.
    """
    if math.isfinite(loss + grad_norm):
        t.skips_in_a_row = 0
        return True
    t.skipped += 1
    t.skips_in_a_row += 1
    allowed = MAX_SKIPS if t.run.guard == "skip" else 0
    if t.scaler.is_enabled() and math.isfinite(loss):
        allowed = MAX_OVERFLOWS
    if t.skips_in_a_row > allowed:
        times = f", {t.skips_in_a_row} steps in a row" if allowed else ""
        hint = "" if allowed else ", or continue past single steps with guard=skip"
        raise DivergedError(
            f"step {t.step + 1}: {_culprit(t, loss)}{times}; nothing was updated. "
            f"Lower optim.lr or clip{hint}"
        )
    return False


def _culprit(t: Training, loss: float) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    names = [
        name
        for name, parameter in t.model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    ]
    if not names:
        return "the gradient norm is not finite"
    # backward carries a NaN from where it arises to the layers before it
    others = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]} is not finite{others}"


def _due(every: int, t: Training) -> bool:
    """At multiples of ``every``, at the start (evaluations) and at the end."""
    return t.step >= t.end or (every > 0 and t.step % every == 0)
