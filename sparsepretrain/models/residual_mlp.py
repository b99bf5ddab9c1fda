"""Residual MLP from vectors to vectors: a transformer's FFN blocks without attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import Problems
from sparsepretrain.models import Recipe
from sparsepretrain.models._text import ffn_problems
from sparsepretrain.registry import register


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
        inner = int(options.n_inner * options.ffn_factor)
        return Network(options.inputs, options.outputs, options.n_embd, inner, options.n_layer)

    @staticmethod
    def predict(model: nn.Module, inputs: Tensor) -> Tensor:
        """Map (batch, inputs) fp32 to (batch, outputs)."""
        return model(inputs)


class Block(nn.Module):
    """Pre-norm FFN with a residual."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.fc1 = _linear(width, inner)
        self.fc2 = _linear(inner, width, 2 * layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class Network(nn.Module):
    """Complete model."""

    def __init__(self, inputs: int, outputs: int, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.input = _linear(inputs, width)
        self.blocks = nn.Sequential(*(Block(width, inner, layers) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.output = _linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs) to (batch, outputs)."""
        return self.output(self.norm(self.blocks(self.input(x))))


def _linear(inputs: int, outputs: int, sums: int = 1) -> nn.Linear:
    """Build a layer without bias, one of ``sums`` summands of the residual stream."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=(sums * inputs) ** -0.5)
    return layer
