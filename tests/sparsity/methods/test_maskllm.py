"""MaskLLM against its equations written out, group by group and mask by mask."""

import itertools
import math

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.clock import Clock
from sparsepretrain.sparsity.layer_state import LayerState
from support.small_models import Net, draw
from support.sparse_cases import build, sparsify

PATTERNS = [(2, 4), (1, 4), (3, 4), (2, 6), (4, 4)]
every_pattern = pytest.mark.parametrize(("n", "m"), PATTERNS)
STEPS = 8


def layer(rows, columns, **options):
    """Model of one linear layer, its sparsifier, and the state of the layer; fp64."""
    model = nn.Sequential(nn.Linear(columns, rows, bias=False).double())
    with torch.no_grad():
        model[0].weight.copy_(draw(rows, columns))
    sparsifier = sp.sparsify(model, "maskllm", targets="0", total_steps=STEPS, seed=5, **options)
    return model, sparsifier, model[0].sparsity


def all_masks(n, m):
    """Masks of a group as rows of 0 and 1, in the order of their kept positions."""
    return [[float(i in kept) for i in range(m)] for kept in itertools.combinations(range(m), n)]


def soft_mask(gates, noise, n, m, step, options):
    """The mean of the masks of each group, with loops; gates and noise (rows, groups, masks)."""
    done = step / STEPS
    tau = options.temperature + (options.temperature_end - options.temperature) * done
    kappa = options.scale + (options.scale_end - options.scale) * done
    rows = []
    for gate_row, noise_row in zip(gates, noise, strict=True):
        cells = []
        for g, e in zip(gate_row, noise_row, strict=True):
            exponents = [(kappa * g[k] + e[k]) / tau for k in range(len(g))]
            total = torch.logsumexp(torch.stack(exponents), 0)
            shares = [torch.exp(x - total) for x in exponents]
            for i in range(m):
                cells.append(
                    sum(s * mask[i] for s, mask in zip(shares, all_masks(n, m), strict=True))
                )
        rows.append(torch.stack(cells))
    return torch.stack(rows)


def test_the_constants_are_those_of_the_published_runs():
    options = layer(2, 4)[1].method.options
    published = (4.0, 0.05, 100.0, 500.0, 3.0, 0.01, 1e-5)
    names = ["temperature", "temperature_end", "scale", "scale_end", "prior", "gate_std", "penalty"]
    assert tuple(getattr(options, name) for name in names) == published


@every_pattern
def test_steps_equal_the_equations(n, m):
    """Loss, gradient and reward: five steps of SGD over two micro-batches."""
    rows, columns = 3, 2 * m
    settings = {"n": n, "m": m, "temperature_end": 0.5, "scale": 2.0, "scale_end": 9.0}
    model, sparsifier, state = layer(rows, columns, penalty=0.02, gate_std=0.5, **settings)
    options = sparsifier.method.options
    weight = model[0].weight.detach().clone()
    gates = state.gates.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sparsifier.attach(optimizer)
    for step in range(5):
        batches = [draw(4, columns), draw(4, columns)]
        noise = kernels.gumbel_like(gates, state.key(0), -1)
        soft = soft_mask(gates, noise, n, m, step, options)
        expected = sum((x @ (soft * weight).t()).square().mean() for x in batches)
        reward = (soft * weight).square().sum()
        total = expected - 0.02 * (1 - step / STEPS) * reward
        (gradient,) = torch.autograd.grad(total, gates)
        gates = (gates - 0.1 * gradient).detach().requires_grad_()
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(state.gates.detach(), gates.detach(), rtol=0, atol=1e-12)
    best = torch.tensor(all_masks(n, m))[gates.argmax(-1)].flatten(1).bool()
    assert torch.equal(sparsifier.masks()["0"], best)
    assert torch.equal(sparsifier.dense_state_dict()["0.weight"], weight * best)


@every_pattern
def test_cold_draws_are_masks_with_the_probabilities_of_the_softmax(n, m):
    count, rows = math.comb(m, n), 20_000
    _, sparsifier, state = layer(rows, m, n=n, m=m, scale=1.0, temperature=1e-7)
    gates = draw(count) * 1.5
    with torch.no_grad():
        state.gates.copy_(gates.expand_as(state.gates))
        operand = sparsifier.method.project_in_training(torch.ones(rows, m).double(), state).forward
    for mask, probability in zip(all_masks(n, m), gates.softmax(0).tolist(), strict=True):
        share = float(torch.isclose(operand, torch.tensor(mask).double()).all(1).double().mean())
        error = math.sqrt(max(0.0, probability * (1 - probability)) / rows)
        assert abs(share - probability) <= 5 * error + 1e-12, mask


@every_pattern
def test_first_gates_prefer_masks_that_share_entries_with_the_first_one(n, m):
    model, sparsifier, state = layer(64, 2 * m, n=n, m=m, prior=4.0, gate_std=0.5)
    first = kernels.nm_mask(model[0].weight.detach(), n, m).view(64, 2, m)
    _, _, without = layer(64, 2 * m, n=n, m=m, prior=0.0, gate_std=0.5)
    noise = without.gates.detach()
    masks = torch.tensor(all_masks(n, m)).double()
    for k, mask in enumerate(masks):
        overlap = (first * mask).sum(-1)
        expected = noise[..., k] + (overlap - n * n / m) * 4.0 * noise.std(correction=0)
        torch.testing.assert_close(state.gates.detach()[..., k], expected, rtol=0, atol=1e-12)
    if n < m:
        assert float(noise.std()) == pytest.approx(0.5, rel=0.1)
        assert abs(float(noise.mean())) < 0.05
    given = {"0": kernels.nm_mask(draw(64, 2 * m), n, m)}
    sparsifier.keep_masks(given)
    overlap = given["0"].view(64, 2, m).double() @ masks.t()
    expected = noise + (overlap - n * n / m) * 4.0 * noise.std(correction=0)
    torch.testing.assert_close(state.gates.detach(), expected, rtol=0, atol=1e-12)


def test_the_noise_of_training_is_not_that_of_the_first_gates():
    _, _, state = layer(256, 64)
    first = kernels.normal_like(state.gates, state.key(1), -1)
    later = kernels.gumbel_like(state.gates, state.key(0), -1)
    pair = torch.stack([first.flatten(), later.flatten()])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


def test_a_transposed_weight_has_the_gates_and_draws_of_the_other():
    """A Conv1D (in, out) trains as the Linear (out, in)."""
    method = layer(8, 12)[1].method
    weight = draw(8, 12)
    found = []
    for dim, stored in ((1, weight), (0, weight.t().contiguous())):
        state = LayerState(Clock(5, stored.device), "layer", 0, stored, dim)
        state.add_tensors(method.initial_state(stored, state))
        operand = method.project_in_training(stored, state).forward
        assert operand.shape == stored.shape
        found.append((state.gates.detach(), operand.detach() if dim else operand.detach().t()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_after_the_last_step_the_schedules_stay_at_their_ends():
    model, sparsifier, state = layer(4, 8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sparsifier.attach(optimizer)
    for _ in range(STEPS + 2):
        model(draw(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sparsifier.method._done(state) == 1.0
    assert state.gates.isfinite().all()


def test_misuse_is_named():
    with pytest.raises(ConfigError, match="maskllm: τ and κ follow the length of the run"):
        sp.sparsify(Net(), "maskllm", targets=["fc*"])
    with pytest.raises(ConfigError, match=r"12,870 masks per group.*use maskpro"):
        sparsify(Net(), "maskllm", n=8, m=16)


def test_a_run_of_another_length_cannot_go_on():
    model, _, sparsifier = build("maskllm")
    other, _, its = build("maskllm", {"total_steps": 400})
    with pytest.raises(ConfigError, match=r"over 40 steps.*over 400 steps.*and its total_steps"):
        other.load_state_dict(model.state_dict())
    with pytest.raises(sp.errors.CheckpointError, match="over 40 steps, this model has"):
        its.load_state_dict(sparsifier.state_dict())
