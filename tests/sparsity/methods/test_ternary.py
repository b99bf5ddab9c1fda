"""Sparse-BitNet: ternary weights under an N:M mask, with one scale per layer or slice."""

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from support.golden_losses import Experts
from support.small_loops import train
from support.small_models import draw
from support.sparse_cases import build, sparse_layer

ROWS = torch.tensor([[1.0, -0.5, 0.25, 0.1], [-0.2, 0.05, 0.0, 0.3]])  # mean of |W|: 0.3


def ternary(weight, n=2, m=4):
    """The formula in fp64, group by group, in Python."""
    mean = sum(abs(w) for row in weight.tolist() for w in row) / weight.numel()
    rows = []
    for row in weight.tolist():
        signs = []
        for start in range(0, len(row), m):
            group = row[start : start + m]
            kept = sorted(range(m), key=lambda i: (abs(group[i]), i))[m - n :]
            for i, w in enumerate(group):
                is_one = i in kept and abs(w) / mean > 0.5
                signs.append((1 if w > 0 else -1) if is_one else 0)
        rows.append(signs)
    return torch.tensor(rows, dtype=torch.float64) * mean


def evaluated(sparsifier, name):
    return sparsifier.dense_state_dict()[f"{name}.weight"]


def test_the_scale_is_the_mean_over_all_weights_of_the_layer():
    _, sparsifier = sparse_layer("ternary", ROWS)
    a = evaluated(sparsifier, "0")
    mean = 0.3  # pruned weights and zeros count; of the kept ones alone 0.5
    expected = torch.tensor([[mean, -mean, 0, 0], [-mean, 0, 0, mean]])
    torch.testing.assert_close(a, expected, rtol=1e-6, atol=0)
    assert a.abs().unique().numel() == 2


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 8), (4, 8), (4, 4)])
def test_weights_equal_the_formula(n, m):
    weight = draw(32, 16, seed=5)
    _, sparsifier = sparse_layer("ternary", weight, n=n, m=m)
    a = evaluated(sparsifier, "0")
    expected = ternary(weight.float().double(), n, m)
    torch.testing.assert_close(a.double(), expected, rtol=1e-6, atol=0)
    assert n == m or sparsifier.prove().holds


def test_kept_weights_below_half_the_mean_are_zeros_of_the_weight_and_not_of_the_mask():
    weight = draw(32, 64, seed=6)
    weight[:, :32] *= 0.2
    _, sparsifier = sparse_layer("ternary", weight)
    a, mask = evaluated(sparsifier, "0"), sparsifier.masks()["0"]
    assert torch.equal(mask, kernels.nm_mask(weight.float()))
    nonzeros = kernels.nonzeros_per_group(a, 4, dim=1)
    assert nonzeros.max() == 2 and (nonzeros < 2).any()
    assert sparsifier.metrics()["density"] == int(a.count_nonzero()) / a.numel() < 0.5
    proof = sparsifier.prove()
    assert proof.holds and proof.zeros == int((a == 0).sum())
    assert not (torch.signbit(a) & (a == 0)).any(), "rounding leaves -0.0"


def test_a_flip_of_the_mask_counts_also_where_the_weight_is_zero_before_and_after():
    """The published code compares masks, not ternary values."""
    weight = torch.tensor([[4.0, 4.0, 0.2, 0.1], [4.0, 0.3, 0.2, 0.1]])
    model, sparsifier = sparse_layer("ternary", weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    before = evaluated(sparsifier, "0")
    x = torch.tensor([[0.0, 0.1, -0.1, 0.0]])
    model(x)[:, 1].sum().backward()  # dW of the second row is x: 0.3 and 0.2 change places
    optimizer.step()
    assert torch.equal(evaluated(sparsifier, "0"), before)
    assert sparsifier.metrics()["flip_rate"] == 2 / 8


def test_all_weights_receive_the_gradient():
    model, _, _ = build("ternary", {})
    layer, x, gy = model.fc1, draw(6, 16, seed=1).requires_grad_(), draw(6, 32, seed=2)
    layer(x).backward(gy)
    torch.testing.assert_close(layer.weight.grad, gy.t() @ x.detach())
    torch.testing.assert_close(x.grad, gy @ ternary(layer.weight.detach()))


def test_every_expert_has_its_own_scale():
    model = nn.Sequential(Experts(3))
    scales = torch.tensor([1.0, 10.0, 0.0])
    model[0].bank.data.copy_(draw(3, 32, 16, seed=4) * scales[:, None, None])
    sparsifier = sp.sparsify(model, "ternary", targets=["0.bank"])
    a = sparsifier.dense_state_dict()["0.bank"]
    for own, weight in zip(a[:2], model[0].bank.detach()[:2], strict=True):
        torch.testing.assert_close(own.double(), ternary(weight.double()), rtol=1e-6, atol=0)
    assert not a[2].any(), "a zero expert stays zero, and is finite"


def test_a_dense_checkpoint_is_ternary_and_training_continues_from_it():
    """``densify`` writes {-1, 0, 1}/s; ternarizing that again changes the scale only."""
    model, optimizer, sparsifier = build("ternary", {}, dtype=torch.float32)
    train(model, optimizer, 0, 4)
    expected = sparsifier.dense_state_dict()["fc1.weight"]
    sp.densify(model)
    weight = model.fc1.weight.detach()
    assert torch.equal(weight, expected) and weight.unique().numel() == 3
    again = sp.sparsify(model, "ternary", targets=["fc1"])
    assert torch.equal(again.dense_state_dict()["fc1.weight"].sign(), weight.sign())
