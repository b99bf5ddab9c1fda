"""Static masks: chosen once, from the initial weights or at random, and kept for the whole run."""

from dataclasses import dataclass
from typing import Literal

from sparsepretrain.kernels import nm_mask
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Operand, Projection, Row


@dataclass(slots=True, kw_only=True)
class MineOptions(MethodOptions):
    choice: Literal["magnitude", "random"] = "magnitude"


@register("method", "mine")
class Mine(Method):
    Options = MineOptions
    summary = "one mask for the whole run"

    @property
    def sparse_row(self):
        return Row(A=self.nm("M∘W"), J=Operand("M∘dW"))

    def initial_state(self, weight, state):
        score = weight if self.options.choice == "magnitude" else weight.clone().uniform_()
        return {"mask": nm_mask(score, *self.pattern, dim=state.dim)}

    def project(self, weight, state):
        return Projection(weight.masked_fill(~state.mask, 0), state.mask)

    def adjust_gradient_(self, grad, weight, mask, scale):
        grad.masked_fill_(~mask, 0)
