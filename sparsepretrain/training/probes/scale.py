"""The scale of every layer, and the one that would fit best (S-STE, Figure 4 b)."""

from __future__ import annotations

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.training.observer import Probe
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import Step


@register("probe", "scale")
class Scale(Probe["Session"]):
    """Scales of layers with a β: ``beta/<layer>`` and ``best/<layer>`` = argmin_b ‖W - b·S(W)‖².

    Both are those after the step; methods without a scale have no lines.
    """

    name = "scale"

    def after_step(self, session: Session, step: Step) -> None:
        """Read the scales and fit them again."""
        if session.step % self.options.every:
            return
        line = {}
        for name, layer in session.sparsifier.layers.items():
            forward = layer.operands.project(layer.weight).forward
            scale = layer.operands.method.scale(layer.sparsity)
            if forward is None or scale is None or scale.dim():  # a bank has one per slice
                continue
            beta = float(scale)
            line[f"beta/{name}"] = beta
            fit = kernels.optimal_scale(layer.weight.detach(), forward)
            line[f"best/{name}"] = beta * float(fit)
        if line:
            self.write(session, line)
