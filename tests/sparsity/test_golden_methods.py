"""Layers of T-SR-STE, SDGP, ASP and Bi-Mask against the golden vectors."""

import numpy as np
import pytest
import torch
from golden_vectors import load
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.optim import StepAdamW
from sparsepretrain.sparsity.methods import tsrste


class Wrapped(nn.Module):
    def __init__(self, weight, bias=None):
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.linear.weight.data.copy_(weight)
        if bias is not None:
            self.linear.bias.data.copy_(bias)

    def forward(self, x):
        return self.linear(x)


def close(a, b, rtol=1e-5):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * 0.1 * float(b.detach().abs().max()))


def products(model, x, gy):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(gy)
    return y, x.grad, model.linear.weight.grad


def test_tsrste_layer_equals_golden(monkeypatch):
    g = load("tsrste")
    model = Wrapped(g["w"], g["b"])
    sparsifier = sp.sparsify(model, "tsrste", targets=["linear"], dense_tail=0.0, mvue="none")
    assert torch.equal(sparsifier.masks()["linear"], g["mask"].bool())
    y, gx, gw = products(model, g["x"], g["gy"])
    close(y, g["y"]), close(gx, g["gx"]), close(gw, g["gw_dense"])
    close(model.linear.bias.grad, g["gb"])

    model = Wrapped(g["w"], g["b"])
    sp.sparsify(model, "tsrste", targets=["linear"], dense_tail=0.0)
    draws = torch.stack([g["r0"], g["r1"]], -1)
    mvue = kernels.mvue
    monkeypatch.setattr(
        tsrste.kernels, "mvue", lambda x, *, dim, **_: mvue(x, dim=dim, uniforms=draws)
    )
    close(products(model, g["x"], g["gy"])[2], g["gw_mvue"], rtol=1e-4)


def test_tsrste_masks_refresh_by_optimizer_steps():
    g = load("tsrste")
    model = Wrapped(g["sched_w0"])
    refresh, micro = int(g["sched_freq"]), int(g["sched_micro"])
    sparsifier = sp.sparsify(
        model, "tsrste", targets=["linear"], dense_tail=0.0, refresh=refresh, decay=0.0
    )
    # SGD with rate 1 and gradient -delta applies the recorded changes
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    for step, delta in enumerate(g["sched_delta"]):
        for k in range(micro):
            model(torch.ones(4, 64))
            model.eval()(torch.ones(4, 64))
            model.train()
            expected = g["sched_masks"][step * micro + k].bool()
            assert torch.equal(sparsifier.masks()["linear"], expected), (step, k)
        model.linear.weight.grad = -delta
        optimizer.step()


def test_tsrste_with_adamw_equals_golden():
    g = load("tsrste_adamw")
    lr, beta1, beta2, eps, decay, clip, lam, refresh = (
        float(np.format_float_positional(v, unique=True)) for v in g["hp"].numpy()
    )
    model = Wrapped(g["w0"])
    sparsifier = sp.sparsify(
        model, "tsrste", targets=["linear"], dense_tail=0.0, refresh=int(refresh), decay=lam
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay
    )
    sparsifier.attach(optimizer)
    for t in range(6):
        assert torch.equal(sparsifier.masks()["linear"], g["masks"][t].bool()), t
        model.linear.weight.grad = g["grads"][t].clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        torch.testing.assert_close(norm, g["clip_norms"][t], rtol=1e-5, atol=0)
        optimizer.step()
        torch.testing.assert_close(model.linear.weight.data, g["W"][t], rtol=1e-5, atol=1e-7)


def test_transposable_flip_rate_equals_golden():
    g = load("flip_rate")
    model = Wrapped(g["w"][0])
    sparsifier = sp.sparsify(
        model, "tsrste", targets=["linear"], dense_tail=0.0, refresh=1, decay=0.0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    for t in range(5):
        model.linear.weight.grad = g["w"][t] - g["w"][t + 1]
        optimizer.step()
        model.linear.weight.data.copy_(g["w"][t + 1])
        rate = sparsifier.metrics()["flip_rate"]
        assert abs(rate - float(g["trans_flip"][t])) < 1e-7 + 2 / 2048


def test_sdgp_layer_equals_golden():
    g = load("sdgp")
    model = Wrapped(g["lin_w"])
    sp.sparsify(model, "sdgp", targets=["linear"], variant="magnitude")
    _, gx, gw = products(model, g["lin_x"], g["lin_gy"])
    close(gx, g["lin_gx"]), close(gw, g["lin_gw"])


def test_asp_equals_golden():
    g = load("asp")
    model = Wrapped(g["w"])
    sparsifier = sp.sparsify(model, "asp", targets=["linear"], at=0.0)
    assert torch.equal(sparsifier.masks()["linear"], g["mask"].bool())
    layer = model.linear.sparsity
    assert torch.equal(layer.project(model.linear.weight).forward, g["w_pruned"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.linear.weight.grad.clone()))
    model.linear.weight.grad = g["grad"].clone()
    optimizer.step()
    assert torch.equal(seen[0], g["grad_masked"])
    after = layer.project(model.linear.weight).forward
    torch.testing.assert_close(after, g["w_after_sgd"], rtol=1e-6, atol=0)


def test_bimask_layer_equals_golden():
    g = load("bimask")
    model = Wrapped(g["w"])
    sparsifier = sp.sparsify(model, "bimask", targets=["linear"])
    model.linear.get_buffer("sparsity.permutation").copy_(g["perm"])
    sparsifier.refresh()
    y, gx, _ = products(model, g["x"], g["gy"])
    close(y, g["y"]), close(gx, g["gx"])
    sparsifier.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    sparsifier.steps.adjust_gradients(torch.optim.SGD(model.parameters(), lr=0.0))
    close(model.linear.weight.grad, g["gw"])


def test_bimask_search_keeps_the_best():
    w = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    model = Wrapped(w)
    sp.sparsify(model, "bimask", targets=["linear"], candidates=20)
    found = model.linear.get_buffer("sparsity.permutation")
    assert sorted(found.tolist()) == list(range(16))
    kept = kernels.bimask_masks(w, found)[1].sum()
    assert kept >= kernels.bimask_masks(w, torch.arange(16))[1].sum()
    again = Wrapped(w)
    sp.sparsify(again, "bimask", targets=["linear"], candidates=20)
    assert torch.equal(again.linear.get_buffer("sparsity.permutation"), found)
    other = Wrapped(w)
    sp.sparsify(other, "bimask", targets=["linear"], candidates=20, seed=1)
    assert not torch.equal(other.linear.get_buffer("sparsity.permutation"), found)


@pytest.mark.filterwarnings("ignore:StepAdamW switched")
def test_step_run_equals_golden():
    """The whole method on the golden problem: dense phase, AutoSwitch, frozen second moment."""
    g = load("step_optimizer")
    case = "opt1_auto"
    hp = [float(np.format_float_positional(v, unique=True)) for v in g[f"{case}_hp"].numpy()]
    lr, beta1, beta2, eps, decay, *_, window, switch, _ = hp
    model = Wrapped(g["W0"], g["b0"])
    sparsifier = sp.sparsify(model, "step", targets=["linear"], total_steps=40)
    options = {"betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    optimizer = StepAdamW(model.parameters(), lr=lr, window=int(window), **options)
    sparsifier.attach(optimizer)
    for t in range(len(g[f"{case}_W"])):
        sparse = t >= int(switch)
        assert sparsifier.method.phase.training == sparse
        y = model(g["X"])
        used = model.linear.weight.data
        used = used * kernels.nm_mask(used) if sparse else used
        close(y.detach(), (g["X"] @ used.t() + model.linear.bias).detach())
        loss = (y - g["Y"]).square().mean()
        close(loss.detach(), g[f"{case}_loss"][t], rtol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(
            model.linear.weight.data, g[f"{case}_W"][t], rtol=1e-3, atol=1e-5
        )
    model.eval()
    w = model.linear.weight.data
    close(model(g["X"]), g["X"] @ (w * kernels.nm_mask(w)).t() + model.linear.bias)
