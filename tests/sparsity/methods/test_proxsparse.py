"""ProxSparse: its proximal operator by brute force, and the steps around it."""

import copy

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import nm_mask
from sparsepretrain.sparsity.methods.proxsparse import proximal_24
from sparsepretrain.sparsity.methods.ste import STE
from support.small_loops import train
from support.small_models import Net, draw
from support.sparse_cases import build, sparsify


def objective(w, z, strength):
    """½‖w - z‖² + λ·Σ |w_i·w_j·w_k|, triples written out."""
    a, b, c, d = (abs(x) for x in w)
    triples = a * b * c + a * b * d + a * c * d + b * c * d
    return 0.5 * sum((x - y) ** 2 for x, y in zip(w, z, strict=True)) + strength * triples


@pytest.mark.parametrize("strength", [0.0, 0.05, 0.5, 2.0, 10.0])
def test_the_proximal_operator_is_the_best_of_many_minimizations(strength):
    generator = np.random.default_rng(3)
    groups = draw(40, 4)
    for z, w in zip(groups.tolist(), proximal_24(groups, strength).tolist(), strict=True):
        signs = np.sign(z)
        bounds = [(0, None) if s > 0 else (None, 0) for s in signs]
        starts = [np.array(z), *(signs * generator.random((20, 4)) * max(map(abs, z)) * 1.2)]
        found = min(
            minimize(objective, start, (z, strength), "L-BFGS-B", bounds=bounds).fun
            for start in starts
        )
        assert objective(w, z, strength) <= found + 1e-12
        assert all(x == 0 or np.sign(x) == s for x, s in zip(w, signs, strict=True))


def test_what_is_2_4_stays_and_strong_regularizers_make_the_rest_2_4():
    weight = draw(8, 16)
    pruned = weight * nm_mask(weight)
    assert torch.equal(proximal_24(pruned, 3.0), pruned)
    assert torch.equal(proximal_24(weight, 0.0), weight)
    strong = proximal_24(weight, 1e6)
    assert torch.equal(strong, pruned)
    mild = proximal_24(weight, 0.25)
    assert mild.abs().le(weight.abs()).all() and (mild != weight).any()
    assert torch.equal(proximal_24(weight.t(), 0.25, dim=0), mild.t())
    assert proximal_24(weight.float(), 0.25).dtype == torch.float32


@pytest.mark.parametrize("strength", [0.25, 2.0])
def test_a_shard_gets_the_bits_of_the_whole_weight(strength):
    """Also next to groups of another scale, which need more or fewer passes."""
    weight = draw(16, 16) * torch.logspace(-3, 1, 16, dtype=torch.float64)[:, None]
    rows = [proximal_24(row, strength) for row in weight]
    assert torch.equal(proximal_24(weight, strength), torch.stack(rows))


@pytest.mark.parametrize("stored", [False, True])
def test_steps_are_those_of_the_optimizer_and_then_of_the_operator(stored):
    """λ is not multiplied by the learning rate."""
    model, optimizer, sparsifier = build("proxsparse", {"strength": 0.3}, weight_decay=0.01)
    dense, twin = Net(torch.float64, 0), {}
    for name in ("fc1", "fc2"):
        twin[name] = dense.get_parameter(f"{name}.weight")
    other = torch.optim.AdamW(twin.values(), lr=1e-2, weight_decay=0.01)
    if stored:
        sparsifier.store_operands(torch.float64)
    for step in range(4):
        train(model, optimizer, step, step + 1)
        train(dense, other, step, step + 1)
        with torch.no_grad():
            for weight in twin.values():
                weight.copy_(proximal_24(weight, 0.3))
        for name, weight in twin.items():
            assert torch.equal(model.get_parameter(f"{name}.weight"), weight)
            mask = nm_mask(weight.detach())
            assert torch.equal(sparsifier.masks()[name], mask)


@pytest.mark.parametrize("maximize", [False, True])
def test_the_second_regularizer_is_part_of_what_is_minimized(maximize):
    """Against autograd of its formula, with an original weight of 0 and both signs."""
    model = nn.Sequential(nn.Linear(8, 3, bias=False).double())
    with torch.no_grad():
        model[0].weight[0, 0] = 0
    original = model[0].weight.detach().clone()
    options = {"strength": 0.02, "frozen_strength": 0.7, "frozen_epsilon": 0.3}
    sparsifier = sp.sparsify(model, "proxsparse", targets="0", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, maximize=maximize)
    sparsifier.attach(optimizer)
    sign = torch.where(original < 0, -1.0, 1.0)
    weight = original
    for _ in range(4):
        batches = [draw(4, 8), draw(4, 8)]
        leaf = weight.clone().requires_grad_()
        loss = sum((x @ leaf.t()).square().mean() for x in batches)
        pull = (leaf / (original + 0.3 * sign) * (leaf - original)).square().sum()
        (gradient,) = torch.autograd.grad(loss + 0.7 * pull, leaf)
        weight = proximal_24(weight - 0.05 * gradient, 0.02)
        for x in batches:
            loss = model(x).square().mean()
            (-loss if maximize else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model[0].weight.detach(), weight, rtol=0, atol=1e-12)
    assert (weight != original).any()


def test_pruned_and_unchanged_weights_do_not_feel_the_second_regularizer():
    model = nn.Sequential(nn.Linear(16, 8))
    sparsifier = sp.sparsify(model, "proxsparse", targets="0", frozen_strength=1.0)
    layer = model[0]
    method, start = sparsifier.method, layer.weight.detach()
    for weight in (start, torch.zeros_like(start), start * nm_mask(start)):
        assert not method.penalty_gradients(weight, layer.sparsity)["weight"].any()
    assert method.penalty_gradients(start / 2 + 0.1, layer.sparsity)["weight"].all()


@pytest.mark.parametrize(("has_penalty", "moves"), [(None, True), (False, False)])
def test_a_penalty_of_ones_own_needs_one_function(has_penalty, moves):
    class Shrinking(STE):
        def penalty_gradients(self, weight, state):
            return {"weight": 0.5 * weight}

    if has_penalty is not None:
        Shrinking.has_penalty = has_penalty
    model, optimizer, sparsifier = build("ste", cls=torch.optim.SGD, lr=0.1)
    sparsifier.method.__class__ = Shrinking
    before = model.fc1.weight.detach().clone()
    (model(draw(4, 16)).sum() * 0).backward()
    optimizer.step()
    expected = 0.95 * before if moves else before
    torch.testing.assert_close(model.fc1.weight.detach(), expected, rtol=0, atol=1e-12)


def test_a_layer_without_a_gradient_stays():
    model, optimizer, _ = build("proxsparse", {"frozen_strength": 1.0})
    before = model.fc2.weight.detach().clone()
    x = draw(4, 16)
    model.fc1(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(model.fc2.weight, before)


def test_a_skipped_step_changes_nothing():
    model, optimizer, sparsifier = build("proxsparse", cls=torch.optim.AdamW, fused=True)
    before = copy.deepcopy(model.state_dict())
    model(draw(4, 16)).square().sum().backward()
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    assert sparsifier.completed_steps == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_evaluation_masks_the_weights_of_the_start_in_their_own_dtype():
    model = nn.Sequential(nn.Linear(16, 8, bias=False)).bfloat16()
    start = model[0].weight.detach().clone()
    sparsifier = sp.sparsify(model, "proxsparse", targets="0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sparsifier.attach(optimizer)
    model(draw(4, 16).bfloat16()).square().sum().backward()
    optimizer.step()
    learned = model[0].weight.detach()
    assert not torch.equal(learned, start) and learned.dtype == torch.bfloat16
    pruned = sparsifier.dense_state_dict()["0.weight"]
    assert torch.equal(pruned, start * nm_mask(learned)) and pruned.dtype == torch.bfloat16


def test_other_patterns_are_refused():
    for pattern in ({"n": 1}, {"n": 4, "m": 8}):
        with pytest.raises(ConfigError, match="the regularizer is that of 2:4"):
            sparsify(Net(), "proxsparse", **pattern)
