"""The optimizers of AST and CAST against the papers' equations, written out in NumPy."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.optim import AdamS, ASTAdamW
from support.small_models import Net, draw
from support.sparse_cases import optimizer_for, sparsify

STEPS = 50
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def magnitude_mask(weight, n, m):
    """The ``n`` largest of every ``m`` inputs; no two are equal here."""
    groups = np.abs(weight).reshape(len(weight), -1, m)
    order = np.argsort(groups, axis=-1)
    mask = np.zeros(groups.shape, bool)
    np.put_along_axis(mask, order[..., -n:], True, -1)
    return mask.reshape(weight.shape)


class Oracle:
    """A tensor and its moments in double precision; ``u`` is the direction of the paper.

    None: AdamW, whose second moment is that of the gradient.
    """

    def __init__(self, weight, u=None):
        self.weight, self.u = weight.copy(), u
        self.m, self.v = np.zeros_like(weight), np.zeros_like(weight)
        self.steps = 0

    def step(self, grad, mask):
        beta1, beta2 = SETTINGS["betas"]
        self.m = beta1 * self.m + (1 - beta1) * grad
        u = self.u(self.m, self.weight, mask, self.steps) if self.u else self.m
        self.v = beta2 * self.v + (1 - beta2) * (u if self.u else grad) ** 2
        self.steps += 1
        first = u / (1 - beta1**self.steps)
        second = np.sqrt(self.v / (1 - beta2**self.steps)) + SETTINGS["eps"]
        self.weight *= 1 - SETTINGS["lr"] * SETTINGS["weight_decay"]
        self.weight -= SETTINGS["lr"] * first / second


def ast_direction(m, weight, mask, t):
    decay = 0.3 * min(1, t / 20)  # decay_ramp of 0.4 of 50 steps
    return m + decay * np.where(mask, 0, weight)


def cast_direction(m, weight, mask, t):
    alpha = t / STEPS
    return np.where(mask, m, (1 - alpha) * m + alpha * 0.2 * np.sign(weight))


@pytest.mark.parametrize(
    ("method", "options", "direction"),
    [
        ("ast", {"decay": 0.3, "decay_ramp": 0.4}, ast_direction),
        ("cast", {"decay": 0.2}, cast_direction),
    ],
)
@pytest.mark.parametrize("pattern", [(2, 4), (1, 8)])
def test_fifty_steps_equal_the_equations(method, options, direction, pattern):
    """Gradients are those of the layer; masks are renewed before steps 0, 10, 20, …"""
    n, m = pattern
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8)).double()
    sparsifier = sparsify(model, method, targets="0", total_steps=STEPS, n=n, m=m, **options)
    kind = {"ast": ASTAdamW, "cast": AdamS}[method]
    optimizer = kind(model.parameters(), **SETTINGS)
    sparsifier.attach(optimizer)
    oracle = Oracle(model[0].weight.detach().numpy(), direction)
    beside = {
        name: Oracle(parameter.detach().numpy())
        for name, parameter in model.named_parameters()
        if name != "0.weight"
    }
    mask = None
    for step in range(STEPS):
        if step % 10 == 0:
            mask = magnitude_mask(oracle.weight, n, m)
        assert np.array_equal(sparsifier.masks()["0"].numpy(), mask), step
        (model(draw(12, 16, seed=step)) - draw(12, 8, seed=99)).square().mean().backward()
        grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        oracle.step(grads["0.weight"], mask)
        for name, other in beside.items():
            other.step(grads[name], None)
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[model[0].weight]
        for found, expected in (
            (model[0].weight, oracle.weight),
            (state["exp_avg"], oracle.m),
            (state["exp_avg_sq"], oracle.v),
        ):
            np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-11, atol=1e-14)
        for name, other in beside.items():
            found = dict(model.named_parameters())[name].detach().numpy()
            np.testing.assert_allclose(found, other.weight, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", [ASTAdamW, AdamS])
def test_without_masks_it_is_the_adamw_of_torch(kind):
    results = []
    for cls, more in ((torch.optim.AdamW, {"foreach": True}), (kind, {})):
        model = Net(torch.float32)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = cls(groups, lr=1e-2, betas=(0.9, 0.95), **more)
        for step in range(4):
            model(draw(4, 16, seed=step, dtype=torch.float32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((copy.deepcopy(model.state_dict()), optimizer.state_dict()["state"]))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("method", "kind"), [("ast", ASTAdamW), ("cast", AdamS)])
def test_weights_below_fp32_are_refused(method, kind):
    for dtype in (torch.bfloat16, torch.float16):
        model = Net(dtype)
        sparsifier = sparsify(model, method)
        with pytest.raises(ConfigError, match="fp32 weights, got"):
            sparsifier.attach(kind(model.parameters()))
        assert sparsifier.optimizer is None


@pytest.mark.parametrize(("method", "name"), [("ast", "ASTAdamW"), ("cast", "AdamS")])
def test_another_optimizer_is_refused(method, name):
    model = Net()
    sparsifier = sparsify(model, method)
    with pytest.raises(ConfigError, match=f"sparsepretrain.optim.{name}"):
        sparsifier.attach(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("kind", [ASTAdamW, AdamS])
@pytest.mark.parametrize(
    "wrong", [{"lr": -1}, {"eps": 0}, {"weight_decay": -1}, {"betas": (1.0, 0.9)}]
)
def test_values_out_of_range_are_refused(kind, wrong):
    with pytest.raises(ConfigError, match=kind.__name__):
        kind([nn.Parameter(torch.zeros(1))], **wrong)


@pytest.mark.parametrize("method", ["ast", "cast"])
def test_a_step_that_only_creates_state_changes_nothing(method):
    """torch.distributed.checkpoint takes one, with zero gradients and learning rate 0."""
    model = Net()
    sparsifier = sparsify(model, method)
    optimizer = optimizer_for(method, model.parameters())
    sparsifier.attach(optimizer)
    before = copy.deepcopy(model.state_dict())
    get_optimizer_state_dict(model, optimizer)
    assert sparsifier.completed_steps == 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for state in optimizer.state.values():
        assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


@pytest.mark.parametrize("method", ["ast", "cast"])
def test_a_closure_gets_the_masks_of_the_step(method):
    results = []
    for with_closure in (False, True):
        model = Net()
        sparsifier = sparsify(model, method, decay=0.3)
        optimizer = optimizer_for(method, model.parameters())
        sparsifier.attach(optimizer)
        for step in range(5):

            def closure(step=step, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(draw(4, 16, seed=step)).square().sum()
                loss.backward()
                return loss

            if with_closure:
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.step()
        results.append(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["ast", "cast"])
def test_frozen_sparse_weights_need_no_other_optimizer(method):
    """Such as under adapters."""
    model = Net()
    sparsifier = sparsify(model, method)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("fc"))
    sparsifier.attach(torch.optim.SGD(model.head.parameters(), lr=0.1))


def test_frozen_layers_keep_their_weights():
    for method in ("ast", "cast"):
        model = Net()
        model.fc1.weight.requires_grad_(False)
        sparsifier = sparsify(model, method, decay=0.3, total_steps=4, refresh=1)
        optimizer = optimizer_for(method, [p for p in model.parameters() if p.requires_grad])
        sparsifier.attach(optimizer)
        before = model.fc1.weight.clone()
        for step in range(4):
            model(draw(4, 16, seed=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.fc1.weight, before) and sparsifier.prove().holds
        sp.densify(model)
        assert ((model.fc1.weight != 0).view(-1, 4).sum(1) <= 2).all()
