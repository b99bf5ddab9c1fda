"""What the tests of this room share: methods with option variants, small models, twins."""

import copy
import io

import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.sparsity.operand_table import DGRAD, WGRAD, G, X

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
CONVOLVED = [case for case in CASES if "convolution" in registry.get("method", case[0]).layer_kinds]
"""Cases that convolutions have too."""


SETTLED = {"mdgf": {"until": 0.0}, "sdgf": {"until": 0.0}, "asp": {"at": 0.0}}
"""Options with which the first step sees the last phase."""
PACKED = {
    **dict.fromkeys(("ste", "srste", "step", "bimask", "asp", "mdgf", "sdgf"), "A"),
    **{"sste": "AU", "tsrste": "ABU", "slope": "AB", "sdgp": "P"},
}
"""Operands of the table that are packed, by method; the others have none that is 2:4."""


def packed(products):
    """Operands that are packed, such as ``AU``."""
    return "".join(sorted(product.packs for product in products))


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
    """The kind of optimizer that ``method`` needs, else ``cls``."""
    if method == "step":
        from sparsepretrain.optim import StepAdamW

        return StepAdamW(
            parameters, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, frozen_bias_correction=True
        )
    return cls(parameters, **{"lr": 1e-2} | options)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(
    method, options=None, *, dtype=torch.float64, seed=0, cls=torch.optim.AdamW, net=Net, **settings
):
    """(model, optimizer, attached sparsifier)."""
    model = net(dtype, seed)
    sparsifier = sparsify(model, method, **options or {})
    optimizer = optimizer_for(method, model.parameters(), cls, **settings)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


def accumulate(model, step, *, micro=8, **shape):
    """Add the gradients of one step in micro-batches; the data depend on the step only."""
    inner = getattr(model, "module", model)
    x, gy = getattr(inner, "block", inner).example(step, **shape)
    for i in range(0, len(x), micro):
        (model(x[i : i + micro]) * gy[i : i + micro]).sum().backward()


def train(model, optimizer, first, last, **shape):
    """Optimizer steps ``first`` to ``last``."""
    for step in range(first, last):
        accumulate(model, step, **shape)
        optimizer.step()
        optimizer.zero_grad()


def has_pattern(sparsifier):
    """Whether A(W) is N:M by now; where products train dense, evaluation uses A(W) already."""
    return sparsifier.sparse or not sparsifier.method.phase.training


def into_sparse_phase(sparsifier):
    """As after AutoSwitch."""
    sparsifier.method.scalars = dict.fromkeys(sparsifier.method.scalars, 0)
    sparsifier._state.write()


def at_most_n_of_m(tensor, n, m):
    """True if every group of ``m`` along the input channels has at most ``n`` non-zeros."""
    groups = tensor.movedim(1, -1).reshape(-1, m)
    return bool(((groups != 0).sum(1) <= n).all())


class OperandTable:
    """Operands that the row of a layer asks for, given ``x`` and an output gradient ``gy``."""

    def __init__(self, layer, x, gy):
        state, weight = layer.sparsity, layer.weight.detach()
        method, row = state.method, state.method.phase.row
        projection = state.project(layer.weight)
        self.A = weight if projection.forward is None else projection.forward
        self.B = self.A if projection.backward is None else projection.backward
        self.scale = 1.0 if projection.wgrad_scale is None else projection.wgrad_scale
        self.P, self.U, self.Xf, self.Xw = gy, gy, x, x
        convolution = isinstance(layer, nn.Conv2d)
        tokens = gy.flatten(2).mT if convolution else gy

        def in_place(values):
            return values.mT.reshape(gy.shape) if convolution else values

        def by_samples(function, values):
            """Pad each sample with zeros to whole groups of four tokens."""
            filled = nn.functional.pad(values, (0, 0, 0, -values.shape[-2] % 4))
            rows = function(filled.reshape(-1, values.shape[-1])).view(filled.shape)
            return rows[..., : values.shape[-2], :]

        if row.P != G:
            self.P = in_place(method.dgrad_gradient(tokens, state.key(DGRAD)))
        if row.U != G:
            key = state.key(WGRAD)
            self.U = in_place(by_samples(lambda g: method.wgrad_gradient(g, key), tokens))
        if row.Xf != X:
            self.Xf = method.fprop_input(x)
        if row.Xw != X:
            self.Xw = by_samples(method.wgrad_input, x)


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


def said(recwarn):
    """Messages of this library's warnings."""
    return [str(w.message) for w in recwarn if w.category is SparsePretrainWarning]
