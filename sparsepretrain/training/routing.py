"""Load-balancing loss of routers: without it, tokens may all be sent to few experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsepretrain.tasks import Batch, ScoredTask
from sparsepretrain.training.gradients import Loss


class BalancedLoss(Loss):
    """A loss plus ``factor`` times the load-balancing loss of the routers, per item.

    The loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) over all layers, as
    transformers computes it for each micro-batch, from the outputs of its router modules. It is not
    additive: with other micro-batches it is another number.

    Args:
        loss: of the task, or against a teacher.
        factor: of the load-balancing loss.
    """

    def __init__(self, loss: Loss, factor: float) -> None:
        super().__init__(loss.task, loss.model)
        self.terms = (*loss.terms, "router_loss")  # type: ignore[misc]
        self._loss = (loss,)  # in a tuple: its model is a child already
        self._factor = factor
        self._routers = routers(loss.model)
        self._kept = [_Kept(index) for _, index in self._routers]
        for (router, _), kept in zip(self._routers, self._kept, strict=True):
            router.register_forward_hook(kept)

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the sums over the items of the loss, its terms and the load-balancing loss."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        for kept in self._kept:
            kept.logits = []
        try:
            loss, *terms = self._loss[0](batch)
            logits = tuple(each for kept in self._kept for each in kept.logits or ())
        finally:
            for kept in self._kept:
                kept.logits = None
        router: Any = self._routers[0][0]
        # the padding of documents; that of other tasks counts as tokens
        is_token = self.task.is_item(batch) if isinstance(self.task, ScoredTask) else None
        function: Any = load_balancing_loss_func
        balance = function(logits, router.num_experts, router.top_k, is_token)
        total = balance * self.task.count(batch)
        return loss + self._factor * total.to(loss.dtype), *terms, total.detach()


class _Kept:
    """Hook that keeps the logits of a router during the forward of the loss."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.logits: list[Tensor] | None = None  # None: evaluation, or a recomputation

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.logits is not None:
            self.logits.append(output[self.index] if isinstance(output, tuple) else output)


def routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the routers of a model of transformers, and where their outputs have the logits.

    None of a model for which transformers computes no load-balancing loss from them.
    """
    recorders = [
        recorder
        for module in model.modules()
        if (recorder := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    ]
    found = {}
    for recorder in recorders:
        kind = getattr(recorder, "target_class", recorder)
        for module in model.modules():
            if isinstance(module, kind) and hasattr(module, "top_k"):
                found[module] = getattr(recorder, "index", 0)
    return [*found.items()]
