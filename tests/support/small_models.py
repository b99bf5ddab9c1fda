"""Small models, and the numbers they are fed."""

import torch
from torch import nn


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Net(nn.Module):
    """Two sparse layers, one of them without bias, and a dense one."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Linear(16, 32, dtype=dtype)
            self.fc2 = nn.Linear(32, 16, bias=False, dtype=dtype)
            self.head = nn.Linear(16, 5, dtype=dtype)

    def body(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))

    def forward(self, x):
        return self.head(self.body(x))

    def example(self, step, *, batch=8, length=8):
        """(inputs, gradients of the outputs) that depend on the step only."""
        dtype = self.head.weight.dtype
        x = draw(batch, length, 16, seed=100 + step, dtype=dtype)
        return x, draw(batch, length, 5, seed=200 + step, dtype=dtype)


class ConvNet(nn.Module):
    """Two sparse convolutions, 5×6 positions and then 3×3, and a dense layer."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Conv2d(16, 16, 3, padding=1, dtype=dtype)
            self.fc2 = nn.Conv2d(16, 32, (1, 2), stride=2, padding="valid", bias=False, dtype=dtype)
            self.head = nn.Linear(32, 5, dtype=dtype)

    def body(self, x):
        return self.fc2(torch.tanh(self.fc1(x))).flatten(2).transpose(1, 2)

    def forward(self, x):
        return self.head(self.body(x))

    def example(self, step, *, batch=4):
        dtype = self.head.weight.dtype
        x = draw(batch, 16, 5, 6, seed=100 + step, dtype=dtype)
        return x, draw(batch, 9, 5, seed=200 + step, dtype=dtype)


class Blocks(nn.Module):
    """A block to compile below an eager root, where micro-batches are counted."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


class Layer(nn.Module):
    """One layer, (128, 256) by default, stored as either kind stores it."""

    def __init__(self, kind="Linear", bias=True, inputs=128, outputs=256):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        if kind == "Linear":
            self.fc = nn.Linear(inputs, outputs, bias)
        else:
            from transformers.pytorch_utils import Conv1D

            self.fc = Conv1D(outputs, inputs)
        with torch.no_grad():
            self.fc.weight.copy_(draw(*self.fc.weight.shape, seed=1))
        self.fc.bias = nn.Parameter(draw(outputs, dtype=torch.float32)) if bias else None

    def forward(self, x):
        return self.fc(x)


class Mixed(nn.Module):
    """A layer that fits, one whose width does not, and a convolution."""

    def __init__(self):
        super().__init__()
        self.fc, self.narrow_fc = nn.Linear(128, 256), nn.Linear(256, 40)
        self.fc_conv = nn.Conv2d(16, 16, 3)

    def forward(self, x):
        return self.narrow_fc(self.fc(x))
