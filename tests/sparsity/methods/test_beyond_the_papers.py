"""Semantics of MDGF, SDGF, SLoPe's double pruning and the annealed decay."""

import math

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.sparsity.methods.sdgf import stages
from support.small_loops import train
from support.small_models import draw
from support.sparse_cases import STEPS, build


@pytest.mark.parametrize("shape", ["linear", "exponential"])
@pytest.mark.parametrize("start", [0.0, 0.1])
def test_pruned_weights_decay_as_scheduled(shape, start):
    options = {"shape": shape, "rate": 3.0, "until": 0.2, "window": {"start": start}}
    model, optimizer, sparsifier = build("mdgf", options)
    first, until = round(start * STEPS), 8
    layer = model.fc1
    for step in range(12):
        weight = layer.weight.detach()
        part = (step - first) / (until - first)
        factor = 1 - part if shape == "linear" else math.exp(-3.0 * part)
        factor = 1.0 if step < first else factor if step < until else 0.0
        assert sparsifier.metrics()["mask_decay"] == pytest.approx(factor)
        assert sparsifier.sparse == (step >= until)
        mask = kernels.nm_mask(weight)
        expected = torch.where(mask, weight, weight * factor)
        x = torch.eye(16, dtype=weight.dtype)
        torch.testing.assert_close(layer(x) - layer.bias, expected.t(), rtol=1e-6, atol=1e-7)
        assert torch.equal(sparsifier.masks()["fc1"], mask)
        train(model, optimizer, step, step + 1)
    assert sparsifier.prove().holds and sparsifier.metrics()["density"] == 0.5


def test_decaying_mask_passes_the_whole_gradient():
    model, optimizer, _ = build("mdgf", {"until": 0.5})
    train(model, optimizer, 0, 5)
    layer, x, gy = model.fc1, draw(6, 16, seed=1).requires_grad_(), draw(6, 32, seed=2)
    layer.weight.grad = None
    layer(x).backward(gy)
    torch.testing.assert_close(layer.weight.grad, gy.t() @ x.detach())
    used = layer.operands.project(layer.weight).forward
    assert (used != 0).all(), "d is not 0 yet"
    torch.testing.assert_close(x.grad, gy @ used)


@pytest.mark.parametrize(
    ("n", "m", "kept"),
    [
        (2, 4, [3, 2]),
        (1, 4, [3, 2, 1]),
        (1, 16, [15, 8, 4, 2, 1]),
        (3, 8, [7, 4, 3]),
        (3, 4, [3]),
        (4, 4, [4]),
    ],
)
def test_stages_halve_n(n, m, kept):
    assert stages(n, m) == kept


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_the_pattern_tightens_in_equal_stages(start):
    options = {"n": 1, "m": 8, "until": 0.4, "window": {"start": start}}
    model, optimizer, sparsifier = build("sdgf", options, dtype=torch.float32)
    first, until, seen = round(start * STEPS), 16, []
    for step in range(20):
        kept = sparsifier.masks()["fc1"].view(32, -1, 8).sum(-1)
        assert (kept == kept[0, 0]).all()
        seen.append(int(kept[0, 0]))
        assert sparsifier.sparse == (step >= first)
        if step >= first:
            assert sparsifier.metrics()["density"] == seen[-1] / 8
            assert sparsifier.prove().holds and sparsifier.prove().pattern == f"{seen[-1]}:8"
        train(model, optimizer, step, step + 1)
    length = (until - first) / 3
    expected = [[7, 4, 2][int((s - first) / length)] for s in range(first, until)] + [1] * 4
    assert seen[first:] == expected
    assert str(sparsifier.coverage()).count("M∘W, M by stages 1:8") == 2
    assert sparsifier.coverage().pattern == "1:8"


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (1, 4), (2, 8)])
@pytest.mark.parametrize("rule", ["magnitude", "random"])
def test_double_pruning(n, m, rule):
    model, optimizer, sparsifier = build("slope", {"n": n, "m": m, "mask": rule})
    layer = model.fc1
    first = sparsifier.masks()["fc1"]
    initial = kernels.nm_mask(layer.weight.detach(), n, m)
    assert torch.equal(first, initial) == (rule == "magnitude")
    unused = layer.weight.detach()[~first].clone()
    for step in range(4):
        train(model, optimizer, step, step + 1)
        assert torch.equal(sparsifier.masks()["fc1"], first), "the mask never changes"
    used, _, backward, _ = layer.operands.project(layer.weight)
    assert torch.equal(used, layer.weight.detach() * first)
    groups = (backward != 0).view(-1, m, 16).sum(1)
    assert (groups <= n).all() and (groups == n).any(), "N:M along out_features"
    kept = used.abs().view(-1, m, 16).topk(n, dim=1).values.sum()
    torch.testing.assert_close(backward.abs().sum(), kept)
    x = draw(6, 16, seed=1).requires_grad_()
    gy = draw(6, 32, seed=2)
    layer(x).backward(gy)
    torch.testing.assert_close(x.grad, gy @ backward)
    assert sparsifier.metrics()["flip_rate"] == 0
    # AdamW's own decay is all that reaches weights outside the mask
    torch.testing.assert_close(layer.weight.detach()[~first], unused * (1 - 1e-2 * 1e-2) ** 4)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (1, 4), (2, 8)])
def test_all_three_matmuls_of_tsrste_are_n_of_m(n, m, monkeypatch):
    drawn = []
    sample = kernels.mvue

    def seen(grad, **options):
        drawn.append(((options["n"], options["m"]), sample(grad, **options)))
        return drawn[-1][1]

    monkeypatch.setitem(vars(kernels), "mvue", seen)
    options = {"n": n, "m": m, "refresh": 2, "dense_tail": 0.0}
    model, optimizer, sparsifier = build("tsrste", options, dtype=torch.float32)
    losses = []
    for step in range(6):
        x = torch.randn(3, 22, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    for layer in sparsifier.coverage().layers:
        found = layer.fprop, layer.dgrad, layer.wgrad
        assert found == (f"Mt∘W {n}:{m}", f"Mt∘W {n}:{m}", f"MVUE(G) {n}:{m}")
    assert sparsifier.coverage().row.sparse == ["fprop", "dgrad", "wgrad"]
    assert sparsifier.prove().holds and losses[-1] < losses[0]
    for layer in sparsifier.layers.values():
        used = layer.operands.project(layer.weight).forward
        for axis in (0, 1):  # dgrad sums over the first, fprop over the second
            counts = kernels.nonzeros_per_group(used, m, dim=axis)
            assert (counts == n).all()
    assert len(drawn) == 12
    for pattern, estimate in drawn:
        assert pattern == (n, m) and len(estimate) == 3 * -(-22 // m) * m, "each sample is padded"
        assert (kernels.nonzeros_per_group(estimate, m, dim=0) <= n).all()


def test_double_pruning_takes_the_weights_of_its_first_step():
    model, optimizer, sparsifier = build("slope", {"window": {"start": 0.1}})
    train(model, optimizer, 0, 4)
    mask, initial = sparsifier.masks()["fc1"], build("slope")[2].masks()["fc1"]
    assert torch.equal(mask, kernels.nm_mask(model.fc1.weight)) and not torch.equal(mask, initial)


def test_random_masks_differ_by_layer_and_seed():
    def masks(seed):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        handle = sp.sparsify(model, "slope", targets="*", mask="random", seed=seed)
        return list(handle.masks().values())

    first, again, other = masks(0), masks(0), masks(1)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("method", ["srste", "tsrste"])
@pytest.mark.parametrize("start", [0.0, 0.1])
def test_the_decay_ramp(method, start):
    """λ rises from 0 at the first sparse step to its value a quarter of the run later."""
    options = {"decay": 0.5, "decay_ramp": 0.25, "window": {"start": start}}
    model, optimizer, sparsifier = build(method, options, cls=torch.optim.SGD, lr=0.1)
    first = round(start * STEPS)
    for step in range(first + 13):
        layer = model.fc1
        mask, weight = sparsifier.masks()["fc1"], layer.weight.detach().clone()
        layer.weight.grad = torch.zeros_like(weight)
        optimizer.step()
        decay = 0.5 * min(1.0, max(0, step - first) / 10)
        expected = weight - 0.1 * decay * weight.masked_fill(mask, 0)
        torch.testing.assert_close(layer.weight.detach(), expected)
