"""Modules of ``residual_mlp``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from sparsepretrain.models.residual_mlp import ResidualMLPOptions


class Block(nn.Module):
    """Pre-norm FFN with a residual."""

    def __init__(self, options: ResidualMLPOptions) -> None:
        super().__init__()
        width, inner = options.n_embd, int(options.n_inner * options.ffn_factor)
        self.norm = nn.LayerNorm(width, bias=False)
        self.fc1 = _linear(width, inner)
        self.fc2 = _linear(inner, width, 2 * options.n_layer)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class Network(nn.Module):
    """Complete model."""

    def __init__(self, options: ResidualMLPOptions) -> None:
        super().__init__()
        self.input = _linear(options.inputs, options.n_embd)
        self.blocks = nn.Sequential(*(Block(options) for _ in range(options.n_layer)))
        self.norm = nn.LayerNorm(options.n_embd, bias=False)
        self.output = _linear(options.n_embd, options.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs) to (batch, outputs)."""
        return self.output(self.norm(self.blocks(self.input(x))))


def _linear(inputs: int, outputs: int, sums: int = 1) -> nn.Linear:
    """Build a layer without bias, one of ``sums`` summands of the residual stream."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=(sums * inputs) ** -0.5)
    return layer
