"""Layers of T-SR-STE, SDGP, ASP and Bi-Mask against the golden vectors."""

import numpy as np
import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.optim import StepAdamW
from sparsepretrain.sparsity.methods import tsrste
from support.golden_vectors import load
from support.sparse_cases import sparse_layer


def exact(values):
    """Shortest decimal numbers that round to the stored fp32 values."""
    return [float(np.format_float_positional(v, unique=True)) for v in values.numpy()]


def close(a, b, rtol=1e-5):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * 0.1 * float(b.detach().abs().max()))


def products(model, x, gy):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(gy)
    return y, x.grad, model[0].weight.grad


def test_tsrste_layer_equals_golden(monkeypatch):
    g = load("tsrste")
    model, sparsifier = sparse_layer("tsrste", g["w"], g["b"], dense_tail=0.0, mvue="none")
    assert torch.equal(sparsifier.masks()["0"], g["mask"].bool())
    y, gx, gw = products(model, g["x"], g["gy"])
    close(y, g["y"]), close(gx, g["gx"]), close(gw, g["gw_dense"])
    close(model[0].bias.grad, g["gb"])

    model, _ = sparse_layer("tsrste", g["w"], g["b"], dense_tail=0.0)
    draws = torch.stack([g["r0"], g["r1"]], -1)
    mvue = kernels.mvue
    monkeypatch.setattr(
        tsrste.kernels, "mvue", lambda x, *, dim, **_: mvue(x, dim=dim, uniforms=draws)
    )
    close(products(model, g["x"], g["gy"])[2], g["gw_mvue"], rtol=1e-4)


def test_tsrste_masks_refresh_by_optimizer_steps():
    g = load("tsrste")
    refresh, micro = int(g["sched_freq"]), int(g["sched_micro"])
    options = {"dense_tail": 0.0, "refresh": refresh, "decay": 0.0}
    model, sparsifier = sparse_layer("tsrste", g["sched_w0"], **options)
    # SGD with rate 1 and gradient -delta applies the recorded changes
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    for step, delta in enumerate(g["sched_delta"]):
        for k in range(micro):
            model(torch.ones(4, 64))
            model.eval()(torch.ones(4, 64))
            model.train()
            expected = g["sched_masks"][step * micro + k].bool()
            assert torch.equal(sparsifier.masks()["0"], expected), (step, k)
        model[0].weight.grad = -delta
        optimizer.step()


def test_tsrste_with_adamw_equals_golden():
    g = load("tsrste_adamw")
    lr, beta1, beta2, eps, decay, clip, lam, refresh = exact(g["hp"])
    options = {"dense_tail": 0.0, "refresh": int(refresh), "decay": lam}
    model, sparsifier = sparse_layer("tsrste", g["w0"], **options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay
    )
    sparsifier.attach(optimizer)
    for t in range(6):
        assert torch.equal(sparsifier.masks()["0"], g["masks"][t].bool()), t
        model[0].weight.grad = g["grads"][t].clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        torch.testing.assert_close(norm, g["clip_norms"][t], rtol=1e-5, atol=0)
        optimizer.step()
        torch.testing.assert_close(model[0].weight.data, g["W"][t], rtol=1e-5, atol=1e-7)


def test_sdgp_layer_equals_golden():
    g = load("sdgp")
    model, _ = sparse_layer("sdgp", g["lin_w"], variant="magnitude")
    _, gx, gw = products(model, g["lin_x"], g["lin_gy"])
    close(gx, g["lin_gx"]), close(gw, g["lin_gw"])


def test_asp_equals_golden():
    g = load("asp")
    model, sparsifier = sparse_layer("asp", g["w"], at=0.0)
    assert torch.equal(sparsifier.masks()["0"], g["mask"].bool())
    layer = model[0].operands
    assert torch.equal(layer.project(model[0].weight).forward, g["w_pruned"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    model[0].weight.grad = g["grad"].clone()
    optimizer.step()
    assert torch.equal(seen[0], g["grad_masked"])
    after = layer.project(model[0].weight).forward
    torch.testing.assert_close(after, g["w_after_sgd"], rtol=1e-6, atol=0)


def test_bimask_layer_equals_golden():
    g = load("bimask")
    model, sparsifier = sparse_layer("bimask", g["w"])
    model[0].get_buffer("sparsity.permutation").copy_(g["perm"])
    sparsifier.refresh()
    y, gx, _ = products(model, g["x"], g["gy"])
    close(y, g["y"]), close(gx, g["gx"])
    sparsifier.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    sparsifier.steps.adjust_gradients(torch.optim.SGD(model.parameters(), lr=0.0))
    close(model[0].weight.grad, g["gw"])


def test_bimask_search_keeps_the_best():
    w = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))

    def search(**options):
        model, _ = sparse_layer("bimask", w, candidates=20, **options)
        return model[0].get_buffer("sparsity.permutation")

    found = search()
    assert sorted(found.tolist()) == list(range(16))
    kept = kernels.bimask_masks(w, found)[1].sum()
    assert kept >= kernels.bimask_masks(w, torch.arange(16))[1].sum()
    assert torch.equal(search(), found) and not torch.equal(search(seed=1), found)


@pytest.mark.filterwarnings("ignore:StepAdamW switched")
def test_step_run_equals_golden():
    """The whole method on the golden problem: dense phase, AutoSwitch, frozen second moment."""
    g = load("step_optimizer")
    case = "opt1_auto"
    lr, beta1, beta2, eps, decay, *_, window, switch, _ = exact(g[f"{case}_hp"])
    model, sparsifier = sparse_layer("step", g["W0"], g["b0"], total_steps=40)
    options = {"betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    optimizer = StepAdamW(model.parameters(), lr=lr, window=int(window), **options)
    sparsifier.attach(optimizer)
    for t in range(len(g[f"{case}_W"])):
        sparse = t >= int(switch)
        assert sparsifier.method.phase.training == sparse
        y = model(g["X"])
        used = model[0].weight.data
        used = used * kernels.nm_mask(used) if sparse else used
        close(y.detach(), (g["X"] @ used.t() + model[0].bias).detach())
        loss = (y - g["Y"]).square().mean()
        close(loss.detach(), g[f"{case}_loss"][t], rtol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(model[0].weight.data, g[f"{case}_W"][t], rtol=1e-3, atol=1e-5)
    model.eval()
    w = model[0].weight.data
    close(model(g["X"]), g["X"] @ (w * kernels.nm_mask(w)).t() + model[0].bias)
