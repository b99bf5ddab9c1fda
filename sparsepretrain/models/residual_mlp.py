"""Residual MLP from vectors to vectors: a transformer's FFN blocks without attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from sparsepretrain.errors import Problems
from sparsepretrain.models import Recipe
from sparsepretrain.models._text import ffn_problems
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class ResidualMLPOptions:
    """Architecture; names as for GPT-2."""

    name: str
    family: Literal["residual_mlp"]
    inputs: Annotated[int, "> 0"]
    outputs: Annotated[int, "> 0"]
    n_embd: Annotated[int, "> 0"]
    n_layer: Annotated[int, "> 0"]
    n_inner: Annotated[int, "> 0"]
    ffn_factor: float

    def problems(self) -> Problems:
        yield from ffn_problems(self.n_inner, self.ffn_factor)


@register("model", "residual_mlp")
class ResidualMLP(Recipe):
    """Linear input layer, pre-norm ReLU FFN blocks with residuals, norm, linear output layer."""

    Options = ResidualMLPOptions
    tasks = frozenset({"regression"})
    layers: ClassVar = {
        "ffn": ["blocks.*.fc1", "blocks.*.fc2"],
        "ffn_out": ["blocks.*.fc2"],
        "attention": [],
    }

    @staticmethod
    def build(options: ResidualMLPOptions) -> nn.Module:
        """Draw N(0, 1/in_features), for last layers of blocks N(0, 1/(2·layers·in_features))."""
        from sparsepretrain.models._residual_mlp import Network

        inner = int(options.n_inner * options.ffn_factor)
        return Network(options.inputs, options.outputs, options.n_embd, inner, options.n_layer)

    @staticmethod
    def predict(model: nn.Module, inputs: Tensor) -> Tensor:
        """Map (batch, inputs) fp32 to (batch, outputs)."""
        return model(inputs)
