"""Layers of one model with different N:M patterns, and dense ones among the targets."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.optim import StepAdamW
from support.operands import at_most_n_of_m
from support.small_loops import (
    attached,
    eager_and_compiled,
    everything,
    gradients,
    said,
    through_disk,
    train,
)
from support.small_models import Blocks, ConvNet, Net, draw
from support.sparse_cases import CASES, CONVOLVED, ids, optimizer_for, sparsify

STEPS = 6
"""Length of the runs, so that all phases of the methods are in them."""


class Transposed(Net):
    """The same net with layers that are stored as (in, out)."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__(dtype, seed)
        for name in ("fc1", "fc2"):
            linear = getattr(self, name)
            layer = Conv1D(linear.out_features, linear.in_features).to(dtype)
            layer.weight.data = linear.weight.data.t().contiguous()
            setattr(self, name, layer)


class Experts(nn.Module):
    """Two banks of three experts, which all see every token."""

    has_gate = False

    def __init__(self, is_transposed, dtype):
        super().__init__()
        self.is_transposed = is_transposed
        shapes = [(3, 16, 32), (3, 32, 16)] if is_transposed else [(3, 32, 16), (3, 16, 32)]
        self.up = nn.Parameter(draw(*shapes[0], seed=1, dtype=dtype) / 4)
        self.down = nn.Parameter(draw(*shapes[1], seed=2, dtype=dtype) / 4)

    def forward(self, x):
        up, down = self.up, self.down
        if not self.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        return (torch.tanh(x.reshape(1, -1, 16).expand(3, -1, -1) @ up) @ down).sum(0).view(x.shape)


class BankNet(Net):
    is_transposed = False

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__(dtype, seed)
        del self.fc1, self.fc2
        self.fc = Experts(self.is_transposed, dtype)

    def body(self, x):
        return self.fc(x)


class TransposedBankNet(BankNet):
    is_transposed = True


def of_method(method, parameters):
    """The optimizer of a short run; STEP switches after two steps."""
    if method == "step":
        return StepAdamW(parameters, lr=1e-2, betas=(0.9, 0.99), clipping=(2, 2))
    return optimizer_for(method, parameters)


def mixed(method, options, net, patterns, targets=("fc*",), **more):
    model = net()
    options = {"total_steps": STEPS, **options, **more}
    handle = sparsify(model, method, targets=list(targets), patterns=patterns, **options)
    return model, attached(handle, of_method(method, model.parameters())), handle


def separate(method, options, net, layers):
    """The same layers, each made sparse by a call of its own, with an optimizer of its own."""
    model = net()
    handles = []
    for name, (n, m) in layers.items():
        own = {"total_steps": STEPS, **options, "n": n, "m": m}
        handles.append(sparsify(model, method, targets=[name], **own))
    optimizers = []
    rest = dict(model.named_parameters())
    for handle, name in zip(handles, layers, strict=True):
        own = {key: rest.pop(key) for key in [*rest] if key.startswith(name)}
        optimizers.append(attached(handle, of_method(method, [*own.values()])))
    optimizers.append(of_method(method, [*rest.values()]))
    return model, optimizers, handles


def compare(method, options, net, layers, patterns):
    """Train both for all steps; outputs, gradients, weights, masks and flips are equal."""
    one, optimizer, handle = mixed(method, options, net, patterns, tuple(layers))
    other, optimizers, handles = separate(method, options, net, layers)
    for step in range(STEPS):
        x, gy = one.example(step)
        outputs = []
        for model in (one, other):
            outputs.append(model(x))
            (outputs[-1] * gy).sum().backward()
        assert torch.equal(*outputs), step
        expected = gradients(other)
        for key, grad in gradients(one).items():
            assert torch.equal(grad, expected[key]), (step, key)
        for each in (optimizer, *optimizers):
            each.step()
            each.zero_grad()
        masks = {k: v for each in handles for k, v in each.masks().items()}
        for name, mask in handle.masks().items():
            assert torch.equal(mask, masks[name]), (step, name)
        numbers = [each.metrics(per_layer=True) for each in handles]
        for key, value in handle.metrics(per_layer=True).items():
            if key.startswith(("l1_gap/", "flip_rate/", "density/")):
                assert value == next(each[key] for each in numbers if key in each), (step, key)
    weights = other.state_dict()
    for key, value in one.state_dict().items():
        if not key.startswith(("sparsity_counters", "sparsity_method")):
            assert torch.equal(value, weights[key]), key
    one.eval()
    other.eval()
    assert torch.equal(one(x), other(x))
    return handle, handles


def other_pattern(method, options):
    """A pattern for the first layer, which the method has beside that of the second one."""
    n, m = options.get("n", 2), options.get("m", 4)
    return (1, 4) if (n, m) != (1, 4) else (2, 4)


WITH_PATTERNS = [case for case in CASES if case[1].get("mvue") != "weight"]  # that one is 2:4 only


@pytest.mark.parametrize(("method", "options"), WITH_PATTERNS, ids=ids(WITH_PATTERNS))
def test_each_layer_trains_as_it_does_alone_with_its_pattern(method, options):
    own = other_pattern(method, options)
    common = options.get("n", 2), options.get("m", 4)
    layers = {"fc1": own, "fc2": common}
    handle, handles = compare(method, options, Net, layers, {"fc1": "{}:{}".format(*own)})
    assert handle.patterns == {k: v for h in handles for k, v in h.patterns.items()}
    if handles[0].prove().sparse:
        assert handle.prove().holds is all(each.prove().holds for each in handles)
        assert handle.prove().zeros == sum(each.prove().zeros for each in handles)


SHORT = [case for case in CONVOLVED if len(case[1]) <= 1 and "mvue" not in case[1]]


@pytest.mark.parametrize(("method", "options"), SHORT, ids=ids(SHORT))
def test_convolutions_have_patterns_of_their_own(method, options):
    common = options.get("n", 2), options.get("m", 4)
    compare(method, options, ConvNet, {"fc1": common, "fc2": (2, 8)}, {"fc2": "2:8"})


@pytest.mark.parametrize("method", ["srste", "sste", "tsrste", "sdgp"])
def test_fp8_quantizes_the_operands_of_each_pattern(method):
    net = lambda: Net(torch.float32)  # noqa: E731
    layers = {"fc1": (1, 4), "fc2": (2, 4)}
    compare(method, {"precision": "fp8_sim"}, net, layers, {"fc1": "1:4"})


STORED = ["ste", "srste", "sste", "tsrste", "bimask", "slope", "asp", "ast", "step", "ternary"]


@pytest.mark.parametrize("method", STORED)
def test_transposed_layers_have_patterns_of_their_own(method):
    layers = {"fc1": (1, 4), "fc2": (2, 8)}
    compare(method, {}, Transposed, layers, {"fc1": "1:4", "fc2": "2:8"})


@pytest.mark.parametrize("net", [BankNet, TransposedBankNet])
@pytest.mark.parametrize("method", ["srste", "sste", "tsrste", "asp", "sdgp"])
def test_banks_have_patterns_of_their_own(method, net):
    compare(method, {}, net, {"fc.up": (2, 4), "fc.down": (1, 4)}, {"*.down": "1:4"})


def test_masks_are_learned_with_patterns_of_their_own():
    """Losses depend on all masks, so each layer is given the same difference."""
    one, optimizer, handle = mixed("maskpro", {}, Net, {"fc1": "1:4"})
    other, optimizers, handles = separate("maskpro", {}, Net, {"fc1": (1, 4), "fc2": (2, 4)})
    for each in handles:  # the second call has frozen the logits of the first one
        for layer in each.layers.values():
            layer.sparsity.logits.requires_grad_()
    for step in range(4):
        x, _ = one.example(step)
        with torch.no_grad():
            assert torch.equal(one(x), other(x)), step
        for each in (handle, *handles):
            each.follow_policy(torch.tensor(0.1 * (step + 1), dtype=torch.float64))
        for each in (optimizer, *optimizers[:2]):
            each.step()
            each.zero_grad()
        for name, layer in handle.layers.items():
            logits = other.get_submodule(name).sparsity.logits
            assert torch.equal(layer.sparsity.logits, logits), (step, name)
    with handle.first_masks():
        first = one.fc1(draw(4, 16)), one.fc2(draw(4, 32))
    kept = kernels.nm_mask(one.fc1.weight, 1, 4)
    assert torch.equal(
        first[0], nn.functional.linear(draw(4, 16), one.fc1.weight * kept, one.fc1.bias)
    )
    assert at_most_n_of_m(handle.masks()["fc1"], 1, 4)


def test_the_first_glob_decides_and_dense_layers_are_not_sparse():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Conv2d(8, 8, 1))
    patterns = {"2": "dense", "[01]": "1:4", "*": "2:8"}
    handle = sp.sparsify(model, "srste", targets="*", patterns=patterns)
    assert handle.patterns == {"0": (1, 4), "1": (1, 4), "3": (2, 8), "4": (2, 8)}
    assert type(model[2]) is nn.Linear and not list(model[2].children())
    coverage = handle.coverage()
    assert coverage.dense_by_pattern == ["2"] and coverage.title == "srste 1:4+2:8"
    assert [layer.pattern for layer in coverage.layers] == ["1:4", "1:4", "2:8", "2:8"]
    assert "dense by patterns: 2" in str(coverage) and "M∘W 1:4" in str(coverage)
    assert "srste 1:4" in repr(model[0]) and "srste 2:8" in repr(model[3])
    text = str(handle.prove())
    assert handle.prove().holds and "1:4 in 2 layers and 2:8 in 2 layers" in text


def test_a_wrong_layer_is_named_with_its_pattern():
    model = Net()
    handle = sparsify(model, "asp", at=0.0, patterns={"fc1": "1:4"})
    model.fc1.sparsity.mask.fill_(255)
    proof = handle.prove()
    assert proof.violations == ("fc1",) and "fc1 is not 1:4" in str(proof)
    with pytest.raises(ConfigError, match="'fc1' keeps more than 1 of 4"):
        model.load_state_dict(model.state_dict())


def test_one_pattern_for_all_layers_is_that_pattern():
    one = sparsify(Net(), "srste", patterns={"*": "1:4"})
    other = sparsify(Net(), "srste", n=1)
    assert repr(one) == repr(other) and one.state_dict() == other.state_dict()
    state = one._state.root.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in other._state.root.state_dict().items())


def test_without_patterns_nothing_is_stored_of_them():
    model = Net()
    handle = sparsify(model, "sste")
    assert bytes(model.sparsity_method.tolist()).rstrip(b"\0") == b"sste 2:4"
    assert handle.state_dict()["pattern"] == [2, 4] and handle.title == "sste 2:4"


@pytest.mark.parametrize("method", ["srste", "sste", "tsrste", "step", "slope", "cast", "sdgf"])
def test_resume_copies_and_pickles_are_bit_exact(method):
    patterns = {"fc1": "1:4", "fc2": "2:8"}
    options = {"total_steps": STEPS}
    model, optimizer, handle = mixed(method, options, Net, patterns)
    train(model, optimizer, 0, 3)
    saved = through_disk(everything(model, optimizer, handle))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied = of_method(method, twin.parameters())
    copied.load_state_dict(copy.deepcopy(saved[1]))
    sp.sparsifier_of(twin).attach(copied)
    later, others, again = mixed(method, options, Net, patterns)
    later.load_state_dict(saved[0])
    others.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    assert again.patterns == handle.patterns == sp.sparsifier_of(twin).patterns
    for each, steps in ((model, optimizer), (later, others), (twin, copied)):
        train(each, steps, 3, STEPS)
    for each in (later, twin):
        state = each.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    found = sp.sparsifier_of(twin)
    assert found.prove().holds is handle.prove().holds and found.title == handle.title


@pytest.mark.parametrize(
    "patterns", [{}, {"fc2": "1:4"}, {"fc1": "1:4", "fc2": "1:4"}, {"fc1": "1:8"}]
)
def test_state_of_other_patterns_is_refused(patterns):
    source = sparsify(Net(), "srste", patterns={"fc1": "1:4"})
    model = Net()
    handle = sparsify(model, "srste", patterns=patterns)
    with pytest.raises(ConfigError, match="patterns of the checkpoint"):
        model.load_state_dict(source._state.root.state_dict())
    with pytest.raises(CheckpointError, match=r"(method|pattern) is "):
        handle.load_state_dict(source.state_dict())


def test_many_patterns_have_a_name_that_tells_them_apart():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)))
    texts = {str(i): f"{i % 16 + 1}:32" for i in range(20)}
    handle = sp.sparsify(model, "srste", targets="*", patterns=texts)
    swapped = copy.deepcopy(model)
    model.load_state_dict(swapped.state_dict())
    other = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)))
    sp.sparsify(other, "srste", targets="*", patterns=texts | {"3": "5:32", "4": "4:32"})
    with pytest.raises(ConfigError, match="call sparsify with"):
        other.load_state_dict(model.state_dict())
    assert len(handle.methods) == 16


def test_densified_weights_have_the_pattern_of_each_layer():
    model, optimizer, _ = mixed("srste", {}, Net, {"fc1": "1:4", "fc2": "2:8"})
    train(model, optimizer, 0, 2)
    x = model.example(0)[0]
    expected = model.eval()(x)
    dense = sp.sparsifier_of(model).dense_state_dict()
    sp.densify(model)
    assert torch.equal(model(x), expected) and type(model.fc1) is nn.Linear
    assert at_most_n_of_m(model.fc1.weight, 1, 4) and at_most_n_of_m(model.fc2.weight, 2, 8)
    assert all(torch.equal(value, dense[key]) for key, value in model.state_dict().items())


def test_given_masks_follow_the_pattern_of_each_layer():
    model = Net()
    handle = sparsify(model, "asp", at=0.0, patterns={"fc1": "1:4"})
    masks = {"fc1": kernels.nm_mask(draw(32, 16), 1, 4), "fc2": kernels.nm_mask(draw(16, 32), 2, 4)}
    handle.keep_masks(masks)
    assert all(torch.equal(mask, masks[name]) for name, mask in handle.masks().items())
    with pytest.raises(ConfigError, match=r"more than 1 of 4 non-zeros: fc1"):
        handle.keep_masks({**masks, "fc1": kernels.nm_mask(draw(32, 16), 2, 4)})


def test_remarks_name_the_pattern_of_their_layers(recwarn):
    model = Net()
    with torch.no_grad():
        for layer in (model.fc1, model.fc2):
            layer.weight.masked_fill_(~kernels.nm_mask(layer.weight, 1, 4), 0.0)
    sparsify(model, "asp", at=0.0, patterns={"fc1": "1:4"})
    (text,) = [text for text in said(recwarn) if "sparser than" in text]
    assert "2:4" in text and "fc2" in text and "fc1" not in text


def test_adapters_are_left_out_of_all_layers():
    options = {"adapters": {"rank": 2, "start": 0.0}}
    model, optimizer, handle = mixed("slope", options, Net, {"fc1": "1:4"})
    train(model, optimizer, 0, 2)
    model.eval()
    x = model.example(0)[0]
    with handle.without_residual():
        pruned = model(x)
    with_adapters = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = sp.densify(copy.deepcopy(model), fold=False)(x)
        folded = sp.densify(copy.deepcopy(model))(x)
    assert torch.equal(pruned, without) and not torch.equal(pruned, with_adapters)
    torch.testing.assert_close(folded, with_adapters)


@pytest.mark.parametrize("method", ["srste", "bimask"])
def test_compiled_blocks_equal_eager_ones(method):
    def run(compile):
        model = Blocks(Net())
        patterns = {"*fc1": "1:4", "*fc2": "2:8"}
        handle = sparsify(model, method, targets=["*fc*"], patterns=patterns)
        optimizer = attached(handle, torch.optim.AdamW(model.parameters(), lr=1e-2))
        compile(model.block)
        for step in range(5):
            model(model.block.example(step)[0]).square().sum().backward()
            last = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return last, model.state_dict()

    eager, compiled, graphs = eager_and_compiled(run, "eager")
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-10)
    assert graphs == 1


def test_stored_operands_are_those_of_each_pattern():
    results = []
    for stores in (False, True):
        model, optimizer, handle = mixed("sste", {}, Net, {"fc1": "1:4"})
        if stores:
            handle.store_operands()
        train(model, optimizer, 0, 3)
        results.append(model.state_dict())
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


def test_a_part_of_the_layers_may_become_dense():
    model, optimizer, _ = mixed("srste", {}, Net, {"fc1": "1:4"})
    train(model, optimizer, 0, 2)
    sp.densify(nn.Sequential(model.fc1))
    rest = sp.sparsifier_of(model)
    assert rest.patterns == {"fc2": (2, 4)} and rest.prove().holds
    train(model, optimizer, 2, 4)
    assert rest.completed_steps == 4 and str(rest.prove()).startswith("2:4 in all")


@pytest.mark.parametrize(
    ("method", "options", "patterns", "message"),
    [
        ("srste", {}, {"fc3": "1:4"}, "patterns.fc3: no layer of the targets matches"),
        ("srste", {}, {"head": "1:4"}, "patterns.head: no layer"),
        ("srste", {}, {"fc*": "2:8", "fc1": "1:4"}, r"patterns.fc1: fc\* comes before"),
        ("srste", {}, {"fc1": "5:4"}, "patterns.fc1 must be N:M"),
        ("srste", {}, {"fc1": "0:4"}, "patterns.fc1 must be N:M"),
        ("srste", {}, {"fc1": "4"}, "patterns.fc1 must be N:M"),
        ("srste", {}, {"fc1": "2:4 "}, "patterns.fc1 must be N:M"),
        ("srste", {}, {"fc1": "Dense"}, "patterns.fc1 must be N:M"),
        ("srste", {}, {"fc1": 124}, "patterns.fc1 must be a string, got 124: write it in quotes"),
        ("srste", {}, {"*": "dense"}, "patterns: every selected layer is dense"),
        ("srste", {}, ["fc1"], "patterns must be a mapping"),
        ("srste", {}, {"fc1": "1:7"}, "patterns: layer 'fc1': in_features = 16 is not a multiple"),
        ("tsrste", {}, {"fc1": "1:64"}, "patterns: layer 'fc1'"),
        ("sste", {"mvue": "weight"}, {"fc1": "1:4"}, "patterns.fc1 = 1:4: mvue weight exists"),
        ("act24", {}, {"fc1": "2:8"}, "patterns.fc1 = 2:8: m must be 4"),
        ("sdgp", {}, {"fc1": "2:64"}, "patterns.fc1 = 2:64: m must be ≤ 32"),
    ],
)
def test_wrong_patterns_are_refused_and_leave_the_model_as_it_was(
    method, options, patterns, message
):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        sparsify(model, method, patterns=patterns, **options)
    assert type(model.fc1) is nn.Linear and model.state_dict().keys() == before.keys()
    sparsify(model, method, **options)


def test_all_wrong_patterns_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        sparsify(Net(), "srste", patterns={"a": "9:4", "b": "x", "fc1": "1:4"})
    assert len(caught.value.messages) == 2
    with pytest.raises(ConfigError) as caught:
        sparsify(Net(), "srste", patterns={"a": "1:4", "b": "2:4", "fc1": "1:4"})
    assert len(caught.value.messages) == 2
