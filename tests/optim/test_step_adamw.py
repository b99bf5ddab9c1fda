"""StepAdamW against the golden trajectories."""

import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import nm_mask
from sparsepretrain.optim import StepAdamW
from support import TESTS

pytestmark = pytest.mark.filterwarnings("ignore:StepAdamW switched")
GOLDEN = dict(np.load(TESTS / "golden" / "step_optimizer.npz"))
CASES = [k.removesuffix("_hp") for k in GOLDEN if k.endswith("_hp")]


def make(case):
    hp = [float(np.format_float_positional(v, unique=True)) for v in GOLDEN[f"{case}_hp"]]
    lr, beta1, beta2, eps, decay, low, high, option, window, _, amsgrad = hp
    w = torch.tensor(GOLDEN["W0"]).requires_grad_()
    b = torch.tensor(GOLDEN["b0"]).requires_grad_()
    optimizer = StepAdamW(
        [w, b],
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        option=int(option),
        clipping=(None if low < 0 else int(low), None if high < 0 else int(high)),
        window=int(window),
        amsgrad=bool(amsgrad),
    )
    optimizer.mark_sparse([w])
    return optimizer, w, b


def gradients(case, t, w, b, sparse):
    if case == "openloop":
        w.grad = torch.tensor(GOLDEN["openloop_gradW"][t])
        b.grad = torch.tensor(GOLDEN["openloop_gradb"][t])
        return
    x, y = torch.tensor(GOLDEN["X"]), torch.tensor(GOLDEN["Y"])
    used = w.detach() * nm_mask(w) if sparse else w.detach()
    used.requires_grad_()
    loss = (x @ used.t() + b - y).square().mean()
    w.grad, b.grad = torch.autograd.grad(loss, [used, b])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reload", [False, True])
def test_golden_trajectories_survive_reloading(case, reload):
    optimizer, w, b = make(case)
    for t in range(len(GOLDEN[f"{case}_W"])):
        gradients(case, t, w, b, optimizer.sparse_phase)
        measuring = not optimizer.sparse_phase
        optimizer.step()
        want = GOLDEN[f"{case}_Z"][t]
        assert measuring == (not np.isnan(want))
        if measuring:
            np.testing.assert_allclose(optimizer.changes[-1], want, rtol=1e-4)
            np.testing.assert_allclose(optimizer.window_mean, GOLDEN[f"{case}_avgZ"][t], rtol=1e-4)
        assert optimizer.sparse_phase == bool(GOLDEN[f"{case}_phase"][t]), t
        np.testing.assert_allclose(w.detach(), GOLDEN[f"{case}_W"][t], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(b.detach(), GOLDEN[f"{case}_b"][t], rtol=1e-3, atol=1e-5)
        if reload:
            state = copy.deepcopy(optimizer.state_dict())
            values = w.detach().clone(), b.detach().clone()
            optimizer, w, b = make(case)
            w.data.copy_(values[0]), b.data.copy_(values[1])
            optimizer.load_state_dict(state)
    end = optimizer.state[w]
    np.testing.assert_allclose(end["exp_avg"], GOLDEN[f"{case}_m_end"], rtol=1e-3, atol=1e-6)
    if optimizer.sparse_phase:
        frozen = end["max_exp_avg_sq" if optimizer.amsgrad else "exp_avg_sq"]
        np.testing.assert_allclose(frozen, GOLDEN[f"{case}_vstar"], rtol=1e-3)


def test_window_is_rounded_and_full_window_can_be_required():
    w = torch.ones(4, requires_grad=True)
    for beta2, length in ((0.999, 1000), (0.95, 20), (0.98, 50), (0.99, 100)):
        assert StepAdamW([w], betas=(0.9, beta2)).window == length
    optimizer = StepAdamW([w], eps=1.0, window=5, require_full_window=True)
    optimizer.mark_sparse([w])
    for _ in range(6):
        w.grad = torch.ones(4)
        optimizer.step()
    assert optimizer.switched_at == 5


@pytest.mark.parametrize(
    "options",
    [{"option": 3}, {"denominator": "x"}, {"clipping": (5, 2)}, {"window": 0}, {"eps": 0.0}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match="StepAdamW"):
        StepAdamW([torch.ones(2, requires_grad=True)], **options)


def test_mark_sparse_refuses_foreign_parameters_and_mixed_eps():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigError, match="not in the optimizer"):
        StepAdamW([a]).mark_sparse([b])
    with pytest.raises(ConfigError, match="share eps"):
        StepAdamW([{"params": [a]}, {"params": [b], "eps": 1e-3}]).mark_sparse([a, b])
    with pytest.raises(ValueError, match="its phase is missing"):
        StepAdamW([a]).load_state_dict(torch.optim.AdamW([a]).state_dict())


def noisy(count, shape=(48, 64), **options):
    """An optimizer of sparse weights, and one step's gradients of very different sizes."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draw).requires_grad_() for _ in range(count)]
    for w in weights:
        w.grad = torch.randn(shape, generator=draw) * 10 ** torch.randn(shape, generator=draw)
    optimizer = StepAdamW(weights, **options)
    optimizer.mark_sparse(weights)
    return optimizer, weights


@pytest.mark.parametrize("option, error", [(1, 1e-7), (2, 1e-6)])
def test_change_statistic_equals_fp64(option, error):
    optimizer, weights = noisy(9, (97, 131), option=option)
    for w in weights:
        w.grad[:7] = 0
    optimizer.step()
    changes = torch.cat([optimizer.state[w]["exp_avg_sq"].flatten() for w in weights]).double()
    moved = changes[changes > 0]
    want = changes.mean() if option == 1 else moved.log().mean().exp()
    assert optimizer.changes[-1] == pytest.approx(want.item(), rel=error)


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("switch", [100, 1])
def test_launches_do_not_grow_with_the_number_of_parameters(option, switch):
    """Ten times as many take as many operators, before the switch and after it."""
    counts = []
    for count in (2, 20):
        optimizer, _ = noisy(count, option=option, clipping=(switch, switch))
        for _ in range(3):
            optimizer.step()

        class Count(TorchDispatchMode):
            launches = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                views = ("flatten", "view", "slice", "detach", "alias", "_local_scalar_dense")
                self.launches += func._schema.name.removeprefix("aten::") not in views
                return func(*args, **(kwargs or {}))

        with Count() as counted:
            optimizer.step()
        counts.append(counted.launches)
        assert optimizer.sparse_phase == (switch == 1)
    assert counts[0] == counts[1] <= 30
