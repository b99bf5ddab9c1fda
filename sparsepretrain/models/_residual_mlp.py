"""Modules of ``residual_mlp``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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
