"""Defects of published phases, refreshes, caches and settings (docs/published_defects.md)."""

import pytest
import torch

from sparsepretrain.config import compose
from sparsepretrain.config.freeze import identity
from support.defect_models import METHODS, STEPS, build, forward_weight, step


@pytest.mark.parametrize("resumed_at", [29, 30, 31, 35])
def test_dense_tail_holds_after_any_resume(resumed_at):
    """v1 train.py:277,315 and progressive_gradient_flow :259 switch only when step == s."""
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


class ThroughData(torch.optim.SGD):
    """Updates that autograd's version counter does not see, as those of fused optimizers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unseen", [False, True])
def test_projections_follow_the_weights(method, unseen):
    """The 1558M script comments the counter out: its compressed weights are never made again."""
    options = {"decay": 0.0} if method in ("srste", "tsrste", "bimask") else {}
    model, optimizer, sparsifier = build(method, **options)
    if unseen and method != "step":  # which brings its own optimizer
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


@pytest.mark.parametrize(("model", "decay"), [("gpt2_774m", 6e-5), ("gpt2_1558m", 2e-4)])
def test_decay_of_a_model_is_in_its_identity(model, decay):
    """Folder names and README of 2by4-pretrain-acc-examples disagree about λ of 774M and 1558M."""
    plain = compose([f"model={model}", "sparsity=tsrste"])
    other = compose([f"model={model}", "sparsity=tsrste", "sparsity.decay=3e-4"])
    assert plain["sparsity"]["decay"] == decay and other["sparsity"]["decay"] == 3e-4
    assert identity(plain) != identity(other)
