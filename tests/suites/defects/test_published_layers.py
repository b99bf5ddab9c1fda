"""Defects of published layers: gradients, bias, decay, side effects (docs/published_defects.md)."""

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from support.defect_models import DECAYING, METHODS, Net, build, draw, step

every_method = pytest.mark.parametrize("method", METHODS)


def decay_in_use(method, *, micro_batches=1, batch=2, loss_scale=None, decay=0.25):
    """λ that one optimizer step applies when the loss has no gradient, over the configured one."""
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
@pytest.mark.parametrize(
    "step", [{"micro_batches": 1}, {"micro_batches": 8}, {"loss_scale": 65536.0}, {"batch": 6}]
)
def test_decay_is_independent_of_micro_batches_loss_scale_and_batch(method, step):
    """NM-sparsity; acc-examples v1 train.py:306-314; Bi-Mask vision_transformer.py:133-134."""
    assert decay_in_use(method, **step) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("decay", [0.0, 0.125, 1.0])
def test_the_decay_option_is_applied(decay):
    """NM-sparsity lines 92-95: the linear layer ignores its decay; its 2:2 prunes nothing."""
    model, optimizer, sparsifier = build("srste", lr=1.0, decay=decay)
    before, mask = model.fc2.weight.detach().clone(), sparsifier.masks()["fc2"]
    assert (mask.view(-1, 4).sum(1) == 2).all()
    (model(draw(2, 16)).sum() * 0).backward()
    optimizer.step()
    expected = before - decay * before.masked_fill(mask, 0)
    torch.testing.assert_close(model.fc2.weight.detach(), expected)


@every_method
def test_forward_and_backward_leave_no_trace(method, capfd, tmp_path, monkeypatch):
    """slope ops.py:230,519,821 prunes the weight in place, prints, and appends to a file."""
    monkeypatch.chdir(tmp_path)
    model, _, _ = build(method)
    before, version = model.fc1.weight.detach().clone(), model.fc1.weight._version
    for _ in range(2):
        model(draw(8, 16)).sum().backward()
    assert torch.equal(model.fc1.weight, before) and model.fc1.weight._version == version
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


@every_method
def test_parameters_have_no_extra_attributes(method):
    """v1 sparse_ops.py:16-23 keeps mode, mask and counters there: copies and shards lose them."""
    model, optimizer, _ = build(method)
    step(model, optimizer)
    assert all(not vars(p) for p in model.parameters())


def test_models_of_one_process_have_their_own_masks():
    """apex asp.py:28,93 keeps its state in the class: one model per process."""
    models = [Net(seed) for seed in range(2)]
    handles = [sp.sparsify(m, "asp", targets="fc*", at=0.0) for m in models]
    masks = [handle.masks()["fc1"] for handle in handles]
    for model, mask in zip(models, masks, strict=True):
        assert torch.equal(mask, kernels.nm_mask(model.fc1.weight))
    assert not torch.equal(*masks)


def test_errors_of_a_layer_are_raised():
    """progressive_gradient_flow sparse_functions.py:324-334 has a bare ``except``."""
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


def test_zero_layer_has_finite_gradients():
    """S-STE's ⟨W,S⟩/⟨S,S⟩ of a zero (or freshly zeroed residual) weight is NaN."""
    model = Net()
    nn.init.zeros_(model.fc2.weight)
    sparsifier = sp.sparsify(model, "sste", targets="fc*")
    y = model(draw(4, 16))
    y.sum().backward()
    assert y.isfinite().all() and model.fc2.weight.grad.isfinite().all()
    assert not sparsifier.masks()["fc2"].any()


def test_layers_do_not_cast_to_fp16():
    """semi_structured.py:580, v2 sparse_ops.py:48: gradients above 65504 become infinite."""
    model, _, _ = build("sste")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(draw(8, 16))
    assert torch.tensor(1e6).to(torch.float16).isinf()
    y.backward(torch.full_like(y, 1e6))
    assert model.fc1.weight.grad.isfinite().all() and model.fc2.weight.grad.abs().max() > 65504
