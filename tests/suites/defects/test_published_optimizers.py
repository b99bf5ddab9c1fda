"""Defects of the published AdamW of STEP, adamw_step.py (docs/published_defects.md)."""

import pytest
import torch

import sparsepretrain as sp
from sparsepretrain.optim import StepAdamW
from sparsepretrain.optim.adamw import AdamWOptions
from support.defect_models import Net

pytestmark = pytest.mark.filterwarnings("ignore:StepAdamW switched")


def run(steps, gradient=1.0, **options):
    """(optimizer, changes of the weight): a constant gradient on four sparse coordinates."""
    w = torch.zeros(4, requires_grad=True)
    optimizer = StepAdamW([w], weight_decay=0.0, **{"lr": 1e-3, **options})
    optimizer.mark_sparse([w])
    changes = []
    for _ in range(steps):
        before = w.detach().clone()
        w.grad = gradient * torch.ones(4)
        optimizer.step()
        changes.append(float((w.detach() - before).abs().max()))
    return optimizer, changes


def test_the_frozen_variance_can_be_corrected():
    """adamw_step.py:145,211 freezes v without 1 - beta2^t: steps become longer."""
    switch = {"clipping": (None, 10), "eps": 1e-12}
    factor = (1 - 0.999**11) ** -0.5
    assert factor == pytest.approx(9.6, abs=0.05)
    _, published = run(14, **switch)
    _, corrected = run(14, frozen_bias_correction=True, **switch)
    assert published[12] / published[10] == pytest.approx(factor, rel=0.02)
    assert corrected[12] / corrected[10] == pytest.approx(1, rel=0.02)
    with pytest.warns(UserWarning, match=r"9\.56 times longer; see frozen_bias_correction"):
        run(11, clipping=(None, 10))


def test_coordinate_without_gradient_is_left_out_of_the_mean():
    """adamw_step.py:181, option 2: log 0 makes the geometric mean 0: the first step switches."""
    gradient = torch.tensor([0.0, 1.0, 1.0, 1.0])
    change = (1 - 0.999) * gradient**2
    assert change.log().mean().exp() == 0
    optimizer, _ = run(3, gradient, option=2)
    assert not optimizer.sparse_phase
    assert optimizer.window_mean == pytest.approx(float(change[1]), rel=2e-3)


def test_full_window_can_be_required():
    """The published test is on the mean of a window that may hold one value."""
    assert run(1, 1e-4)[0].switched_at == 1, "the authors' behavior, without clipping"
    options = {"betas": (0.9, 0.95), "require_full_window": True}
    assert run(30, 1e-4, **options)[0].switched_at == 20
    assert run(30, 1e-4, clipping=(12, None))[0].switched_at == 13


def test_the_method_never_switches_before_a_tenth_of_the_run():
    """The default clipping of ``sparsity=step`` is what the authors recommend: 10 % to 50 %."""
    model = Net()
    sparsifier = sp.sparsify(model, "step", targets="fc*", total_steps=40)
    groups = [{"params": list(model.parameters())}]
    options = AdamWOptions(name="adamw", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    optimizer = sparsifier.method.build_optimizer(groups, options)
    sparsifier.attach(optimizer)
    for _ in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-4)
        optimizer.step()
    assert optimizer.switched_at == 5


@pytest.mark.parametrize("denominator", ["sqrt_v_plus_eps34", "sqrt_of_v_plus_eps"])
def test_both_denominators_are_available(denominator):
    """adamw_step.py:145 divides by √v* + eps^¾, with the paper's √(v* + eps) commented out."""
    eps, gradient = 1e-4, 1e-3
    optimizer, changes = run(
        4, gradient, clipping=(None, 1), eps=eps, denominator=denominator, betas=(0.0, 0.5)
    )
    assert optimizer.switched_at == 1
    v = 0.5 * gradient**2
    expected = v**0.5 + eps**0.75 if denominator == "sqrt_v_plus_eps34" else (v + eps) ** 0.5
    assert changes[2] == pytest.approx(1e-3 * gradient / expected, rel=1e-4)


def test_weights_without_gradient_or_mark_can_be_stepped():
    """adamw_step.py: an empty concatenation, and no state to freeze at the switch."""
    plain = torch.zeros(4, requires_grad=True)
    optimizer = StepAdamW([plain])
    plain.grad = torch.ones(4)
    optimizer.step()
    assert not optimizer.sparse_phase
    seen, idle = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = StepAdamW([seen, idle], clipping=(None, 1), frozen_bias_correction=True)
    optimizer.mark_sparse([seen, idle])
    for number in range(3):
        seen.grad = torch.ones(4)
        idle.grad = torch.ones(4) if number == 2 else None
        optimizer.step()
    assert optimizer.switched_at == 2 and idle.isfinite().all() and (idle != 0).all()
