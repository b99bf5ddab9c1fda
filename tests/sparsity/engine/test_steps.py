"""Riding on the optimizer: decay once, loss scales, closures, phases, metrics."""

import copy

import pytest
import torch
from torch import nn

from sparsepretrain import densify
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import unpack_rows, unpacked
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.methods.srste import SRSTE
from support.small_loops import attached, everything, gradients, said, train
from support.small_models import Net, draw
from support.sparse_cases import CASES, build, every_net, sparsify
from support.tiny_runs import assert_equal_bits


@pytest.mark.parametrize("micro", [1, 2, 8])
@pytest.mark.parametrize("decay_on", ["gradient", "weight"])
def test_decay_is_applied_once_per_step(micro, decay_on):
    lam, lr = 0.3, 0.1
    options = {"decay": lam, "decay_on": decay_on}
    model, optimizer, sparsifier = build("srste", options, cls=torch.optim.SGD, lr=lr)
    plain, other, _ = build("ste", cls=torch.optim.SGD, lr=lr)
    before = model.fc1.weight.detach().clone()
    mask = sparsifier.masks()["fc1"].clone()
    train(model, optimizer, 0, 1, micro=micro)
    train(plain, other, 0, 1, micro=micro)
    if decay_on == "gradient":
        expected = plain.fc1.weight - lr * lam * before.masked_fill(mask, 0)
    else:
        expected = plain.fc1.weight - lr * lam * plain.fc1.weight.masked_fill(mask, 0)
    torch.testing.assert_close(model.fc1.weight, expected, rtol=1e-12, atol=1e-14)


ADJUSTING = [
    ("srste", {"decay": 0.1}),
    ("srste", {"decay": 0.1, "decay_on": "weight"}),
    ("tsrste", {"decay": 0.1}),
    ("bimask", {"decay": 0.1}),
    ("asp", {"at": 0.0}),
    ("slope", {}),
]
"""Methods that change gradients or weights at a step."""


@pytest.mark.parametrize(("method", "options"), ADJUSTING)
def test_methods_adjust_under_the_packed_mask_as_under_the_bool_one(method, options, monkeypatch):
    """Nothing unpacks a mask that is stored in bits, and both give the same numbers."""
    seen, look = [], LayerOperands.mask

    def unpack(own, weight):
        return unpacked(look(own, weight), weight.shape)

    def run(unpacks):
        model, optimizer, sparsifier = build(method, options, dtype=torch.float32)
        sparsifier.store_operands(torch.float32)
        cls = type(sparsifier.method)
        with monkeypatch.context() as patch:
            for name, position in (("adjust_gradient_", 2), ("adjust_weight_", 1)):
                adjust = getattr(cls, name)
                if adjust is not getattr(Method, name):

                    def adjusted(*given, adjust=adjust, position=position):
                        seen.append(given[position + 1].dtype)
                        adjust(*given)

                    patch.setattr(cls, name, adjusted)
            if unpacks:
                patch.setattr(LayerOperands, "mask", unpack)
            train(model, optimizer, 0, 3)
        return model.state_dict()

    packed = run(False)
    assert seen == [torch.uint8] * 6, "layers × steps"
    assert_equal_bits(packed, run(True))
    assert seen[6:] == [torch.bool] * 6


@pytest.mark.parametrize("reads_packed", [False, True])
def test_a_method_sees_bool_masks_unless_it_reads_packed_ones(reads_packed, monkeypatch):
    seen = []
    monkeypatch.setattr(SRSTE, "reads_packed_masks", reads_packed)
    monkeypatch.setattr(SRSTE, "adjust_gradient_", lambda self, *given: seen.append(given[2]))
    model, optimizer, sparsifier = build("srste", {}, dtype=torch.float32)
    sparsifier.store_operands(torch.float32)
    train(model, optimizer, 0, 1)
    expected = [torch.uint8 if reads_packed else torch.bool] * len(sparsifier.layers)
    assert [mask.dtype for mask in seen] == expected
    if not reads_packed:
        assert seen[0].shape == model.fc1.weight.shape


def test_decay_is_excluded_from_clipping_and_norm():
    model, optimizer, _ = build("srste", {"decay": 10.0}, cls=torch.optim.SGD)
    plain, _, _ = build("ste", cls=torch.optim.SGD)
    x = draw(8, 16)
    norms = []
    for m in (model, plain):
        m(x).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(m.parameters(), 1e-3))
    assert torch.equal(*norms)
    mask = model.fc1.operands.project(model.fc1.weight).mask
    expected = plain.fc1.weight.grad + 10.0 * model.fc1.weight.detach().masked_fill(mask, 0)
    optimizer.step()
    torch.testing.assert_close(model.fc1.weight.grad, expected)


def scaled_run(method, options, scale, *, fused, unscale, cls=torch.optim.AdamW):
    settings = {"fused": fused} if method != "step" else {}
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32, cls=cls, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1, growth_interval=100)
    for step in range(3):
        for micro in range(2):
            x = draw(4, 8, 16, seed=10 * step + micro, dtype=torch.float32)
            scaler.scale(model(x).square().mean()).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return everything(model, optimizer, sparsifier), sparsifier.metrics()


# the published ε is absolute: tests/suites/defects, test_small_gradients_keep_their_norm
SCALE_FREE = [case for case in CASES if case != ("sdgp", {"epsilon": 1e-4})]


@pytest.mark.parametrize(("method", "options"), SCALE_FREE)
@pytest.mark.parametrize("unscale", [False, True])
def test_steps_do_not_depend_on_the_loss_scale(method, options, unscale):
    expected = scaled_run(method, options, 1, fused=False, unscale=unscale)
    for scale in (2.0**8, 2.0**16):
        found = scaled_run(method, options, scale, fused=False, unscale=unscale)
        assert_equal_bits(found, expected)


@pytest.mark.parametrize(
    ("scope", "shape", "same"),
    [
        ("group", (16,), True),
        ("channel", (16, 8), True),
        ("channel", (16,), False),  # a sample is a row: the sums go over those of a micro-batch
        ("tensor", (16, 8), False),
    ],
)
def test_sdgp_scopes_depend_on_micro_batches_as_documented(scope, shape, same):
    model, _, _ = build("sdgp", {"scope": scope})
    x, gy = draw(*shape, 16, seed=1), draw(*shape, 32, seed=2)

    def input_gradient(parts):
        pieces = []
        for part, grad in zip(x.chunk(parts), gy.chunk(parts), strict=True):
            part = part.clone().requires_grad_()
            pieces += torch.autograd.grad(model.fc1(part), part, grad)
        return torch.cat(pieces)

    error = (input_gradient(4) - input_gradient(1)).norm() / input_gradient(1).norm()
    assert (float(error) < 1e-12) == same and float(error) < 0.4


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("decay_on", ["gradient", "weight"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_unscale_the_decay_too(unscale, decay_on, cls):
    options = {"decay": 0.5, "decay_on": decay_on}
    expected = scaled_run("srste", options, 1, fused=True, unscale=unscale, cls=cls)
    for scale in (2.0**8, 2.0**16):
        found = scaled_run("srste", options, scale, fused=True, unscale=unscale, cls=cls)
        torch.testing.assert_close(found[0][0], expected[0][0], rtol=1e-6, atol=1e-7)
        assert found[1] == pytest.approx(expected[1])


# StepAdamW has no fused form
FUSED_OR_NOT = [(*case, fused) for case in CASES for fused in (False, True) if case[0] != "step"]
FUSED_OR_NOT.append(("step", {}, False))


@pytest.mark.parametrize(("method", "options", "fused"), FUSED_OR_NOT)
def test_overflow_is_not_counted_as_a_step(method, options, fused):
    settings = {"fused": True} if fused else {}
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    x = draw(4, 8, 16, dtype=torch.float32)

    def step(factor):
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(1)
    before, metrics = copy.deepcopy(model.state_dict()), sparsifier.metrics()
    step(torch.inf)
    assert sparsifier.completed_steps == 1 and sparsifier.metrics() == metrics
    assert_equal_bits(model.state_dict(), before)
    step(1)
    assert sparsifier.completed_steps == 2
    assert not torch.equal(model.fc1.weight, before["fc1.weight"])


def test_named_micro_batches_draw_the_same_after_a_skipped_step():
    """The draws after an overflow are those of a run without it: no hook saw the skipped step."""
    results = []
    for overflow in (False, True):
        model, optimizer, sparsifier = build("sste", dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for poison in [True, False] if overflow else [False]:
            for micro in range(3):
                sparsifier.micro_batch(micro)
                x = draw(4, 8, 16, seed=micro, dtype=torch.float32)
                loss = model(x).square().mean()
                scaler.scale(loss * (torch.inf if poison else 1)).backward()
                assert sparsifier._state.clock.micro == micro
            last = gradients(model)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert sparsifier.completed_steps == 1
        results.append({k: g / scale for k, g in last.items()})
    torch.testing.assert_close(results[1], results[0])


def test_forwards_before_the_first_backward_are_counted():
    model, _, sparsifier = build("sste")
    losses = []
    for micro in range(3):
        losses.append(model(draw(4, 8, 16, seed=micro)).square().sum())
        assert sparsifier._state.clock.micro == micro
    sum(losses).backward()


@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize("decay_on", ["gradient", "weight"])
def test_closures_equal_plain_steps(style, decay_on):
    options = {"decay": 0.3, "decay_on": decay_on}
    twins = [build("srste", options, cls=torch.optim.SGD, lr=0.1) for _ in range(2)]
    for closed, (model, optimizer, _) in enumerate(twins):
        for step in range(3):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = model(draw(8, 16, seed=step)).square().sum()
                loss.backward()
                return loss

            if not closed:
                closure()
                optimizer.step()
            elif style == "keyword":
                assert optimizer.step(closure=closure).requires_grad
            else:
                assert optimizer.step(closure).requires_grad
    assert_equal_bits(twins[0][0].state_dict(), twins[1][0].state_dict())
    assert twins[0][2].metrics() == twins[1][2].metrics()


def test_lbfgs_converges():
    """It moves the weights between the calls of its closure."""
    losses: list[list[float]] = [[], []]
    for seen, stored in zip(losses, (False, True), strict=True):
        model, optimizer, sparsifier = build("srste", cls=torch.optim.LBFGS, lr=0.5)
        if stored:
            sparsifier.store_operands()

        def closure(model=model, optimizer=optimizer, seen=seen):
            optimizer.zero_grad()
            loss = (model(draw(16, 16)) - 1).square().mean()
            loss.backward()
            seen.append(float(loss.detach()))
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert sparsifier.completed_steps == 3 and seen[-1] < 0.5 * seen[0]
        assert all((m.view(-1, 4).sum(1) == 2).all() for m in sparsifier.masks().values())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("update", ["init", "step"])
def test_scale_is_frozen_or_follows_every_step(update):
    model, optimizer, sparsifier = build("sste", {"beta_update": update})
    layer = model.fc1
    initial = layer.sparsity.beta.clone()
    train(model, optimizer, 0, 3)
    soft = sparsifier.method._soft(layer.weight.detach(), 1)
    current = (layer.weight * soft).sum() / (soft * soft).sum()
    assert torch.equal(layer.sparsity.beta, initial) == (update == "init")
    if update == "step":
        torch.testing.assert_close(layer.sparsity.beta.double(), current.detach())
    forward = layer.operands.project(layer.weight).forward
    torch.testing.assert_close(forward, soft * layer.sparsity.beta)


def test_weight_sampling_draws_once_per_step():
    model, optimizer, _ = build("sste", {"mvue": "weight"})
    layer = model.fc1

    def backward_weight():
        x = torch.zeros(32, 16, dtype=torch.float64, requires_grad=True)
        layer(x).backward(torch.eye(32, dtype=torch.float64))
        return x.grad

    first = backward_weight()
    assert ((first.view(8, 4, 16) != 0).sum(1) <= 2).all(), "2:4 along out_features"
    assert torch.equal(backward_weight(), first)
    forward = layer.operands.project(layer.weight).forward
    few = (forward.view(8, 4, 16) != 0).sum(1, keepdim=True) <= 2
    kept = few.expand(8, 4, 16).reshape(32, 16)
    assert torch.equal(first[kept], forward[kept])
    assert not torch.equal(first, forward)
    total, draws = torch.zeros_like(forward), 600
    for step in range(draws):
        layer.sparse_model.set_step(step)
        total += layer.operands.project(layer.weight).backward
    spread = 2 * forward.abs().max()
    assert ((total / draws - forward).abs() < 5 * spread / draws**0.5).all()
    train(model, optimizer, 0, 1)
    assert not torch.equal(backward_weight() != 0, first != 0)


CHANGES = {
    "call": lambda sparsifier, state: sparsifier.layers["fc1"].operands.number_call(),
    "step": lambda sparsifier, state: sparsifier._state.set_step(1),
    "micro-batch": lambda sparsifier, state: sparsifier.micro_batch(1),
    "layer": lambda sparsifier, state: setattr(state, "_index", 1),
    "seed": lambda sparsifier, state: setattr(state.clock, "seed", 4),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_noise_differs_by_step_micro_batch_layer_and_seed(change):
    model, _, sparsifier = build("sste")

    def wgrad():
        model.fc1.weight.grad = None
        model.fc1(draw(8, 16, seed=1)).backward(draw(8, 32, seed=2))
        return model.fc1.weight.grad

    sparsifier.micro_batch(0)
    first = wgrad()
    sparsifier.micro_batch(0)
    assert torch.equal(wgrad(), first)
    sparsifier.micro_batch(0)
    change(sparsifier, model.fc1.sparsity)
    assert not torch.equal(wgrad(), first)


@every_net
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_fp32_gradients_and_masters(method, options, net, dtype):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32, net=net)
    for step in range(3):
        x, _ = model.example(step)
        with torch.autocast("cpu", dtype=dtype):
            assert model.fc1(x).dtype == dtype
            loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
    assert model.fc1.weight.dtype == torch.float32
    projection = model.fc1.operands.project(model.fc1.weight)
    if projection.forward is not None:  # pruned in fp32, cast last
        assert projection.forward.dtype == torch.float32
        model.eval()  # in every phase the products that evaluation runs
        with torch.autocast("cpu", dtype=dtype):
            rows = model.fc1.operands.get(model.fc1.weight, dtype, False)[1].A.data
        assert torch.equal(rows, projection.forward.to(dtype))
    sparsifier.metrics()


@pytest.mark.filterwarnings("ignore:masked decay changes only")
@pytest.mark.parametrize("method", ["ste", "srste", "sste"])
def test_bfloat16_weights_train(method):
    model, optimizer, sparsifier = build(method, dtype=torch.bfloat16)
    train(model, optimizer, 0, 2)
    assert model.fc1.weight.dtype == torch.bfloat16
    assert all((m.view(-1, 4).sum(1) <= 2).all() for m in sparsifier.masks().values())
    assert sparsifier.metrics()["flip_rate"] >= 0


def test_decay_on_weights_uses_the_group_learning_rate():
    model = Net()
    sparsifier = sparsify(model, "srste", decay=1.0, decay_on="weight")
    groups = [
        {"params": [model.fc1.weight], "lr": 0.5},
        {"params": [model.fc2.weight], "lr": torch.tensor(0.25)},
    ]
    optimizer = attached(sparsifier, torch.optim.SGD(groups, lr=0.0))
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the groups
    before = {k: v.weight.detach().clone() for k, v in sparsifier.layers.items()}
    masks = {k: v.clone() for k, v in sparsifier.masks().items()}
    optimizer.param_groups[0]["lr"] = 0.125
    for layer in sparsifier.layers.values():
        layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    for (name, layer), lr in zip(sparsifier.layers.items(), (0.125, 0.25), strict=True):
        expected = before[name] * (1 - lr * ~masks[name])
        torch.testing.assert_close(layer.weight.detach(), expected)


def test_parameters_without_gradient_do_not_change():
    model, optimizer, sparsifier = build("srste", cls=torch.optim.SGD)
    before = model.fc1.weight.detach().clone()
    model.head(draw(2, 16)).sum().backward()
    optimizer.step()
    assert model.fc1.weight.grad is None and torch.equal(model.fc1.weight, before)
    assert sparsifier.completed_steps == 1


def test_bias_gradients_are_summed_in_fp32():
    model = Net(torch.float32)
    sparsify(model, "ste")
    x = torch.zeros(1001, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.fc1(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(model.fc1.bias.grad, torch.full((32,), 1001.0)), "1001 is no bfloat16"


@pytest.mark.parametrize("attach_first", [False, True])
def test_the_flip_baseline_survives_a_resume(attach_first):
    model, optimizer, sparsifier = build("ste", cls=torch.optim.SGD, lr=0.1)
    train(model, optimizer, 0, 2)
    saved = everything(model, optimizer, sparsifier)
    with torch.no_grad():
        saved[0]["fc1.weight"].copy_(saved[0]["fc1.weight"].flip(1))  # as if masks rested since
    resumed = Net(seed=4)
    handle = sparsify(resumed, "ste")
    other = torch.optim.SGD(resumed.parameters(), lr=0.0)
    if attach_first:
        handle.attach(other)
    resumed.load_state_dict(saved[0])
    handle.load_state_dict(saved[2])
    if not attach_first:
        handle.attach(other)
    other.step()
    flips = (sparsifier.masks()["fc1"] != handle.masks()["fc1"]).sum()
    assert flips > 0 and handle.metrics()["flip_rate"] == float(flips) / (2 * 16 * 32)


@pytest.mark.parametrize(("method", "needed"), [("ste", False), ("sste", False), ("srste", True)])
def test_masks_are_stored_only_where_decay_needs_them(method, needed):
    model, optimizer, sparsifier = build(method)
    sparsifier.store_operands()
    train(model, optimizer, 0, 2)
    own = model.fc1.operands
    assert (own._kept_mask is not None) == needed and "flip_rate" in sparsifier.metrics()
    assert torch.equal(sparsifier.masks()["fc1"], own.project(model.fc1.weight).mask)


def test_bad_operand_dtypes_and_shapes_are_refused():
    model, _, sparsifier = build("ste")
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        sparsifier.store_operands(torch.int64)
    with pytest.raises(ConfigError, match="no shape for fc2"):
        sparsifier.choose_matmuls({"fc1": (2, 16), "nope": (2, 16)})
    densify(model)
    with pytest.raises(ConfigError, match="densified"):
        sparsifier.refresh()


def compared_mask(layer):
    """The mask of the last comparison."""
    return unpack_rows(layer.sparsity.previous_mask, layer.weight.shape)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dense", {}),
        ("dense", {"flip_rule": "transposable"}),
        ("sdgp", {}),
        ("sste", {"window": {"start": 0.5}}),
        ("ste", {"window": {"start": 0.5}}),
    ],
)
def test_dense_layers_are_compared_by_the_masks_of_the_rule(method, options, monkeypatch):
    model, optimizer, sparsifier = build(method, options)
    looks, look = [], LayerOperands.mask
    monkeypatch.setattr(
        LayerOperands, "mask", lambda own, weight: looks.append(own) or look(own, weight)
    )
    for step in range(3):
        before = [compared_mask(layer) for layer in (model.fc1, model.fc2)]
        train(model, optimizer, step, step + 1)
        for index, (layer, old) in enumerate(zip((model.fc1, model.fc2), before, strict=True)):
            mask = sparsifier.method.mask(layer.weight, 1)
            assert torch.equal(compared_mask(layer), mask)
            assert sparsifier.flips[index] == (mask ^ old).sum()
    assert len(looks) == 6, "a projection is made once"


@pytest.mark.parametrize(
    ("dtype", "decay", "told"),
    [(torch.bfloat16, 6e-6, 1), (torch.bfloat16, 1.0, 0), (torch.float32, 6e-6, 0)],
    ids=["lost", "large enough", "fp32"],
)
def test_decay_lost_to_rounding_warns_once(dtype, decay, told, recwarn):
    """λW is added to G: beside a gradient of its usual size bf16 has no bits for it."""
    model, optimizer, _ = build("srste", {"decay": decay}, dtype=dtype)
    train(model, optimizer, 0, 4)
    lines = [line for line in said(recwarn) if "masked decay changes only" in line]
    assert len(lines) == told and all("bfloat16" in line for line in lines)


class Negates(torch.optim.Optimizer):
    """Has the switch as an attribute only, as optimizers of pytorch_optimizer."""

    def __init__(self, params, lr, maximize):
        super().__init__(params, {"lr": lr})
        self.maximize = maximize

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=group["lr"] * (1 if self.maximize else -1))


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
MAXIMIZING = [
    (SGD, {}),
    (SGD, {"fused": True}),
    (ADAMW, {}),
    (ADAMW, {"fused": True}),
    (Negates, {}),
]


@pytest.mark.parametrize(("cls", "more"), MAXIMIZING)
@pytest.mark.parametrize(("method", "options"), ADJUSTING)
def test_maximizing_the_negated_loss_is_minimizing(method, options, cls, more):
    ends = []
    for maximize in (False, True):
        words = {"lr": 0.01, "maximize": maximize, **more}
        model, optimizer, _ = build(method, options, cls=cls, **words)
        for step in range(3):
            x, gy = model.example(step)
            loss = (model(x) * gy).sum()
            (-loss if maximize else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: p.detach() for name, p in model.named_parameters()})
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
