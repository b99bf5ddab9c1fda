"""Metrics, masks in use, and the phases of single methods."""

import copy

import pytest
import torch
from torch import nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.optim import StepAdamW
from support.small_loops import attached, train
from support.small_models import Net
from support.sparse_cases import build, sparsify
from support.tiny_runs import assert_equal_bits


def test_metrics_have_the_documented_keys():
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
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        model["small"].weight.copy_(torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]]))
        sparsifier.steps.compare()
        model["small"].weight.copy_(torch.tensor([[4.0, 2, 3, 1], [1, 2, 3, 4]]))
    optimizer.step()
    metrics = sparsifier.metrics(per_layer=True)
    assert metrics["flip_rate/small"] == 2 / 8 and metrics["flip_rate/big"] == 0
    assert metrics["flip_rate"] == 2 / (16 * 30 + 8)


def test_l1_gap_equals_manual_result():
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    sparsifier = sparsify(model, "ste", targets="*")
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2, 3, 4, 0, 0, 5, -7]]))
    assert sparsifier.metrics()["l1_gap"] == ((3 - 2) + (5 - 0)) / 2


@pytest.mark.parametrize(("at", "start", "pruned"), [(0.0, 0.1, 4), (0.1, 0.0, 4), (0.0, 0.0, 0)])
def test_asp_prunes_the_weights_of_its_step(at, start, pruned):
    model, optimizer, sparsifier = build("asp", {"at": at, "window": {"start": start}})
    for step in range(7):
        weight = model.fc1.weight.detach()
        assert sparsifier.metrics()["density"] == (0.5 if step >= pruned else 1)
        if step == pruned:
            mask = sparsifier.masks()["fc1"].clone()
            assert torch.equal(mask, sparsifier.method.mask(weight, 1))
        before = weight.clone()
        train(model, optimizer, step, step + 1)
        if not pruned:  # no gradient and no moments: only AdamW's own decay
            dropped = weight[~mask]
            torch.testing.assert_close(dropped, before[~mask] * (1 - 1e-2 * 1e-2))
    assert torch.equal(sparsifier.masks()["fc1"], mask)
    metrics = sparsifier.metrics()
    assert (metrics["density"], metrics["flip_rate"], metrics["sparse"]) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4)])
@pytest.mark.parametrize("start", [0.0, 0.1])
def test_transposable_masks_refresh_from_the_first_sparse_step(start, n, m):
    options = {"n": n, "m": m, "refresh": 3, "window": {"start": start}}
    model, optimizer, sparsifier = build("tsrste", options)
    first, seen = round(start * 40), []
    for step in range(first + 7):
        if step >= first:
            mask = sparsifier.masks()["fc1"].clone()
            rule = sparsifier.method.mask(model.fc1.weight.detach(), 1)
            assert (mask.unflatten(0, (-1, m)).sum(1) == n).all(), "along out_features"
            assert (mask.unflatten(1, (-1, m)).sum(2) == n).all(), "along in_features"
            if (step - first) % 3 == 0:
                assert torch.equal(mask, rule)
            else:
                assert torch.equal(mask, seen[-1]), "masks rest between refreshes"
            seen.append(mask)
        train(model, optimizer, step, step + 1)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tsrste", {"refresh": 3, "dense_tail": 0.0}),
        ("tsrste", {"n": 4, "m": 8, "refresh": 3, "dense_tail": 0.0}),
        ("dense", {"refresh": 3}),
        ("dense", {"refresh": 3, "flip_rule": "transposable"}),
        ("dense", {"n": 1, "refresh": 3, "flip_rule": "transposable"}),
    ],
)
def test_flip_rates_name_their_interval_and_are_not_repeated(method, options):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32)
    before = sparsifier.method.mask(model.fc1.weight.detach(), 1)
    for step in range(7):
        if step == 4:  # a resume between two comparisons
            state = copy.deepcopy(model.state_dict()), sparsifier.state_dict()
            model, optimizer, sparsifier = build(method, options, dtype=torch.float32, seed=1)
            model.load_state_dict(state[0])
            sparsifier.load_state_dict(state[1])
        train(model, optimizer, step, step + 1)
        metrics = sparsifier.metrics(per_layer=True)
        assert ("flip_rate" in metrics) == ((step + 1) % 3 == 0)
        if "flip_rate" in metrics:
            assert metrics["flip_interval"] == 3.0
            now = sparsifier.method.mask(model.fc1.weight.detach(), 1)
            assert metrics["flip_rate/fc1"] == float((now != before).float().mean()) > 0
            before = now
        else:
            assert not [k for k in metrics if k.startswith("flip_")]


def test_dense_method_logs_flips_of_transposable_masks():
    """What the decay search divides by: the rule and the interval of T-SR-STE, nothing applied."""
    plain, first, _ = build("dense")
    model, second, sparsifier = build("dense", {"flip_rule": "transposable", "refresh": 2})
    for trained, optimizer in ((plain, first), (model, second)):
        train(trained, optimizer, 0, 4)
    assert_equal_bits(list(plain.parameters()), list(model.parameters()))
    for name, mask in sparsifier.masks().items():
        assert (mask.view(-1, 4, mask.shape[1]).sum(1) == 2).all(), name
        assert (mask.view(len(mask), -1, 4).sum(2) == 2).all(), name
    assert sparsifier.metrics()["sparse"] == 0
    odd = nn.ModuleDict({"fc": nn.Linear(8, 6)})
    with pytest.raises(ConfigError, match="out_features = 6 "):
        sparsify(odd, "dense", flip_rule="transposable")


@pytest.mark.parametrize(
    ("method", "options", "phases"),
    [
        ("dense", {}, "0" * 9),
        ("ste", {}, "1" * 9),
        ("ste", {"window": {"start": 0.05, "stop": 0.15}}, "001111000"),
        ("tsrste", {"dense_tail": 0.85}, "111111000"),
        ("asp", {"at": 0.1}, "000011111"),
        ("mdgf", {"until": 0.1}, "000011111"),
        ("sdgf", {"until": 0.1}, "111111111"),
    ],
)
def test_phases_are_metrics(method, options, phases):
    model, optimizer, sparsifier = build(method, options)
    seen = ""
    for step in range(9):
        seen += f"{sparsifier.metrics()['sparse']:.0f}"
        train(model, optimizer, step, step + 1)
    assert seen == phases


def test_autoswitch_is_in_metrics_until_it_switches():
    model = Net(torch.float32)
    sparsifier = sparsify(model, "step")
    options = {"betas": (0.9, 0.9), "clipping": (2, 5), "frozen_bias_correction": True}
    optimizer = attached(sparsifier, StepAdamW(model.parameters(), eps=1e-8, **options))
    assert sparsifier.metrics().keys() == {"density", "l1_gap", "sparse"}
    for step in range(1, 8):
        train(model, optimizer, step, step + 1)
        metrics = sparsifier.metrics()
        assert metrics["sparse"] == float(step >= 6) == float(optimizer.sparse_phase)
        if step <= 6:  # step 6 > T_max switches; its own products were dense
            assert metrics["autoswitch_z"] == optimizer.window_mean > 0
            assert metrics["autoswitch_threshold"] == 1e-8
        else:
            assert not [k for k in metrics if k.startswith("autoswitch")]
