"""Metrics, masks in use, and the phases of single methods."""

import pytest
import torch
from sparse_cases import build, sparsify, train
from torch import nn


def test_metrics_keys():
    model, optimizer, sparsifier = build("sste", dtype=torch.float32)
    always = {"density", "l1_gap", "sparse"}
    assert set(sparsifier.metrics()) == always
    layers = {"l1_gap/fc1", "l1_gap/fc2"}
    assert set(sparsifier.metrics(per_layer=True)) == always | layers
    train(model, optimizer, 0, 1)
    assert set(sparsifier.metrics()) == always | {"flip_rate"}
    metrics = sparsifier.metrics(per_layer=True)
    layers |= {"flip_rate/fc1", "flip_rate/fc2"}
    assert set(metrics) == always | {"flip_rate"} | layers
    assert all(type(v) is float for v in metrics.values())
    by_layer = (metrics["flip_rate/fc1"] + metrics["flip_rate/fc2"]) / 2  # equal sizes
    assert metrics["flip_rate"] == pytest.approx(by_layer)


def test_flip_rate_weights_layers_by_size():
    model = nn.ModuleDict({"big": nn.Linear(16, 30), "small": nn.Linear(4, 2)})
    sparsifier = sparsify(model, "ste", targets="*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier.attach(optimizer)
    with torch.no_grad():
        model["small"].weight.copy_(torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]]))
        sparsifier.layers["small"].sparsity.take_baseline(model["small"])
        model["small"].weight.copy_(torch.tensor([[4.0, 2, 3, 1], [1, 2, 3, 4]]))
    optimizer.step()
    metrics = sparsifier.metrics(per_layer=True)
    assert metrics["flip_rate/small"] == 2 / 8 and metrics["flip_rate/big"] == 0
    assert metrics["flip_rate"] == 2 / (16 * 30 + 8)


def test_l1_gap_by_hand():
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    sparsifier = sparsify(model, "ste", targets="*")
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2, 3, 4, 0, 0, 5, -7]]))
    assert sparsifier.metrics()["l1_gap"] == ((3 - 2) + (5 - 0)) / 2


def test_masks_of_soft_thresholding_are_its_non_zeros():
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    sparsifier = sparsify(model, "sste", targets="*")
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1, 1, 1, 1, 2, 2, 3]]))
    assert sparsifier.masks()["0"].tolist() == [[False] * 7 + [True]]
    assert sparsifier.metrics()["density"] == 1 / 8


@pytest.mark.parametrize(("at", "start", "pruned"), [(0.0, 0.1, 4), (0.1, 0.0, 4), (0.0, 0.0, 0)])
def test_one_shot_pruning_takes_the_weights_of_its_step(at, start, pruned):
    model, optimizer, sparsifier = build("asp", {"at": at, "window": {"start": start}})
    for step in range(7):
        zeros = (model.fc1.weight == 0).view(-1, 4).sum(1)
        assert (zeros == (2 if step >= pruned else 0)).all(), step
        if step == pruned:
            mask = sparsifier.masks()["fc1"].clone()
            kept = model.fc1.weight[mask].abs().min()
        before = model.fc1.weight.detach().clone()
        train(model, optimizer, step, step + 1)
        if step + 1 == pruned:  # the survivors are the largest of the weights just before
            after = model.fc1.weight.detach()
            assert not torch.equal(after != 0, before != 0)
    assert torch.equal(sparsifier.masks()["fc1"], mask) and kept > 0
    assert sparsifier.metrics() == {
        "density": 0.5,
        "flip_rate": 0.0,
        "sparse": 1.0,
        "l1_gap": sparsifier.metrics()["l1_gap"],
    }


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_transposable_masks_refresh_from_the_first_sparse_step(start):
    options = {"refresh": 3, "window": {"start": start}}
    model, optimizer, sparsifier = build("tsrste", options)
    first, seen = round(start * 40), []
    for step in range(first + 7):
        if step >= first:
            mask = sparsifier.masks()["fc1"].clone()
            rule = sparsifier.method.mask(model.fc1.weight.detach(), 1)
            if (step - first) % 3 == 0:
                assert torch.equal(mask, rule)
            else:
                assert torch.equal(mask, seen[-1]), "masks rest between refreshes"
            seen.append(mask)
        train(model, optimizer, step, step + 1)
