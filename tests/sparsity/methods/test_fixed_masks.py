"""Masks that are chosen once and kept: ties, and checkpoints that are almost N:M."""

import warnings

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError, SparsePretrainWarning

FIXED = {"slope": {}, "asp": {"at": 0.0}}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def sparsify(model, method, **more):
    return sp.sparsify(model, method, targets=["*"], total_steps=10, **FIXED[method], **more)


@pytest.mark.parametrize("method", FIXED)
def test_ties_of_a_fixed_mask_are_drawn_and_named_once(method):
    model = network()
    nn.init.zeros_(model[2].weight)
    with pytest.warns(
        SparsePretrainWarning, match=rf"{method}: fixed masks are random .* 2$"
    ) as seen:
        handle = sparsify(model, method)
    assert len(seen) == 1
    mask = handle.masks()["2"]
    assert (mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()
    kept = mask.float().mean(0)
    assert kept.min() > 0.2 and kept.max() < 0.8, "no position of a group is preferred"
    again = network()
    nn.init.zeros_(again[2].weight)
    with pytest.warns(SparsePretrainWarning):
        assert torch.equal(sparsify(again, method).masks()["2"], mask)


@pytest.mark.parametrize("method", FIXED)
def test_distinct_magnitudes_decide_a_fixed_mask(method):
    model = network()
    expected = kernels.nm_mask(model[0].weight, 2, 4, dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sparsify(model, method).masks()["0"], expected)


@pytest.mark.parametrize("method", FIXED)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 8)])
def test_a_checkpoint_that_is_almost_sparse_names_its_other_groups(method, n, m):
    model = network()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            # not the largest entries: zeros decide
            layer.weight.masked_fill_(~kernels.nm_mask(torch.rand_like(layer.weight), n, m), 0)
        before = [layer.weight != 0 for layer in (model[0], model[2])]
        model[0].weight[0, :m] = 1.0
    count = 128 * 64 // m
    text = rf"pruned groups .* 0 \(1 of {count:,} groups had more than {n} non-zeros\)"
    with pytest.warns(SparsePretrainWarning, match=text):
        handle = sparsify(model, method, n=n, m=m)
    masks = handle.masks()
    assert torch.equal(masks["2"], before[1])
    assert torch.equal(masks["0"][1:], before[0][1:])


def test_layers_on_the_meta_device_are_not_looked_at():
    with torch.device("meta"):
        model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify(model, "asp")


@pytest.mark.parametrize("method", FIXED)
def test_keep_zeros_keeps_exactly_the_non_zeros(method):
    model = network()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.masked_fill_(~kernels.nm_mask(torch.rand_like(layer.weight), 1, 4), 0)
    before = {"0": model[0].weight != 0, "2": model[2].weight != 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ties among zeros
        handle = sparsify(model, method)
    handle.keep_zeros()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle.attach(optimizer)
    for _ in range(3):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    masks = handle.masks()
    assert all(torch.equal(masks[name], kept) for name, kept in before.items())
    assert handle.metrics()["flip_rate"] == 0
    sp.densify(model)
    assert all(torch.equal(model[int(name)].weight != 0, kept) for name, kept in before.items())


def test_keep_zeros_refuses_moving_masks_and_dense_groups():
    handle = sp.sparsify(network(), "srste", targets=["*"])
    with pytest.raises(ConfigError, match="srste has no mask that is fixed from the start"):
        handle.keep_zeros()
    with pytest.raises(ConfigError, match=r"more than 2 of 4 non-zeros: 0 \(2,048 of 2,048\), 2"):
        sparsify(network(), "slope").keep_zeros()
    with pytest.raises(ConfigError, match=r"asp with at=0, .*, and no window\.start"):
        sparsify(network(), "asp", window={"start": 0.3}).keep_zeros()


@pytest.mark.parametrize("method", ["asp", "slope", "srste"])
@pytest.mark.parametrize("steps", [0, 3])
def test_dense_weights_that_are_loaded_later_do_not_move_fixed_masks(method, steps):
    model = network()
    at = {"at": 0.0} if method == "asp" else {}
    handle = sp.sparsify(model, method, targets=["*"], total_steps=10, **at)
    optimizer = torch.optim.AdamW(model.parameters())
    handle.attach(optimizer)
    for _ in range(steps):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    dense = {k: torch.randn_like(v) for k, v in model.state_dict().items() if "sparsity" not in k}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_state_dict(dense, strict=False)
        model.load_state_dict(model.state_dict())
    told = [str(warning.message) for warning in caught]
    # of the first load, once per layer; a whole state dict brings its masks
    assert len(told) == (2 if method != "srste" and steps > 0 else 0)
    assert all("loaded without their masks" in text for text in told)
    follows = torch.equal(handle.masks()["0"], kernels.nm_mask(dense["0.weight"], 2, 4, dim=1))
    assert follows == (not told)
