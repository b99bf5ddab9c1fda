"""S-STE's scale where the initial weights say nothing about it, and fitting it again later.

The kind: layers whose S(W) is 0, so that β = 1 is no fit. Members: projections of zeros (nanochat,
μP heads) and weights of equal magnitude; in plain, bypassed and reset models.
"""

import copy
import warnings

import pytest
import torch

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from support.small_loops import attached, train
from support.small_models import Net
from support.sparse_cases import STEPS, sparsify
from support.tiny_runs import assert_equal_bits


def net(value):
    model = Net()
    if value is not None:
        torch.nn.init.constant_(model.fc2.weight, value)
    return model


def beta(model, name):
    return float(model.get_submodule(name).sparsity.beta)


@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -2.0])
def test_layers_without_a_scale_are_one_warning(value):
    with pytest.warns(SparsePretrainWarning, match=r"^sste: S\(W\) is 0.* β is 1 .* fc2$") as told:
        sparsify(model := net(value), "sste")
    assert len(told) == 1 and "beta_at" in str(told[0].message)
    assert beta(model, "fc2") == 1.0 and beta(model, "fc1") > 1.2


@pytest.mark.parametrize(
    ("value", "options"),
    [(None, {}), (0.0, {"beta": "none"}), (0.0, {"beta_update": "step"})],
)
def test_layers_with_a_scale_and_methods_without_one_do_not_warn(value, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        sparsify(net(value), "sste", **options)


def test_reset_fits_and_warns_again():
    with pytest.warns(SparsePretrainWarning, match="fc2"):
        handle = sparsify(model := net(0.0), "sste")
    torch.nn.init.normal_(model.fc2.weight)
    handle.reset()
    assert beta(model, "fc2") > 1.2
    torch.nn.init.zeros_(model.fc1.weight)
    with pytest.warns(SparsePretrainWarning, match="fc1"):
        handle.reset()


@pytest.mark.parametrize("rule", ["mse", "l1"])
@pytest.mark.parametrize("stored", [False, True])
def test_the_scale_is_fitted_again_after_its_step_and_only_then(rule, stored):
    with pytest.warns(SparsePretrainWarning, match=r"until step 3 \(beta_at\)"):
        handle = sparsify(model := net(0.0), "sste", beta_at=3, beta=rule)
    optimizer = attached(handle, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if stored:
        handle.store_operands()
    first = beta(model, "fc1")
    for step in range(6):
        train(model, optimizer, step, step + 1)
        assert handle.completed_steps == step + 1, "counters go on"
        if step == 2:
            weight = model.fc2.weight.detach()
            soft = kernels.soft_threshold(weight, 2, 4)
            fit = kernels.optimal_scale if rule == "mse" else kernels.l1_scale
            fitted = float(fit(weight, soft))
            handle.refresh()
        if step < 2:
            assert beta(model, "fc2") == 1.0 and beta(model, "fc1") == first
        else:
            assert beta(model, "fc2") == pytest.approx(fitted, rel=1e-6) != 1.0
            assert beta(model, "fc1") != first


def test_a_run_resumed_before_or_after_the_step_is_the_same():
    def start():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparsePretrainWarning)
            handle = sparsify(model := net(0.0), "sste", beta_at=3)
        return model, attached(handle, torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = start()
    train(model, optimizer, 0, 6)
    for stop in (2, 3, 4):
        first, first_optimizer = start()
        train(first, first_optimizer, 0, stop)
        second, second_optimizer = start()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        second_optimizer.load_state_dict(copy.deepcopy(first_optimizer.state_dict()))
        train(second, second_optimizer, stop, 6)
        assert_equal_bits(second.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta_at": -1}, "beta_at"),
        ({"beta_at": 5, "beta": "none"}, "beta_at must be 0 with beta=none, got 5"),
        ({"beta_at": 5, "beta_update": "step"}, "beta_at must be 0 with beta_update=step"),
        ({"beta_at": STEPS}, rf"after steps 1 to {STEPS - 1}, got {STEPS}"),
        ({"beta_at": 3, "window": {"start": 0.5}}, f"after steps {STEPS // 2} to"),
        ({"beta_at": STEPS - 1, "window": {"stop": 0.5}}, f"to {STEPS // 2 - 1}, got"),
    ],
)
def test_steps_that_never_come_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        sp.sparsify(Net(), "sste", targets=["fc*"], total_steps=STEPS, **options)
