"""Loss against a teacher: (1-w)·CE + w·T²·KL(teacher‖student), per item (group ``teacher``).

Knowledge distillation of Hinton, Vinyals and Dean (arXiv:1503.02531, section 2.1); AST
(arXiv:2407.20584) and CAST (arXiv:2509.25996) train a sparse model against its dense self.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain.config.groups import Distillation
from sparsepretrain.tasks import Batch, ScoredTask, sum_in_chunks, widen
from sparsepretrain.training import compilation
from sparsepretrain.training.gradients import Loss


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """Model to imitate, in eval mode, without gradients; never trained, never saved."""

    options: Distillation
    task: ScoredTask
    """The task of the run with the teacher's kind of model."""
    model: nn.Module

    def compiled(self, mode: str) -> Teacher:
        """Compile its blocks, or all of it, as those of the student (:mod:`compilation`)."""
        return replace(self, model=compilation.compiled(self.model, mode))

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of the teacher for ``batch``, (…, classes), as those of the student."""
        return self.task.scores(self.model, batch)


class DistillationLoss(Loss):
    """Loss of a task against a teacher, with its terms."""

    terms = ("cross_entropy", "kl")

    task: ScoredTask

    def __init__(self, task: ScoredTask, model: nn.Module, teacher: Teacher) -> None:
        super().__init__(task, model)
        self._teacher = teacher  # no submodule: DistributedDataParallel would copy its weights

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the sums over the items of the loss, the cross-entropy and KL, without T²."""
        options = self._teacher.options
        expected = self._teacher.logits(batch)
        logits = self.task.scores(self.model, batch)
        kl = kl_divergence(
            logits,
            expected,
            options.temperature,
            self.task.is_item(batch),
            compiled=self.task.compiles_loss,
        )
        cross_entropy = self.task.total(logits, batch)
        share = options.weight
        loss = (1 - share) * cross_entropy + share * options.temperature**2 * kl
        return loss, cross_entropy.detach(), kl.detach()


def kl_divergence(
    logits: Tensor,
    expected: Tensor,
    temperature: float,
    is_item: Tensor | None = None,
    *,
    compiled: bool = False,
) -> Tensor:
    """Return Σ KL(softmax(expected/T) ‖ softmax(logits/T)) over items in nats, accumulated in fp32.

    Memory is saved as in :func:`sparsepretrain.tasks.cross_entropy`: no fp32 copies of all logits.

    Args:
        logits: (…, classes), of the student; fp64 stays fp64.
        expected: (…, classes), of the teacher.
        temperature: T.
        is_item: (…) bool; others are left out. None: all are items.
        compiled: compile it together with its backward.
    """
    classes = logits.shape[-1]
    keep = torch.ones_like(logits[..., 0], dtype=torch.bool) if is_item is None else is_item
    parts = (logits.reshape(-1, classes), expected.reshape(-1, classes), keep.reshape(-1))
    if compiled and torch.is_grad_enabled():
        result: Tensor = _compiled_total()(*parts, temperature=temperature)
        return result
    total = functools.partial(_total, temperature=temperature)
    return sum_in_chunks(total, *parts)


def _total(logits: Tensor, expected: Tensor, keep: Tensor, *, temperature: float) -> Tensor:
    log_q = (widen(logits) / temperature).log_softmax(-1)
    log_p = (widen(expected) / temperature).log_softmax(-1)
    p = log_p.exp()
    # a class that the teacher excludes (logit -inf) adds 0; with F.kl_div it would be NaN, 0·∞
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return torch.where(keep, terms.sum(-1), 0.0).sum()


@functools.cache
def _compiled_total() -> Any:
    return torch.compile(_total)
