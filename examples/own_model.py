"""Make your own PyTorch model 2:4: your class, your loop, and four lines of sparsepretrain.

    python examples/own_model.py

Trains the same network dense and 2:4 on three interleaved spirals, proves the zeros, gives the
original layers back and saves the weights. Whoever loads them needs torch alone.
"""

import math

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

import sparsepretrain as sp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 64)
        self.hidden = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 64)
        )
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.hidden(torch.sin(3 * self.embed(x))).relu())


def spirals(count, seed):
    """Return points (3 * count, 2) on three arms and the number of the arm of each."""
    draw = torch.Generator().manual_seed(seed)
    radius = torch.rand(3, count, generator=draw)
    turn = 4 * radius + torch.arange(3)[:, None] * 2 * math.pi / 3
    turn += 0.15 * torch.randn(3, count, generator=draw)
    points = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=-1)
    return points.flatten(0, 1), torch.arange(3).repeat_interleave(count)


def accuracy(model):
    points, arms = spirals(2000, seed=1)
    with torch.no_grad():
        return (model(points).argmax(-1) == arms).float().mean().item()


def train(model, sparsifier=None, steps=800):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    if sparsifier is not None:
        sparsifier.attach(optimizer)
    points, arms = spirals(1000, seed=0)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        batch = torch.randint(len(points), (256,), generator=draw)
        loss = cross_entropy(model(points[batch]), arms[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if sparsifier is not None and step in (steps // 20, steps):
            flips = sparsifier.metrics()["flip_rate"]
            print(f"step {step}: {flips:.2%} of the mask changed")


torch.manual_seed(0)
dense = Net()
sparse = Net()
sparse.load_state_dict(dense.state_dict())

train(dense)
print(f"dense: {accuracy(dense):.3f} of the test points are right")

# Layers by glob: the input has two features, which are no group of four, and the head stays dense.
sparsifier = sp.sparsify(sparse, "srste", targets=["hidden.*"])
train(sparse, sparsifier)
print(f"2:4: {accuracy(sparse):.3f} of the test points are right")
print(f"proof: {sparsifier.prove()}")

sp.densify(sparse)  # nn.Linear again, with exact zeros
assert all(type(layer) in (nn.Linear, nn.GELU) for layer in sparse.hidden)
save_file(sparse.state_dict(), "spirals.safetensors")

loaded = Net()  # from here on, sparsepretrain is not needed
loaded.load_state_dict(load_file("spirals.safetensors"))
for name, weight in loaded.hidden.named_parameters():
    if weight.dim() == 2:
        kept = (weight.unflatten(1, (-1, 4)) != 0).sum(-1)
        print(f"hidden.{name}: {weight.numel()} weights, at most {kept.max()} of 4 are not zero")
print(f"loaded: {accuracy(loaded):.3f} of the test points are right")
