"""The training loop, top to bottom.

Order of a step: all micro-batches -> (all-reduce) -> unscale -> clip -> J, inside the optimiser's
pre-hook -> optimiser -> refresh and flip count, inside its post-hook.
"""

from __future__ import annotations

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
    timer: Timer = field(default_factory=lambda: Timer())


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
    """Train to the last step; returns the exit code of a signal, or None when finished.

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
        if t.step == run.steps:
            return None
        started = time.perf_counter()
        values = train_step(t)
        t.timer.add(time.perf_counter() - started, values.pop("items"))
        layers = bool(run.log.layers_every) and t.step % run.log.layers_every == 0
        if t.step % run.log.every == 0 or layers or t.step in (1, run.steps):
            rate = t.timer.rate()
            values |= {"tokens_per_second": rate, **t.sparsifier.metrics(per_layer=layers)}
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
    limit = float("inf") if run.clip is None else run.clip
    norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), limit)
    loss, grad_norm = float(total) / items, float(norm)
    if _finite(t, loss, grad_norm):
        scale = t.scaler.get_scale()
        t.scaler.step(t.optimizer)
        t.scaler.update()
        if t.scaler.get_scale() < scale:  # an overflow: the scaler left the update out
            t.skipped += 1
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


def _finite(t: Training, loss: float, grad_norm: float) -> bool:
    """Whether to update; raises or counts according to ``guard``."""
    # with a loss scaler an infinite gradient is its business: it skips the update and halves
    checked = loss if t.scaler.is_enabled() else loss + grad_norm
    if torch.isfinite(torch.tensor(checked)):
        t.skips_in_a_row = 0
        return True
    t.skipped += 1
    t.skips_in_a_row += 1
    if t.run.guard == "stop" or t.skips_in_a_row > MAX_SKIPS:
        raise DivergedError(
            f"step {t.step + 1}: {_culprit(t, loss)}; nothing was updated. "
            "Lower optim.lr or clip, or continue past single steps with guard=skip"
        )
    return False


def _culprit(t: Training, loss: float) -> str:
    if not torch.isfinite(torch.tensor(loss)):
        return f"the loss is {loss}"
    for name, parameter in t.model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of {name} is not finite"
    return "the gradient norm is not finite"


def _due(every: int, t: Training) -> bool:
    """At multiples of ``every``, at the start (evaluations) and at the end."""
    return t.step == t.run.steps or (every > 0 and t.step % every == 0)
