"""What every registered method must do, with every option variant."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.sparsity.engine.layers import SparseLayer
from sparsepretrain.sparsity.method import Method, typical_row
from sparsepretrain.sparsity.operand_table import Row
from support.operands import OperandTable, at_most_n_of_m, has_pattern, into_sparse_phase
from support.small_loops import accumulate, everything, gradients, recomputed, through_disk, train
from support.small_models import ConvNet, Net, draw
from support.sparse_cases import CASES, CONVOLVED, build, every_case, every_net, sparsify
from support.tiny_runs import assert_equal_bits


def test_the_registry_lists_the_methods():
    assert {"dense", "ste", "srste", "sste"} <= set(sp.list_methods())
    for name in sp.list_methods():
        cls = registry.get("method", name)
        if not cls.__module__.startswith("sparsepretrain."):
            continue  # a plugin that another test registered in this process
        assert issubclass(cls, Method) and cls.summary and cls.paper
        assert isinstance(typical_row(name, cls), Row)


@every_case
@pytest.mark.parametrize("shape", [(6,), (8,), (3, 5), (2, 6), (4, 2, 7)])
def test_gradient_rule_against_autograd_in_fp64(method, options, shape):
    """The layer equals the operand table written out with ordinary autograd."""
    model, _, sparsifier = build(method, options)
    into_sparse_phase(sparsifier)  # the rule of the sparse phase
    layer, plain = model.fc1, nn.functional.linear
    x, gy = draw(*shape, 16, seed=1), draw(*shape, 32, seed=2)
    t = OperandTable(layer, x, gy)
    expected = {}
    for name, x_, weight, g in (("x", x, t.B, t.P), ("w", t.Xw, t.A, t.U), ("b", x, t.A, gy)):
        leaves = [v.clone().requires_grad_() for v in (x_, weight, layer.bias.detach())]
        plain(*leaves).backward(g)
        expected[name] = dict(zip("xwb", leaves, strict=True))[name].grad
    inputs = x.clone().requires_grad_()
    y = layer(inputs)
    y.backward(gy)
    torch.testing.assert_close(inputs.grad, expected["x"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad, expected["w"] * t.scale, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, expected["b"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y, plain(t.Xf, t.A, layer.bias), rtol=1e-12, atol=1e-12)


@every_case
def test_expanded_and_strided_gradients_equal_contiguous_ones(method, options):
    """Loss 3·ΣY: a published layer replaces this gradient by ones."""
    model, _, sparsifier = build(method, options)
    layer = model.fc1
    results = []
    for kind in ("expanded", "contiguous", "strided"):
        layer.weight.grad = layer.bias.grad = None
        sparsifier.micro_batch(0)
        x = draw(16, 4, 8, seed=1).permute(2, 1, 0)  # (8, 4, 16), not contiguous
        x = x.contiguous() if kind == "contiguous" else x
        x = x.detach().requires_grad_()
        y = layer(x)
        if kind == "expanded":
            (3 * y.sum()).backward()
        elif kind == "contiguous":
            y.backward(torch.full_like(y, 3.0))
        else:
            y.backward(torch.full((32, 4, 8), 3.0, dtype=y.dtype).permute(2, 1, 0))
        results.append((x.grad, layer.weight.grad, layer.bias.grad))
        torch.testing.assert_close(layer.bias.grad, torch.full((32,), 96.0, dtype=y.dtype))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every_net
def test_pattern_holds_after_every_step(method, options, net):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32, net=net)
    for step in range(4):
        train(model, optimizer, step, step + 1)
        pattern, schedule = sparsifier.method.pattern, sparsifier.method.schedule
        assert sparsifier.completed_steps == step + 1
        for name, mask in sparsifier.masks().items():
            layer = sparsifier.layers[name]
            assert mask.dtype == torch.bool and mask.shape == layer.weight.shape
            assert at_most_n_of_m(mask, *pattern)
            forward = layer.operands.project(layer.weight).forward
            if forward is not None and has_pattern(sparsifier):
                assert at_most_n_of_m(forward, *pattern)
                assert not (forward.signbit() & (forward == 0)).any()
                assert not forward[~mask].any()
        metrics = sparsifier.metrics()
        assert ("flip_rate" in metrics) == schedule.compares_after(step + 1)
        assert 0 <= metrics.get("flip_rate", 0) <= 1 and 0 < metrics["density"] <= 1
        assert metrics["l1_gap"] >= 0


@every_net
def test_gradients_are_equal_for_every_micro_batch_size(method, options, net):
    for shape in [{"length": n} for n in (8, 5)] if net is Net else [{"batch": 8}]:
        results = []
        for micro in (8, 2, 1):
            model, optimizer, sparsifier = build(method, options, net=net)
            train(model, optimizer, 0, 2, micro=micro, **shape)
            accumulate(model, 5, micro=micro, **shape)
            results.append((gradients(model), sparsifier.masks(), model.state_dict()))
        for grads, masks, state in results[1:]:
            for key, expected in results[0][0].items():
                scale = expected.abs().max()
                assert (grads[key] - expected).abs().max() <= 1e-12 * scale, key
            assert all(torch.equal(masks[k], v) for k, v in results[0][1].items())
            torch.testing.assert_close(state, results[0][2], rtol=1e-9, atol=1e-10)


@every_net
def test_gradients_are_equal_for_every_world_size(method, options, net):
    model, _, sparsifier = build(method, options, net=net)
    x, gy = model.example(5, batch=8)
    (model(x) * gy).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    for world, micro in ((2, 2), (4, 2)):
        model.zero_grad()
        for rank in range(world):
            for index in range(8 // micro // world):
                sparsifier.micro_batch(index, rank, world)
                i = (index * world + rank) * micro
                (model(x[i : i + micro]) * gy[i : i + micro]).sum().backward()
        torch.testing.assert_close(gradients(model), expected, rtol=1e-11, atol=1e-12)


@every_net
def test_three_resumes_are_bit_exact(method, options, net):
    micro = 4 if net is Net else 2  # half a batch
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32, net=net)
    train(model, optimizer, 0, 8, micro=micro)
    straight = everything(model, optimizer, sparsifier)
    metrics = sparsifier.metrics(per_layer=True)
    state = None
    for part, (first, last) in enumerate([(0, 2), (2, 5), (5, 6), (6, 8)]):
        # another seed: a part that is not restored would show
        built = build(method, options, dtype=torch.float32, seed=part, net=net)
        model, optimizer, sparsifier = built
        if state is not None:
            for each, saved in zip(built, through_disk(state), strict=True):
                each.load_state_dict(saved)
            assert sparsifier.completed_steps == first
        train(model, optimizer, first, last, micro=micro)
        state = everything(model, optimizer, sparsifier)
    assert_equal_bits(state, straight)
    assert sparsifier.metrics(per_layer=True) == metrics


@pytest.mark.parametrize(
    ("method", "options", "net", "dtype"),
    [(*case, Net, torch.bfloat16) for case in CASES]
    + [(*case, ConvNet, torch.float32) for case in CONVOLVED],
)
def test_evaluation_is_invisible_to_training(method, options, net, dtype):
    twins = [build(method, options, dtype=torch.float32, net=net) for _ in range(2)]
    x, _ = twins[0][0].example(0, batch=4)
    autocast = functools.partial(torch.autocast, "cpu", dtype, enabled=dtype != torch.float32)

    def evaluate(model):
        model.eval()
        with autocast():
            with torch.inference_mode():
                model(x)
            with torch.no_grad():
                model(x[:1])
            model(x)
        model.train()
        with autocast(), torch.no_grad():
            model(x[:2])
        with autocast(), torch.inference_mode():
            model(x)

    evaluate(twins[1][0])  # before the first step, too
    for _ in range(3):
        for disturbed, (model, optimizer, sparsifier) in enumerate(twins):
            if disturbed:
                before = everything(model, optimizer, sparsifier)
                clock = sparsifier._state.clock
                reading = (clock.step, clock.micro, clock.tensor.tolist())
                evaluate(model)
                sparsifier.metrics(per_layer=True)
                sparsifier.masks()
                sparsifier.coverage()
                evaluate(model)
                assert (clock.step, clock.micro, clock.tensor.tolist()) == reading
                assert_equal_bits(everything(model, optimizer, sparsifier), before)
            with autocast():
                first = model(x[:2]).float().sum()
            first.backward()
            if disturbed:
                evaluate(model)
            with autocast():
                second = model(x[2:]).float().square().sum()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_bits(everything(*twins[0]), everything(*twins[1]))


@every_case
def test_state_dict_only_gains_sparsity_buffers(method, options):
    plain = Net().state_dict()
    model, _, sparsifier = build(method, options)
    extra = [k for k in model.state_dict() if k not in plain]
    own = set(sparsifier.layers["fc1"].sparsity.state_dict())
    expected = {f"{layer}.sparsity.{k}" for layer in ("fc1", "fc2") for k in own}
    assert set(extra) == expected | {"sparsity_counters", "sparsity_method"}
    for key in plain:
        assert model.state_dict()[key].shape == plain[key].shape
    assert model.load_state_dict(plain, strict=False).unexpected_keys == []
    assert isinstance(sparsifier.state_dict()["completed_steps"], int)


@every_net
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_bit_exact(method, options, net, reentrant):
    results = []
    for cls in (net, recomputed(net, reentrant)):
        model = cls()
        sparsify(model, method, **options)
        for step in range(2):
            x = model.example(step)[0].requires_grad_()
            model(x).square().sum().backward()
        results.append(gradients(model) | {"x": x.grad})
    assert_equal_bits(*results)


@every_net
def test_densify_is_exact(method, options, net):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32, net=net)
    clean = net(torch.float32)
    parameters = {
        name: dict(model.named_parameters())[name] for name, _ in clean.named_parameters()
    }
    train(model, optimizer, 0, 3)
    model.eval()
    x, _ = model.example(0)
    expected = model(x)
    projection = model.fc1.operands.project(model.fc1.weight)
    sparse = projection.forward is not None and has_pattern(sparsifier)
    assert sp.densify(model) is model
    assert type(model.fc1) is type(clean.fc1) and type(model.fc2) is type(clean.fc2)
    assert dict(model.named_parameters()) == parameters
    assert list(model.state_dict()) == list(clean.state_dict())
    assert torch.equal(model(x), expected)
    for module in model.modules():
        assert not isinstance(module, SparseLayer) and not hasattr(module, "sparsity")
        assert not module._forward_pre_hooks and not module._load_state_dict_post_hooks
        assert not module._buffers
    if sparse:
        for weight in (model.fc1.weight, model.fc2.weight):
            assert at_most_n_of_m(weight, *sparsifier.method.pattern)
            assert not (weight.signbit() & (weight == 0)).any()
    clean.load_state_dict(model.state_dict())
    assert torch.equal(clean(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 3, 5)  # the old hooks do nothing to a dense model
    for call in (sparsifier.metrics, sparsifier.masks, sparsifier.coverage):
        with pytest.raises(sp.sparsity.surgery.ConfigError, match="was densified"):
            call()
    again = sparsify(model, method, **options)
    assert list(again.layers) == ["fc1", "fc2"]


@every_net
def test_copies_are_independent_and_equal(method, options, net):
    model, optimizer, _ = build(method, options, net=net)
    train(model, optimizer, 0, 2)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in (model, *copies):
        accumulate(each, 2)
    for copied in copies:
        assert type(copied.fc1) is type(model.fc1)
        assert_equal_bits(gradients(copied), gradients(model))
        assert copied.fc1.sparse_model is copied.fc2.sparse_model
        assert sp.sparsifier_of(copied).completed_steps == 2
    frozen = copy.deepcopy([copied.state_dict() for copied in copies])
    optimizer.step()
    assert_equal_bits([copied.state_dict() for copied in copies], frozen)
    assert sp.sparsifier_of(model).completed_steps == 3


@every_case
def test_sparse_window_holds_in_fresh_and_resumed_runs(method, options):
    """Sparse iff start ≤ completed steps < stop; the same in a resumed run."""
    window = {"start": 0.1, "stop": 0.2}  # steps 4 to 7 of 40
    model, optimizer, sparsifier = build(method, options | {"window": window})
    plain = registry.get("method", "dense")
    for step in range(10):
        inside = 4 <= step < 8
        rule = sparsifier.method.mask(model.fc1.weight.detach(), 1)
        if not inside:
            assert not sparsifier.sparse and sparsifier.metrics()["density"] == 1
            x = draw(4, 16, seed=step)
            dense = nn.functional.linear(x, model.fc1.weight, model.fc1.bias)
            assert torch.equal(model.fc1(x), dense)
            assert torch.equal(sparsifier.masks()["fc1"], rule)
        elif step == 4:  # masks are those of the weights at the start, not of the initial ones
            assert torch.equal(sparsifier.masks()["fc1"], rule) or options.get("mask") == "random"
        elif type(sparsifier.method) is not plain:
            assert sparsifier.method.phase.training or method in ("step", "asp")
        x = draw(4, 8, 16, seed=step)
        model(x).square().sum().backward()
        before = model.fc1.weight.grad.clone()
        optimizer.step()
        if not inside:
            assert torch.equal(model.fc1.weight.grad, before), "no decay outside the window"
        optimizer.zero_grad()
        other = build(method, options | {"window": window}, seed=9)
        other[0].load_state_dict(model.state_dict())
        other[2].load_state_dict(sparsifier.state_dict())
        assert other[2].method.phase == sparsifier.method.phase
        assert torch.equal(other[0](x), model(x))
