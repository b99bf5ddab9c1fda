"""AST and CAST: masks, scales and branches; their optimizers: tests/optim/test_masked_adamw.py."""

import copy

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import nm_mask
from support.small_loops import attached
from support.small_models import Layer, Net, draw
from support.sparse_cases import optimizer_for, sparsify


def run(model, optimizer, first, last):
    for step in range(first, last):
        model(draw(4, 16, seed=step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(method, steps=20, **options):
    model = Net()
    sparsifier = sparsify(model, method, total_steps=steps, **options)
    return model, sparsifier, attached(sparsifier, optimizer_for(method, model.parameters()))


@pytest.mark.parametrize("method", ["ast", "cast"])
def test_masks_change_every_ten_steps_only(method):
    model, sparsifier, optimizer = build(method, steps=100, decay=0.3)
    changed = []
    before = sparsifier.masks()["fc1"]
    for step in range(40):
        run(model, optimizer, step, step + 1)
        now = sparsifier.masks()["fc1"]
        if not torch.equal(now, before):
            changed.append(step + 1)
            assert torch.equal(now, nm_mask(model.fc1.weight))
        before = now
    assert changed and all(step % 10 == 0 for step in changed)


def test_the_decay_of_ast_rises_to_its_end():
    model, sparsifier, optimizer = build("ast", decay=0.5, decay_ramp=0.25)
    found = []
    for step in range(8):
        found.append(sparsifier.decay)
        run(model, optimizer, step, step + 1)
    assert found == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_cast_is_dense_until_the_last_mask_prunes():
    model, sparsifier, optimizer = build("cast", steps=25, decay=0.1)
    run(model, optimizer, 0, 24)
    scale = model.fc1.sparsity.scale.detach().view(-1, 2).repeat_interleave(8, 1)
    assert not torch.equal(scale, torch.ones_like(scale))
    x = draw(3, 16)
    expected = nn.functional.linear(x, model.fc1.weight * scale, model.fc1.bias)
    for training in (True, False):
        torch.testing.assert_close(model.fc1.train(training)(x), expected)
    model.train()
    assert not sparsifier.sparse and sparsifier.metrics()["density"] == 1
    assert not sparsifier.prove().holds and sparsifier.method.decay == pytest.approx(0.1 * 24 / 25)
    stale = sparsifier.masks()
    run(model, optimizer, 24, 25)
    assert sparsifier.sparse and sparsifier.prove().holds
    assert all(torch.equal(mask, stale[name]) for name, mask in sparsifier.masks().items())
    # the mask is that of step 20
    assert sparsifier.completed_steps == 25
    expected = model.eval()(x)
    dense = sp.densify(copy.deepcopy(model))
    assert torch.equal(dense(x), expected) and not dense.fc1.weight[~stale["fc1"]].any()


def test_the_end_does_not_choose_another_mask():
    """At step 20 of 20 a mask would be due, but the last step had another one."""
    model, sparsifier, optimizer = build("cast", steps=20, decay=0.1)
    run(model, optimizer, 0, 19)
    before = sparsifier.masks()
    with torch.no_grad():
        model.fc1.weight.copy_(draw(32, 16, seed=5))
    run(model, optimizer, 19, 20)
    assert torch.equal(sparsifier.masks()["fc1"], before["fc1"])


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_scales_get_the_gradient_of_the_plain_formula(kind):
    model = Layer(kind).double()
    sparsifier = sp.sparsify(model, "cast", targets="fc", total_steps=4, scales=4)
    layer = model.fc
    with torch.no_grad():
        layer.sparsity.scale.copy_(1 + 0.3 * draw(layer.sparsity.scale.numel(), seed=3))
    weight, scale = (
        p.detach().clone().requires_grad_() for p in (layer.weight, layer.sparsity.scale)
    )
    x, gy = draw(4, 128), draw(4, 256, seed=1)
    inputs = weight if kind == "Linear" else weight.t()  # (out_features, in_features)
    blocks = torch.arange(128) * 4 // 128
    used = inputs * scale.view(256, 4)[:, blocks]
    (x @ used.t() * gy).sum().backward()
    bias = 0 if layer.bias is None else layer.bias
    y = layer(x)
    torch.testing.assert_close(y, x @ used.t() + bias)
    (y * gy).sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    torch.testing.assert_close(layer.sparsity.scale.grad, scale.grad)
    assert sparsifier.layers


def test_cast_reports_what_the_end_will_prune():
    model, sparsifier, optimizer = build("cast", steps=200, decay=10.0)
    shares = [sparsifier.metrics()["masked_share"]]
    for first in range(0, 200, 100):
        run(model, optimizer, first, first + 100)
        weight, mask = model.fc1.weight.detach(), sparsifier.masks()["fc1"]
        others, kept = model.fc2.weight.detach(), sparsifier.masks()["fc2"]
        lost = weight[~mask].abs().sum() + others[~kept].abs().sum()
        share = float(lost / (weight.abs().sum() + others.abs().sum()))
        shares.append(sparsifier.metrics()["masked_share"])
        assert shares[-1] == pytest.approx(share)
    assert shares[-1] < 0.3 * shares[0]
    assert "masked_share" not in build("ast")[1].metrics()


def test_cast_needs_the_length_of_the_run():
    with pytest.raises(ConfigError, match="total_steps"):
        sp.sparsify(Net(), "cast", targets="fc1")


@pytest.mark.parametrize("scales", [3, 32])
def test_scales_must_divide_the_inputs(scales):
    with pytest.raises(ConfigError, match="multiple of"):
        sp.sparsify(Net(), "cast", targets="fc1", total_steps=4, scales=scales)


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_slorb_begins_as_the_means_of_what_is_pruned(kind):
    model = Layer(kind).double()
    stored = model.fc.weight.detach().clone()
    weight = stored if kind == "Linear" else stored.t()
    sp.sparsify(model, "ast", targets="fc", total_steps=4, slorb=16)
    mask = nm_mask(weight)
    means = (weight * ~mask).view(256, 8, 16).mean(-1).repeat_interleave(16, 1)
    x = draw(4, 128)
    bias = 0 if model.fc.bias is None else model.fc.bias
    torch.testing.assert_close(model.fc(x), x @ (weight * mask + means).t() + bias)
    counted = sum(p.numel() for p in model.fc.sparsity.parameters())
    assert counted == 256 * 8 + 8 * 128  # with square layers 12.5 % of the weights


def test_slorb_is_trained_measured_alone_and_folded():
    model, sparsifier, optimizer = build("ast", slorb=8, decay=0.3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run(model, optimizer, 0, 3)
    for key in ("means", "sums"):
        name = f"fc1.sparsity.{key}"
        assert not torch.equal(model.get_parameter(name), before[name])
    model.eval()
    x = draw(3, 16)
    alone = copy.deepcopy(model)
    with_branch = model(x)
    with sparsifier.without_residual():
        without = model(x)
    assert not torch.equal(without, with_branch) and torch.equal(model(x), with_branch)
    pruned = sp.densify(alone, fold=False)
    torch.testing.assert_close(pruned(x), without)
    with pytest.warns(sp.errors.SparsePretrainWarning, match="folded"):
        torch.testing.assert_close(sp.densify(model)(x), with_branch)
    assert (model.fc1.weight != 0).all()


def test_slorb_needs_whole_blocks_of_inputs():
    with pytest.raises(ConfigError, match="multiple of"):
        sp.sparsify(Net(), "ast", targets="fc1", total_steps=4, slorb=12)
