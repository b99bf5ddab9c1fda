"""Does the loss change as the gradient predicts? (S-STE, Figures 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from sparsepretrain.registry import register
from sparsepretrain.training.ema import put
from sparsepretrain.training.loop import training_loss
from sparsepretrain.training.observer import Probe, ProbeOptions
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import Step


@dataclass(slots=True, kw_only=True)
class DescentOptions(ProbeOptions):
    """Options of the probe of descent."""

    epsilons: Annotated[tuple[float, ...], "(0, 1]"] = (1.0, 0.1, 0.01)
    """Parts of the update to go; each costs the forwards of a step."""


@register("probe", "descent")
class Descent(Probe["Session"]):
    """Changes of the loss of a step's own batch along the update ΔW that the optimizer made of it.

    ``predicted``: ⟨∇L, ΔW⟩ with the gradient that the backward gave, straight through and, where
    the method samples, with its noise. ``actual_<ε>``: L(W + εΔW) - L(W), masks chosen again; at
    ε = 1 this is ΔF₁ of Figure 1. ``weights_only``: ΔF₂, the same with the masks of before: entries
    outside them are zero, the others hold the new weight, of a soft threshold its value there.

    The forwards are those of training: micro-batches, draws and mode of the step. What a method
    stores (masks between refreshes, a scale that follows the weights) is as it is after the step. A
    step on which the phase changes is left out, and one without an update.
    """

    name = "descent"
    Options = DescentOptions

    def __init__(self, options: DescentOptions, session: Session) -> None:
        super().__init__(options, session)
        self._before: dict[str, Any] | None = None

    def after_backward(self, session: Session) -> None:
        """Keep gradients, weights and masks of before the update."""
        self._before = None
        if not self.due(session):
            return
        parameters = dict(session.model.named_parameters())
        self._before = {
            "gradients": {k: p.grad.clone() for k, p in parameters.items() if p.grad is not None},
            "weights": {k: p.detach().clone() for k, p in parameters.items()},
            "masks": session.sparsifier.masks(),
            "phase": session.sparsifier.method.phase,
        }

    def after_step(self, session: Session, step: Step) -> None:
        """Compare what was predicted with what happens."""
        before, self._before = self._before, None
        phase = session.sparsifier.method.phase
        if before is None or not session.updated or before["phase"] != phase:
            return
        parameters = dict(session.model.named_parameters())
        after = {name: p.detach().clone() for name, p in parameters.items()}
        start: dict[str, Tensor] = before["weights"]
        products = [
            ((after[name] - start[name]).double() * gradient.double()).sum()
            for name, gradient in before["gradients"].items()
        ]
        line = {"loss": step.loss, "predicted": float(sum(products))}
        batches = session.batches.again(session.step - 1)
        # running statistics; generators need no care, since every micro-batch seeds them
        buffers = [(b, b.clone()) for n, b in session.model.named_buffers() if "sparsity" not in n]
        for epsilon in self.options.epsilons:
            moved = {name: start[name].lerp(after[name], epsilon) for name in after}
            put(parameters, moved, session.sparsifier)
            change = training_loss(session, session.step - 1, batches) - step.loss
            line[f"actual_{epsilon:g}"] = change
        put(parameters, after, session.sparsifier)
        session.sparsifier.hold(before["masks"])
        change = training_loss(session, session.step - 1, batches) - step.loss
        line["weights_only"] = change
        put(parameters, after, session.sparsifier)
        for buffer, value in buffers:
            buffer.copy_(value)
        self.write(session, line)
