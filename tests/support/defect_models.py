"""A small model under every method, seen only through the public library."""

import torch
from torch import nn

import sparsepretrain as sp

STEPS = 40
METHODS = ["ste", "srste", "sste", "tsrste", "step", "sdgp", "asp", "bimask"]
DECAYING = ["srste", "tsrste", "bimask"]


class Net(nn.Module):
    """Two layers, the second without bias."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Linear(16, 32)
            self.fc2 = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def build(method, *, seed=0, lr=0.5, **options):
    """(model, optimizer, attached sparsifier); plain SGD unless the method brings its own."""
    model = Net(seed)
    sparsifier = sp.sparsify(model, method, targets="fc*", total_steps=STEPS, **options)
    if method == "step":
        from sparsepretrain.optim import StepAdamW

        optimizer = StepAdamW(model.parameters(), lr=lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(model, optimizer, seed=0):
    """One optimizer step on data of its own."""
    (model(draw(8, 16, seed=seed)) * draw(8, 16, seed=seed + 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def forward_weight(layer):
    """The weight that the forward of a layer uses."""
    with torch.no_grad():
        y = layer(torch.eye(layer.in_features))
        return (y if layer.bias is None else y - layer.bias).t()
