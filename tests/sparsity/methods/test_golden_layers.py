"""Layers against the published ones: STE, SR-STE, S-STE, flip rates."""

import pytest
import torch

from support.golden_vectors import load
from support.small_loops import attached
from support.sparse_cases import sparse_layer


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
    model, sparsifier = sparse_layer(method, g["lin_w"], g["lin_b"])
    before = model[0].weight.detach().clone()
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=1.0))
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
    decay = float(f"{float(g['lam']):.6g}")
    model, sparsifier = sparse_layer("srste", weight, n=n, m=m, decay=decay)
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.eye(weight.shape[1])).backward(gout.t())  # dW = Gᵀ·I = gout
    optimizer.step()
    torch.testing.assert_close(model[0].weight.grad, g[f"gw_{n}_{m}"], rtol=1e-6, atol=1e-9)


def test_sste_layer_equals_golden():
    g = load("sste")
    model, _ = sparse_layer("sste", g["lin_w"], g["lin_b"], mvue="none")
    torch.testing.assert_close(model[0].sparsity.beta, g["lin_beta"], rtol=1e-6, atol=0)
    y, gx = run(model, g)
    close(y, g["lin_y"])
    close(gx, g["lin_gx"])
    close(model[0].weight.grad, g["lin_gw"])
    close(model[0].bias.grad, g["lin_gb"])


@pytest.mark.parametrize("estimator", ["approximate", "exact"])
def test_the_mean_over_many_steps_is_the_dense_gradient(estimator):
    g = load("sste")
    model, sparsifier = sparse_layer("sste", g["lin_w"], g["lin_b"], seed=5, estimator=estimator)
    total, draws = torch.zeros_like(g["lin_gw"]), 1000
    for step in range(draws):
        sparsifier._state.set_step(step)
        model[0].weight.grad = None
        model(g["lin_x"]).backward(g["lin_gy"])
        total += model[0].weight.grad
    spread = g["lin_gy"].abs().max() * g["lin_x"].abs().max() * 12**0.5
    assert ((total / draws - g["lin_gw"]).abs() < 5 * spread / draws**0.5).all()


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("ste", "hard", {}),
        ("dense", "hard", {}),
        ("sste", "soft", {}),
        ("tsrste", "trans", {"dense_tail": 0.0, "refresh": 1, "decay": 0.0}),
    ],
)
def test_flip_rates_equal_golden(method, kind, options):
    g = load("flip_rate")
    model, sparsifier = sparse_layer(method, g["w"][0], **options)
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=1.0))
    weight = model[0].weight
    assert "flip_rate" not in sparsifier.metrics()
    for new, mask, rate in zip(g["w"][1:], g[f"{kind}_mask"][1:], g[f"{kind}_flip"], strict=True):
        weight.data.copy_(new)  # an edit between steps does not count as a comparison
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert sparsifier.metrics()["flip_rate"] == pytest.approx(float(rate), abs=1e-7)
        assert torch.equal(sparsifier.masks()["0"], mask.bool())
