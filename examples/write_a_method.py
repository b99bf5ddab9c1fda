"""Write a method of your own in thirty lines, and check what every method must keep.

    python examples/write_a_method.py

The method: masks that prefer what they have. A weight that is in the mask counts `stickiness` times
more when the next mask is chosen, so weights of almost equal magnitude do not take turns. With
stickiness 0 the method is STE. Its masks should flip less; the last lines measure that.
"""

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.kernels import nm_mask
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Projection, Row


@dataclass(slots=True, kw_only=True)
class StickyOptions(MethodOptions):
    stickiness: Annotated[float, "≥ 0"] = 0.5


@register("method", "sticky")
class Sticky(Method):
    Options = StickyOptions
    summary = "magnitude mask in which kept weights count more; gradient straight through"
    mask_rule = "other"  # reports compare flip rates of one rule only

    @property
    def sparse_row(self):
        return Row(A=self.nm("M∘W"))

    def initial_state(self, weight, state):
        return {"mask": nm_mask(weight, *self.pattern, dim=state.dim)}

    def update_(self, weight, state):  # after each optimizer step
        score = weight.abs() * (1 + self.options.stickiness * state.mask)
        state.mask.copy_(nm_mask(score, *self.pattern, dim=state.dim))

    def project(self, weight, state):
        return Projection(weight.masked_fill(~state.mask, 0), state.mask)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def steps(model, optimizer, sparsifier, first, last):
    """Imitate a fixed random network; return the mean flip rate of the steps."""
    torch.manual_seed(1)
    target = torch.nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    flips = []
    for step in range(first, last):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        (model(x) - target(x).detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        flips.append(sparsifier.metrics()["flip_rate"])
    return sum(flips) / len(flips)


def prepared(method, **options):
    model = network()
    sparsifier = sp.sparsify(model, method, targets=["*"], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


# 1. The pattern: any N:M, in every group of every layer.
for n, m in ((2, 4), (1, 8)):
    model, optimizer, sparsifier = prepared("sticky", n=n, m=m)
    steps(model, optimizer, sparsifier, 0, 5)
    assert sparsifier.prove().holds
    print(f"pattern: {sparsifier.prove()}")

# 2. The gradient rule in fp64: straight through, so dW is that of a dense layer with weight M∘W.
model = network().double()
sparsifier = sp.sparsify(model, "sticky", targets=["*"])
plain = network().double()
for name, mask in sparsifier.masks().items():
    weight = plain.get_submodule(name).weight
    weight.data = weight.data * mask
x = torch.randn(8, 32, dtype=torch.float64)
model(x).square().sum().backward()
plain(x).square().sum().backward()
torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
print("gradient: that of a dense layer with weight M∘W")

# 3. Resume: all state is in the state dicts, so a stopped run continues bit for bit.
model, optimizer, sparsifier = prepared("sticky")
steps(model, optimizer, sparsifier, 0, 5)
saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
steps(model, optimizer, sparsifier, 5, 10)
other, other_optimizer, other_sparsifier = prepared("sticky")
other.load_state_dict(saved[0])
other_optimizer.load_state_dict(saved[1])
steps(other, other_optimizer, other_sparsifier, 5, 10)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
print("resume: bit for bit")

# 4. densify: the same function, with plain layers.
x = torch.randn(8, 32)
with torch.no_grad():
    model.eval()
    before = model(x)
    assert torch.equal(sp.densify(model)(x), before)
print("densify: the same outputs from nn.Linear")

# 5. The point of the method: fewer flips.
for method, options in (("ste", {}), ("sticky", {"stickiness": 0.0}), ("sticky", {})):
    rate = steps(*prepared(method, **options), 0, 200)
    words = " ".join([method, *(f"{key}={value}" for key, value in options.items())])
    print(f"{words}: mean flip rate {rate:.2e}")
