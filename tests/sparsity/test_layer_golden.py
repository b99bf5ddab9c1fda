"""Layers against the published ones: STE, SR-STE, S-STE, flip rates."""

import pytest
import torch
from golden_vectors import load
from torch import nn

import sparsepretrain as sp


def layer_from(g, method, **options):
    model = nn.Sequential(nn.Linear(*reversed(g["lin_w"].shape)))
    with torch.no_grad():
        model[0].weight.copy_(g["lin_w"])
        model[0].bias.copy_(g["lin_b"])
    return model, sp.sparsify(model, method, targets=["0"], **options)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def run(model, g):
    x = g["lin_x"].clone().requires_grad_()
    y = model(x)
    y.backward(g["lin_gy"])
    return y, x.grad


@pytest.mark.parametrize("method", ["ste", "srste"])
def test_ste_and_srste_layers_equal_golden(method):
    g = load("sr_ste")
    model, sparsifier = layer_from(g, method)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    y, gx = run(model, g)
    close(y, g["lin_y"])
    close(gx, g["lin_gx"])
    close(model[0].weight.grad, g["ste_gw"])  # the backward alone never decays
    close(model[0].bias.grad, g["lin_gb"])
    optimizer.step()
    close(model[0].weight.grad, g["ste_gw"] if method == "ste" else g["lin_gw"])
    assert torch.equal(model[0].weight, before - model[0].weight.grad)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 8), (1, 16)])
def test_srste_gradients_of_every_pattern_equal_golden(n, m):
    g = load("sr_ste")
    weight, gout = g[f"w_{n}_{m}"], g[f"gout_{n}_{m}"]
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    decay = float(f"{float(g['lam']):.6g}")
    sparsifier = sp.sparsify(model, "srste", targets="0", n=n, m=m, decay=decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier.attach(optimizer)
    model(torch.eye(weight.shape[1])).backward(gout.t())  # dW = Gᵀ·I = gout
    optimizer.step()
    torch.testing.assert_close(model[0].weight.grad, g[f"gw_{n}_{m}"], rtol=1e-6, atol=1e-9)


def test_sste_layer_equals_golden():
    g = load("sste")
    model, _ = layer_from(g, "sste", mvue="none")
    torch.testing.assert_close(model[0].sparsity.beta, g["lin_beta"], rtol=1e-6, atol=0)
    y, gx = run(model, g)
    close(y, g["lin_y"])
    close(gx, g["lin_gx"])
    close(model[0].weight.grad, g["lin_gw"])
    close(model[0].bias.grad, g["lin_gb"])


def test_the_mean_over_many_steps_is_the_dense_gradient():
    g = load("sste")
    model, sparsifier = layer_from(g, "sste", seed=5)
    total, draws = torch.zeros_like(g["lin_gw"]), 1000
    for step in range(draws):
        sparsifier._state.set_step(step)
        model[0].weight.grad = None
        model(g["lin_x"]).backward(g["lin_gy"])
        total += model[0].weight.grad
    spread = g["lin_gy"].abs().max() * g["lin_x"].abs().max() * 12**0.5
    assert ((total / draws - g["lin_gw"]).abs() < 5 * spread / draws**0.5).all()


@pytest.mark.parametrize(("method", "kind"), [("ste", "hard"), ("dense", "hard"), ("sste", "soft")])
def test_flip_rates_equal_golden(method, kind):
    g = load("flip_rate")
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    weight = model[0].weight
    with torch.no_grad():
        weight.copy_(g["w"][0])
    sparsifier = sp.sparsify(model, method, targets="0")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    assert "flip_rate" not in sparsifier.metrics()
    for new, mask, rate in zip(g["w"][1:], g[f"{kind}_mask"][1:], g[f"{kind}_flip"], strict=True):
        with torch.no_grad():
            weight.copy_(new)  # an edit between steps does not count as a comparison
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert sparsifier.metrics()["flip_rate"] == pytest.approx(float(rate), abs=1e-7)
        assert torch.equal(sparsifier.masks()["0"], mask.bool())
