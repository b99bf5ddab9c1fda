"""Defects of published layers: gradients, bias, decay, side effects (docs/published_defects.md)."""

import copy

import pytest
import torch
from defect_models import DECAYING, METHODS, Net, build, draw, forward_weight, step
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels

every_method = pytest.mark.parametrize("method", METHODS)


class PublishedSTE(torch.autograd.Function):
    """aojunzz/NM-sparsity, SparseSTE: the decay is part of the backward."""

    decay = 2e-4

    @staticmethod
    def forward(ctx, weight):
        mask = kernels.nm_mask(weight)
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx, grad):
        weight, mask = ctx.saved_tensors
        return grad + PublishedSTE.decay * ~mask * weight


def published_decay(micro_batches=1, loss_scale=1.0):
    """λ of one optimiser step, in units of the configured one."""
    w = draw(32, 16).requires_grad_()
    for _ in range(micro_batches):
        y = draw(2, 16) @ PublishedSTE.apply(w).t()
        (y.sum() * 0 * loss_scale).backward()
    pruned = ~kernels.nm_mask(w)
    return float((w.grad / loss_scale / w.detach())[pruned].mean()) / PublishedSTE.decay


def decay_in_use(method, *, micro_batches=1, batch=2, loss_scale=None, decay=0.25):
    """λ that one optimiser step applies when the loss has no gradient, over the configured one."""
    model, optimizer, sparsifier = build(method, lr=1.0, decay=decay)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, enabled=bool(loss_scale))
    before, pruned = model.fc1.weight.detach().clone(), ~sparsifier.masks()["fc1"]
    for i in range(micro_batches):
        scaler.scale(model(draw(batch, 16, seed=i)).sum() * 0).backward()
    scaler.step(optimizer)  # no unscale_ in between: the gradients are still scaled until here
    change = before - model.fc1.weight.detach()
    assert not change[~pruned].any(), "kept weights are not pulled"
    return float((change / before)[pruned].mean()) / decay


@pytest.mark.parametrize("method", DECAYING)
def test_decay_once_per_step(method):
    """NM-sparsity adds λ in every backward: K micro-batches, K·λ."""
    assert published_decay(8) == pytest.approx(8)
    for micro_batches in (1, 8):
        assert decay_in_use(method, micro_batches=micro_batches) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("method", DECAYING)
def test_decay_does_not_feel_the_loss_scale(method):
    """NM-sparsity: λ/65536 under fp16 scaling. 2by4-pretrain-acc-examples v1 train.py:306-314
    unscales only if it clips, and adds the decay before the scaler does."""
    assert published_decay(1, 65536.0) == pytest.approx(1 / 65536)
    assert decay_in_use(method, loss_scale=65536.0) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("method", DECAYING)
def test_decay_does_not_feel_the_batch(method):
    """Bi-Mask vision_transformer.py:133-134 broadcasts λ over the batch and sums: λ·6 for six."""
    assert decay_in_use(method, batch=6) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("decay", [0.0, 0.125, 1.0])
def test_the_decay_argument_counts(decay):
    """NM-sparsity lines 92-95: the linear layer ignores its decay, and its default M = 2 with
    N = 2 prunes nothing."""
    model, optimizer, sparsifier = build("srste", lr=1.0, decay=decay)
    before, mask = model.fc2.weight.detach().clone(), sparsifier.masks()["fc2"]
    assert (mask.view(-1, 4).sum(1) == 2).all()
    (model(draw(2, 16)).sum() * 0).backward()
    optimizer.step()
    expected = before - decay * before.masked_fill(mask, 0)
    torch.testing.assert_close(model.fc2.weight.detach(), expected)


@every_method
def test_expanded_gradients(method):
    """v1 sparse_ops.py:74 replaces a gradient with strides (0, 0, 0) by ones: 3·ΣY and -ΣY get the
    gradient of ΣY."""
    results, strides = {}, []
    for factor, whole in ((1.0, False), (3.0, False), (3.0, True), (-1.0, False)):
        model, _, sparsifier = build(method)
        sparsifier.micro_batch(0)
        x = draw(2, 4, 16).requires_grad_()
        y = model.fc1(x)
        if whole:
            y.backward(torch.full_like(y, factor))
        else:
            y.register_hook(lambda g: strides.append(g.stride()))
            (factor * y.sum()).backward()
        results[factor, whole] = (x.grad, model.fc1.weight.grad, model.fc1.bias.grad)
    assert strides == [(0, 0, 0)] * 3, "the case that was special"
    for one, three, filled, minus in zip(*results.values(), strict=True):
        torch.testing.assert_close(three, filled)
        torch.testing.assert_close(minus, -one)
        torch.testing.assert_close(three, 3 * one, rtol=1e-3, atol=1e-4)
        assert one.abs().sum() > 0
    assert torch.equal(results[3.0, False][2], torch.full((32,), 24.0))


@every_method
def test_inputs_and_gradients_of_any_stride(method):
    """v1 sparse_ops.py:60,80 uses ``view``: permuted activations or gradients raise."""
    results = []
    for strided in (False, True):
        model, _, sparsifier = build(method)
        sparsifier.micro_batch(0)
        x, gy = draw(16, 4, 8).permute(2, 1, 0), draw(32, 4, 8, seed=1).permute(2, 1, 0)
        if not strided:
            x, gy = x.contiguous(), gy.contiguous()
        x = x.detach().requires_grad_()
        model.fc1(x).backward(gy)
        results.append((x.grad, model.fc1.weight.grad, model.fc1.bias.grad))
    for plain, strided in zip(*results, strict=True):
        torch.testing.assert_close(plain, strided)


@every_method
def test_the_bias_is_used_and_trained(method):
    """BERT sparse_ops.py:270 tests the wrong input, so that the bias would never train; the copy of
    Bi-Mask used with it, and progressive_gradient_flow sparse_functions.py:284, drop the bias."""
    model, _, _ = build(method)
    assert torch.equal(model.fc1(torch.zeros(3, 16)), model.fc1.bias.expand(3, 32))
    gy = draw(3, 5, 32)
    model.fc1(draw(3, 5, 16)).backward(gy)
    torch.testing.assert_close(model.fc1.bias.grad, gy.sum((0, 1)))


@every_method
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_stays_frozen(method, frozen):
    """The same test in its other direction: each gradient depends on its own flag."""
    model, _, _ = build(method)
    getattr(model.fc1, frozen).requires_grad_(False)
    model.fc1(draw(4, 16)).sum().backward()
    for name in ("weight", "bias"):
        assert (getattr(model.fc1, name).grad is None) == (name == frozen)


@every_method
def test_conversion_keeps_the_layer(method):
    """sdgp.py:44,136 re-initialises converted layers; NM-sparsity's linear always has a bias."""
    plain = Net()
    weight, bias = plain.fc1.weight, plain.fc1.bias
    sp.sparsify(plain, method, targets="fc*", total_steps=40)
    assert plain.fc1.weight is weight and plain.fc1.bias is bias and plain.fc2.bias is None
    if method != "asp":
        assert torch.equal(weight, Net().fc1.weight)


@every_method
def test_forward_and_backward_leave_no_trace(method, capfd, tmp_path, monkeypatch):
    """slope ops.py:230,519,821: prunes the weight in place in the forward, prints and appends to a
    file in the backward."""
    monkeypatch.chdir(tmp_path)
    model, _, _ = build(method)
    before, version = model.fc1.weight.detach().clone(), model.fc1.weight._version
    for _ in range(2):
        model(draw(8, 16)).sum().backward()
    assert torch.equal(model.fc1.weight, before) and model.fc1.weight._version == version
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


@every_method
def test_nothing_hangs_on_a_parameter(method):
    """v1 sparse_ops.py:16-23 keeps mode, mask and counters as attributes of the weight: a copy, a
    state dict or a shard loses them."""
    model, optimizer, _ = build(method)
    step(model, optimizer)
    assert all(not vars(p) for p in model.parameters())
    copied = copy.deepcopy(model)
    fresh, _, sparsifier = build(method, seed=1)
    fresh.load_state_dict(model.state_dict())
    sparsifier.refresh()
    x = draw(4, 16)
    for other in (copied, fresh):
        assert torch.equal(other.eval()(x), model.eval()(x))


@every_method
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 2, 3, 16)])
def test_inputs_of_any_rank(method, shape):
    """Bi-Mask's linear layer takes three axes only; GEGLU blocks of 2by4-pretrain too."""
    model, _, _ = build(method)
    y = model(draw(*shape))
    y.sum().backward()
    assert y.shape == shape and model.fc1.weight.grad.shape == (32, 16)


def test_several_models_in_one_process():
    """apex asp.py:28,93 keeps its state in the class: one model per process."""
    models = [Net(seed) for seed in range(2)]
    handles = [sp.sparsify(m, "asp", targets="fc*", at=0.0) for m in models]
    for model, handle in zip(models, handles, strict=True):
        rule = kernels.nm_mask(model.fc1.weight)
        assert torch.equal(handle.masks()["fc1"], rule)
    assert not torch.equal(handles[0].masks()["fc1"], handles[1].masks()["fc1"])


def test_errors_are_not_swallowed():
    """progressive_gradient_flow sparse_functions.py:324-334: a bare ``except`` calls the layer
    again as if training had just begun."""
    model, _, _ = build("srste")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.fc1(draw(4, 15))
    with pytest.raises(ValueError, match="decay"):
        build("ste", decay=0.1)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_groups_run_along_in_features(kind):
    """progressive_gradient_flow :269,428 swaps the axis and convolution flags of its calls."""
    if kind == "linear":
        layer, axis = nn.Linear(8, 12), 1
    else:
        layer, axis = pytest.importorskip("transformers").pytorch_utils.Conv1D(12, 8), 0
    model = nn.Sequential(layer)
    mask = sp.sparsify(model, "ste", targets="0").masks()["0"].movedim(axis, -1)
    assert (mask.reshape(-1, 4).sum(1) == 2).all()
    assert not (mask.t().reshape(-1, 4).sum(1) == 2).all()


def test_the_mask_says_what_is_kept():
    """slope's flag means *pruned*; Adaptive-Sparse-Trainer's SR-STE decays what is kept."""
    model, _, sparsifier = build("ste")
    mask, used = sparsifier.masks()["fc1"], forward_weight(model.fc1)
    torch.testing.assert_close(used[mask], model.fc1.weight.detach()[mask])
    assert not used[~mask].any() and mask.float().mean() == 0.5


def test_scale_of_a_zero_layer():
    """S-STE's ⟨W,S⟩/⟨S,S⟩ of a zero (or freshly zeroed residual) weight is NaN."""
    model = Net()
    nn.init.zeros_(model.fc2.weight)
    sparsifier = sp.sparsify(model, "sste", targets="fc*")
    y = model(draw(4, 16))
    y.sum().backward()
    assert y.isfinite().all() and model.fc2.weight.grad.isfinite().all()
    assert not sparsifier.masks()["fc2"].any()


def test_layers_do_not_cast_to_fp16():
    """semi_structured.py:580 and v2 sparse_ops.py:48 cast gradients to fp16: above 65504 they are
    infinite, which loss scaling reaches."""
    model, _, _ = build("sste")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(draw(8, 16))
    assert torch.tensor(1e6).to(torch.float16).isinf()
    y.backward(torch.full_like(y, 1e6))
    assert model.fc1.weight.grad.isfinite().all() and model.fc2.weight.grad.abs().max() > 65504
