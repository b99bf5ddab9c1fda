"""Defects of published phases, refreshes, caches and settings (docs/published_defects.md)."""

import copy

import pytest
import torch
from defect_models import METHODS, STEPS, build, draw, forward_weight, step

from sparsepretrain.config import compose
from sparsepretrain.config.freeze import identity
from sparsepretrain.kernels import transposable_mask


def masks(sparsifier):
    return {name: mask.clone() for name, mask in sparsifier.masks().items()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


def test_refreshes_follow_optimiser_steps():
    """BERT sparse_ops.py:215,236 drives its phase by forwards, evaluation included; here only
    optimiser steps count, whatever is forwarded between them."""
    quiet, busy = (build("tsrste", refresh=2, dense_tail=0.25, mvue="none") for _ in range(2))
    for number in range(6):
        model = busy[0]
        for _ in range(3):
            model(draw(2, 16))
            with torch.no_grad():
                model(draw(2, 16))
            model.eval()(draw(2, 16))
            model.train()
        for model, optimizer, _ in (quiet, busy):
            step(model, optimizer, seed=number)
        assert equal(masks(busy[2]), masks(quiet[2]))
        assert busy[2].completed_steps == number + 1
    assert torch.equal(busy[0].fc1.weight, quiet[0].fc1.weight)


def test_masks_rest_between_refreshes_and_move_at_them():
    """What the other tests of this file rely on: a refresh is visible when it happens."""
    model, optimizer, sparsifier = build("tsrste", refresh=3, dense_tail=0.0)
    known, moved = masks(sparsifier), []
    for number in range(7):
        step(model, optimizer, seed=number)
        moved.append(not equal(masks(sparsifier), known))
        known = masks(sparsifier)
    assert moved == [False, False, True, False, False, True, False]


def test_the_first_steps_are_sparse():
    """DeiT sparse_ops.py:32,73 advances the counter before the test: the first l - 1 steps run
    with a mask of ones, that is dense."""
    model, optimizer, sparsifier = build("tsrste", refresh=10, dense_tail=0.0)
    for number in range(10):
        assert sparsifier.metrics()["density"] == 0.5
        assert (forward_weight(model.fc1) != 0).float().mean() <= 0.5
        if number == 0:
            assert equal(masks(sparsifier), {"fc1": transposable_mask(model.fc1.weight)})
        step(model, optimizer, seed=number)


@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_step_is_no_step(method):
    """v1 train.py:314 resets its counter although the loss scaler has skipped the step."""
    options = {"refresh": 2} if method == "tsrste" else {}
    model, optimizer, sparsifier = build(method, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step(model, optimizer)
    before, weight = masks(sparsifier), model.fc1.weight.detach().clone()
    for _ in range(3):
        scaler.scale(model(draw(8, 16)).sum() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert sparsifier.completed_steps == 1 and equal(masks(sparsifier), before)
    assert torch.equal(model.fc1.weight, weight)


@pytest.mark.parametrize("resumed_at", [29, 30, 31, 35])
def test_the_dense_tail_is_a_range(resumed_at):
    """v1 train.py:277,315 and progressive_gradient_flow :259 switch when step == s: a run resumed
    after that step is sparse for ever."""
    switch = 30
    published = any(number == switch for number in range(resumed_at + 1, STEPS))
    _, _, sparsifier = build("tsrste", dense_tail=0.25)
    state = {**sparsifier.state_dict(), "completed_steps": resumed_at}
    model, optimizer, resumed = build("tsrste", dense_tail=0.25)
    resumed.load_state_dict(state)
    dense = resumed.metrics()["density"] == 1
    assert dense == (resumed_at >= switch) == (not resumed.method.phase.training)
    if dense:
        assert not published, "the defect"
        torch.testing.assert_close(forward_weight(model.fc1), model.fc1.weight.detach())
    step(model, optimizer)
    assert resumed.metrics()["density"] == 1


@pytest.mark.parametrize("resumed_at", [9, 10, 17])
def test_a_window_that_begins_later_is_a_range(resumed_at):
    """progressive_gradient_flow :259 changes its stage at one exact epoch."""
    _, _, resumed = build("ste", window={"start": 0.25})
    resumed.load_state_dict({**resumed.state_dict(), "completed_steps": resumed_at})
    assert (
        resumed.method.phase.training == (resumed_at >= 10) == (resumed.metrics()["density"] == 0.5)
    )


def test_a_resumed_run_keeps_its_mask_and_its_place():
    """v1 sparse_ops.py:16-23: masks and counters are attributes of the weight, not of the
    checkpoint; a resumed run searches at once and restarts its phase of 40 steps."""
    model, optimizer, sparsifier = build("tsrste", refresh=4, dense_tail=0.0)
    for number in range(6):
        step(model, optimizer, seed=number)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
    rule = transposable_mask(model.fc1.weight)
    assert not torch.equal(rule, sparsifier.masks()["fc1"]), "a search now would change the mask"
    other, other_optimizer, resumed = build("tsrste", seed=5, refresh=4, dense_tail=0.0)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    for number in range(6, 12):
        assert equal(masks(resumed), masks(sparsifier))
        step(model, optimizer, seed=number)
        step(other, other_optimizer, seed=number)
    assert torch.equal(other.fc1.weight, model.fc1.weight)


class ThroughData(torch.optim.SGD):
    """Updates that autograd's version counter does not see, as those of fused optimisers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unseen", [False, True])
def test_projections_follow_the_weights(method, unseen):
    """The 1558M script comments the decay and the counter out: its compressed weights are never
    made again. Ours follow every optimiser step, with or without decay or refresh."""
    options = {"decay": 0.0} if method in ("srste", "tsrste", "bimask") else {}
    model, optimizer, sparsifier = build(method, **options)
    if unseen and method != "step":  # which brings its own optimiser
        sparsifier.detach()
        optimizer = ThroughData(model.parameters(), lr=0.5)
        sparsifier.attach(optimizer)
    seen = forward_weight(model.fc1.eval())
    model.train()
    for number in range(2):
        step(model, optimizer, seed=number)
        used = forward_weight(model.fc1.eval())
        model.train()
        assert not torch.equal(used, seen)
        mask, weight = sparsifier.masks()["fc1"], model.fc1.weight.detach()
        if method in ("ste", "srste", "tsrste", "step", "bimask"):
            torch.testing.assert_close(used, weight.masked_fill(~mask, 0), rtol=1e-5, atol=1e-6)
        seen = used


@pytest.mark.parametrize("method", METHODS)
def test_looking_changes_nothing(method):
    """Adaptive-Sparse-Trainer refreshes masks every ``output_flip_every`` steps: the logging
    interval is part of the method."""
    watched, unwatched = (build(method) for _ in range(2))
    for number in range(3):
        for model, optimizer, sparsifier in (watched, unwatched):
            step(model, optimizer, seed=number)
            if sparsifier is watched[2]:
                sparsifier.metrics(per_layer=True)
                sparsifier.masks()
    assert equal(masks(watched[2]), masks(unwatched[2]))
    for name, value in watched[0].state_dict().items():
        assert torch.equal(value, unwatched[0].state_dict()[name]), name
    assert watched[2].metrics() == unwatched[2].metrics()


@pytest.mark.parametrize(("model", "decay"), [("gpt2_774m", 6e-5), ("gpt2_1558m", 2e-4)])
def test_the_decay_that_ran_is_the_one_written_down(model, decay):
    """Folder names and README of 2by4-pretrain-acc-examples disagree about λ of 774M and 1558M.
    Here the value has one place, which the record and the identity of a run repeat."""
    plain = compose([f"model={model}", "sparsity=tsrste"])
    other = compose([f"model={model}", "sparsity=tsrste", "sparsity.decay=3e-4"])
    assert plain["sparsity"]["decay"] == decay and other["sparsity"]["decay"] == 3e-4
    assert identity(plain) != identity(other)
