"""What the tests of this room share: methods with option variants, small models, twins."""

import copy
import io

import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry

STEPS = 40
"""``total_steps`` of all small runs."""
VARIANTS = [
    ("ste", {"n": 1}),
    ("ste", {"n": 2, "m": 8}),
    ("ste", {"n": 4, "m": 8}),
    ("srste", {"decay": 0.1}),
    ("srste", {"decay": 0.1, "decay_on": "weight"}),
    ("srste", {"n": 1, "m": 16}),
    ("sste", {"gamma": 0.3}),
    ("sste", {"beta": "l1", "beta_update": "step"}),
    ("sste", {"beta": "none", "estimator": "exact"}),
    ("sste", {"mvue": "none", "ste_scale": "beta"}),
    ("sste", {"mvue": "weight"}),
    ("sste", {"mvue": "weight", "estimator": "exact", "gamma": 0.1, "ste_scale": "beta"}),
    ("sste", {"n": 2, "m": 8}),
    ("srste", {"decay": 0.1, "decay_ramp": 0.1}),
    ("tsrste", {"decay": 0.1, "decay_ramp": 0.1, "refresh": 2, "dense_tail": 0.0}),
    ("dense", {"flip_rule": "transposable", "refresh": 2}),
    ("sdgp", {"epsilon": 1e-4}),
    ("sdgp", {"variant": "random", "n": 2, "m": 8}),
    ("mdgf", {"until": 0.05}),
    ("mdgf", {"shape": "exponential"}),
    ("sdgf", {"n": 1, "m": 8, "until": 0.1}),
    ("slope", {"mask": "random"}),
    ("slope", {"n": 1, "m": 4}),
]
CASES = [(name, {}) for name in sp.list_methods()] + VARIANTS
CONVOLVED = [case for case in CASES if not registry.get("method", case[0]).linear_only]
"""Those that convolutions have too."""


SETTLED = {"mdgf": {"until": 0.0}, "sdgf": {"until": 0.0}, "asp": {"at": 0.0}}
"""Options with which the first step sees the last phase."""
PACKED = {
    **dict.fromkeys(("ste", "srste", "step", "bimask", "asp", "mdgf", "sdgf"), "A"),
    **{"sste": "AU", "tsrste": "ABU", "slope": "AB", "sdgp": "P"},
}
"""Operands of the table that are packed, by method; the others have none that is 2:4."""


def ids(cases):
    return ["-".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in cases]


IDS = ids(CASES)


class Net(nn.Module):
    """Two sparse layers, one of them without bias, and a dense one."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Linear(16, 32, dtype=dtype)
            self.fc2 = nn.Linear(32, 16, bias=False, dtype=dtype)
            self.head = nn.Linear(16, 5, dtype=dtype)

    def forward(self, x):
        return self.head(self.fc2(torch.tanh(self.fc1(x))))


class Layer(nn.Module):
    """One layer, (128, 256), stored as either kind stores it; all its products can be sparse."""

    def __init__(self, kind="Linear", bias=True, inputs=128, outputs=256):
        super().__init__()
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


def sparsify(model, method, **options):
    options = {"targets": ["fc*"], "total_steps": STEPS, "seed": 3} | options
    return sp.sparsify(model, method, **options)


def optimizer_for(method, parameters, cls=torch.optim.AdamW, **options):
    """The kind of optimiser that ``method`` needs, else ``cls``."""
    if method == "step":
        from sparsepretrain.optim import StepAdamW

        return StepAdamW(
            parameters, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, frozen_bias_correction=True
        )
    return cls(parameters, **{"lr": 1e-2} | options)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(method, options=None, *, dtype=torch.float64, seed=0, cls=torch.optim.AdamW, **settings):
    """(model, optimiser, attached sparsifier)."""
    model = Net(dtype, seed)
    sparsifier = sparsify(model, method, **options or {})
    optimizer = optimizer_for(method, model.parameters(), cls, **settings)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


def train(model, optimizer, first, last, *, batch=8, micro=8, length=8):
    """Optimiser steps ``first`` to ``last`` on data that depends on the step only."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        x = draw(batch, length, 16, seed=100 + step, dtype=dtype)
        gy = draw(batch, length, 5, seed=200 + step, dtype=dtype)
        for i in range(0, batch, micro):
            (model(x[i : i + micro]) * gy[i : i + micro]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def has_pattern(sparsifier):
    """Whether A(W) is N:M by now; where products train dense, evaluation uses A(W) already."""
    return sparsifier.sparse or not sparsifier.method.phase.training


def into_sparse_phase(sparsifier):
    """As after AutoSwitch."""
    state = sparsifier.method.state
    state.update(dict.fromkeys(state, 0))
    sparsifier._state.write()


def everything(model, optimizer, sparsifier):
    """All that a checkpoint holds."""
    parts = (model.state_dict(), optimizer.state_dict(), sparsifier.state_dict())
    return copy.deepcopy(parts)


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def gradients(model):
    return {k: p.grad.clone() for k, p in model.named_parameters()}
