"""How much of the masked decay would be lost to rounding with parameters of low precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain.registry import register
from sparsepretrain.training.observer import Probe, ProbeOptions

if TYPE_CHECKING:
    from sparsepretrain.training.session import Session
    from sparsepretrain.training.step import Step


@dataclass(slots=True, kw_only=True)
class RoundingOptions(ProbeOptions):
    """Options of the probe of rounding."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of parameters and gradients in the question; fp32 is what the trainer has."""


@register("probe", "rounding")
class Rounding(Probe):
    """``lost/<layer>``: share of masked entries whose decay leaves gradient or weight as it was.

    ``lost``: the same over all layers. Masters and gradients, clipped, are rounded to the dtype,
    then the method decays them. Methods without masked decay have no lines.
    """

    name = "rounding"
    Options = RoundingOptions

    def __init__(self, options: RoundingOptions, session: Session) -> None:
        super().__init__(options, session)
        self._line: dict[str, Any] = {}

    def after_backward(self, session: Session) -> None:
        """Decay copies of the gradients, or of the weights, in the dtype in question."""
        self._line = {}
        if not self.due(session) or not session.sparsifier.decay:
            return
        import torch

        from sparsepretrain.sparsity.steps import lost_decay

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        method, clip = session.sparsifier.method, session.run.clip
        grads = [p.grad for p in session.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        share = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        lr = float(session.optimizer.param_groups[0]["lr"])
        masks = session.sparsifier.masks()
        lost = masked = 0.0
        for name, layer in session.sparsifier.layers.items():
            if layer.weight.grad is None:
                continue
            weight = layer.weight.detach().to(dtype[self.options.dtype])
            before = (share * layer.weight.grad).to(weight.dtype) if method.on_gradient else weight
            after = before.clone()
            if method.on_gradient:
                method.adjust_gradient_(after, weight, masks[name], 1.0)
            else:
                method.adjust_weight_(after, masks[name], lr)
            self._line[f"lost/{name}"] = lost_decay(before, after, weight, masks[name])
            pruned = int((~masks[name]).sum())
            lost, masked = lost + pruned * self._line[f"lost/{name}"], masked + pruned
        self._line["lost"] = lost / max(masked, 1)

    def after_step(self, session: Session, step: Step) -> None:
        """Report it with the step."""
        if self._line and session.updated:
            self.write(session, self._line)
