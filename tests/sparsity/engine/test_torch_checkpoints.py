"""Checkpoints of torch.distributed.checkpoint: every method resumes to the same bits."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsepretrain as sp
from sparsepretrain.optim import StepAdamW
from support.small_loops import train
from support.sparse_cases import build
from support.tiny_runs import assert_equal_bits
from support.torch_checkpoints import LOADS, save

SWITCHED_BEFORE, SWITCHED_LATER = "step, sparse from step 4", "step, sparse from step 9"
METHODS = [*sp.list_methods(), SWITCHED_BEFORE, SWITCHED_LATER]


def build_variant(name, **settings):
    """A model whose optimizer switches at a given step, if the method is STEP."""
    method, _, step = name.partition(", sparse from step ")
    model, optimizer, sparsifier = build(method, **settings)
    if step:
        sparsifier.detach()
        optimizer = StepAdamW(model.parameters(), lr=1e-2, clipping=(None, int(step) - 2))
        sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("method", METHODS)
def test_resume_is_bit_exact(method, load, tmp_path):
    model, optimizer, sparsifier = build_variant(method)
    train(model, optimizer, 0, 6)
    save(model, optimizer, tmp_path, load)
    train(model, optimizer, 6, 12)
    resumed, its_optimizer, its_sparsifier = build_variant(method, seed=1)
    LOADS[load](resumed, its_optimizer, tmp_path)
    assert its_sparsifier.completed_steps == 6
    train(resumed, its_optimizer, 6, 12)
    assert its_sparsifier.completed_steps == sparsifier.completed_steps == 12
    assert_equal_bits(model.state_dict(), resumed.state_dict())
    assert_equal_bits(optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])


@pytest.mark.parametrize("method", ["srste", "step"])
def test_saving_before_the_first_step_counts_no_step(method):
    model, optimizer, sparsifier = build(method)
    get_optimizer_state_dict(model, optimizer)
    assert sparsifier.completed_steps == 0
    moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    assert moments and not any(moment.any() for moment in moments)
    if method == "step":
        assert optimizer.steps == 0 and not optimizer.sparse_phase


def test_saves_of_a_stateless_optimizer_count_no_step():
    model, optimizer, sparsifier = build("srste", cls=torch.optim.SGD)
    for step in range(3):
        train(model, optimizer, step, step + 1)
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
        assert sparsifier.completed_steps == step + 1


@pytest.mark.parametrize("method", ["srste", "step"])
def test_first_step_with_learning_rate_zero_counts(method):
    model, optimizer, sparsifier = build(method)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 0, 1)
    assert sparsifier.completed_steps == 1


@pytest.mark.parametrize("name", [SWITCHED_BEFORE, SWITCHED_LATER])
def test_the_phase_of_step_adamw_is_kept_with_its_groups(name):
    model, optimizer, _ = build_variant(name)
    train(model, optimizer, 0, 6)
    assert optimizer.sparse_phase is (name == SWITCHED_BEFORE)
    _, other, _ = build_variant(name, seed=1)
    other.load_state_dict({key: optimizer.state_dict()[key] for key in ("state", "param_groups")})
    assert (other.steps, other.switched_at) == (6, optimizer.switched_at)
    assert other.changes == optimizer.changes
