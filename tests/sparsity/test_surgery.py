"""Swapping layers: names, roles, refusals, copies."""

import copy
import pickle
import subprocess
import sys
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.errors import CheckpointError, ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import nm_mask
from sparsepretrain.sparsity.engine.layer_classes import sparse_class
from sparsepretrain.sparsity.engine.layers import SparseLayer
from support.small_loops import accumulate, attached, train
from support.small_models import ConvNet, Net, draw
from support.sparse_cases import build, sparsify
from support.tiny_runs import assert_equal_bits


class Shared(nn.Module):
    """One module under two names, and a container under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.block = nn.Sequential(nn.Linear(8, 8))
        self.alias = self.block

    def forward(self, x):
        return self.alias(self.second(self.block(self.first(x))))


class Experts(nn.Module):
    """Experts as transformers keeps them: one parameter for all of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 32))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.mlp.experts = Experts()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(16, 32))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.mlp.table = Table()


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class Named(nn.Linear):
    """A subclass that keeps the forward."""


class NamedConvolution(nn.Conv2d):
    """A subclass that keeps the forward."""


def tied():
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    model[1].weight = model[0].weight
    return model


def tied_data():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight.data = model[0].weight.data
    return model


def transposed():
    """An autoencoder whose decoder is the transposed encoder."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model[2].weight = nn.Parameter(model[0].weight.data.t())
    return model


def twice():
    model = Net()
    sparsify(model, "ste")
    return model


def convolutions(*widths, **options):
    return nn.Sequential(*[nn.Conv2d(i, o, 1, **options) for i, o in pairwise(widths)])


ALL = {"targets": "*"}
WEIGHT = {"targets": "*", "mvue": "weight"}
FP8, REFERENCE = {"name": "fp8_sim"}, {"name": "fp8", "recipe": "reference"}
ATTENTION = nn.Sequential(nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
REFUSALS = {
    "no match": (Net, "ste", {"targets": ["mlp.*"]}, "targets: .*'mlp."),
    "near": (Net, "ste", {"targets": ["fc3"]}, "did you mean 'fc"),
    "one of two": (Net, "ste", {"targets": ["fc1", "nope*"]}, "matches 'nope.'"),
    "no linear": (Net, "ste", {"targets": []}, "targets"),
    "not a layer": (nn.Sequential(nn.Tanh()), "ste", ALL, "no linear layer"),
    "twice": (twice, "srste", {}, "'fc1' is sparse already: call densify"),
    "bare": (nn.Linear(8, 8), "ste", ALL, "bare layer"),
    "tied data": (tied_data, "ste", {"targets": "2"}, "shares its weight .0.weight, 2.weight."),
    "transposed": (transposed, "ste", {"targets": "2"}, "shares its weight .0.weight, 2.weight."),
    "tied": (tied, "ste", {"targets": "1"}, "shares its weight .0.weight, 1.weight."),
    "own forward": (nn.Sequential(OwnForward(8, 8)), "ste", ALL, "'0' .OwnForward. has a forward"),
    "lazy": (nn.Sequential(nn.LazyLinear(8)), "ste", ALL, "no shape yet"),
    "width": (nn.Sequential(nn.Linear(10, 8)), "ste", ALL, "in_features = 10"),
    "wide group": (Net, "ste", {"n": 16, "m": 64}, "fc1.: in_features = 16 .* of 64"),
    "weight width": (nn.Sequential(nn.Linear(8, 6)), "sste", WEIGHT, "out_features = 6 "),
    "weight pattern": (Net, "sste", {"mvue": "weight", "m": 8}, "2:4 only"),
    "n": (Net, "ste", {"n": 5}, "1 ≤ n ≤ m"),
    "n zero": (Net, "ste", {"n": 0}, "1 ≤ n ≤ m"),
    "m": (Net, "ste", {"m": 0}, "must be ≥ 1"),
    "gamma nan": (Net, "sste", {"gamma": float("nan")}, "gamma"),
    "decay nan": (Net, "srste", {"decay": float("nan")}, "decay"),
    "choice": (Net, "sste", {"mvue": "grad"}, "mvue"),
    "type": (Net, "srste", {"decay": "large"}, "decay"),
    "window": (Net, "ste", {"window": {"start": 0.5, "stop": 0.4}}, "start.*stop"),
    "window key": (Net, "ste", {"window": {"begin": 0.5}}, "begin"),
    "method": (Net, "srst", {}, "unknown method 'srst' .did you mean 'srste'"),
    "option": (Net, "sste", {"gama": 0.1}, "gama.*did you mean.*gamma"),
    "foreign option": (Net, "ste", {"decay": 0.1}, "decay"),
    "total": (Net, "ste", {"window": {"start": 0.1}, "total_steps": None}, "needs total_steps"),
    "total of until": (Net, "mdgf", {"total_steps": None}, "until .*total_steps"),
    "late window": (Net, "ste", {"window": {"start": 0.999}}, "window.start: sparse from step 40"),
    "total zero": (Net, "ste", {"total_steps": 0}, "total_steps must be an integer ≥ 1"),
    "total type": (Net, "ste", {"total_steps": "9"}, "total_steps must be an integer .* got '9'"),
    "total float": (Net, "ste", {"total_steps": 9.0}, "total_steps must be an integer .* got 9.0"),
    "targets type": (Net, "ste", {"targets": 3}, "targets must be .* got 3"),
    "targets null": (Net, "ste", {"targets": None}, "targets must be .* got None"),
    "targets items": (Net, "ste", {"targets": ["fc1", 2]}, "targets must be a glob .*'fc1', 2"),
    "method type": (Net, 3, {}, "method must be a name"),
    "pattern type": (Net, "ste", {"n": "2"}, "n must be an integer, got '2'"),
    "seed": (Net, "ste", {"seed": -1}, "seed must be"),
    "seed type": (Net, "ste", {"seed": 1.5}, "seed must be"),
    "backend": (
        Net,
        "ste",
        {"sparse_matmuls": "foo"},
        "sparse_matmuls must be 'emulate' .* got 'foo'",
    ),
    "backend null": (
        Net,
        "ste",
        {"sparse_matmuls": None},
        "sparse_matmuls must be 'emulate' .* got None",
    ),
    "kernels": (
        Net,
        "ste",
        {"sparse_matmuls": "triton"},
        "is a backend of single kernels",
    ),
    "precision": (Net, "ste", {"precision": "int8"}, "precision .* got 'int8'"),
    "precision type": (Net, "ste", {"precision": 8}, "precision .* got 8"),
    "precision name": (Net, "ste", {"precision": {"name": ["fp8"]}}, "precision .* got {'name'"),
    "no precision name": (Net, "ste", {"precision": {"recipe": "hybrid"}}, "key 'precision.name'"),
    "recipe": (Net, "ste", {"precision": FP8 | {"recipe": "foo"}}, "one of hybrid, reference"),
    "fp8 recipe": (Net, "ste", {"precision": REFERENCE}, "recipe must be one of hybrid, e4m3"),
    "recip": (Net, "ste", {"precision": FP8 | {"recip": "hybrid"}}, "precision.recip. .did you me"),
    "table": (Mixed, "ste", {"targets": "*.table.*"}, r"table.mix \(16, 32\) of Table"),
    "attention": (ATTENTION, "ste", {"targets": ["0", "1"]}, r"1\.in_proj_weight \(48, 16\) of Mu"),
    "projection": (nn.Sequential(nn.MultiheadAttention(8, 2)), "ste", ALL, r"out_proj.*bypassed"),
    **{
        name: (nn.Sequential(wrap(nn.Linear(16, 16))), "srste", ALL, "'0' computes its weight")
        for name, wrap in (
            ("old spectral norm", nn.utils.spectral_norm),
            ("spectral norm", parametrizations.spectral_norm),
            ("weight norm", parametrizations.weight_norm),
        )
    },
    "stem": (convolutions(3, 8), "ste", ALL, "layer '0': in_channels = 3 "),
    "depthwise": (convolutions(8, 8, groups=8), "ste", ALL, "in_channels / groups = 1 "),
    "outputs": (convolutions(8, 6), "tsrste", ALL, "out_channels = 6 "),
    "group": (convolutions(8, 8, groups=4), "sdgp", ALL, "out_channels / groups = 2 "),
    "mixing": (convolutions(8, 8, groups=2), "bimask", ALL, "bimask"),
    "own convolution": (
        nn.Sequential(OwnConvolution(8, 8, 1)),
        "ste",
        ALL,
        "a forward that is not",
    ),
    "lazy convolution": (nn.Sequential(nn.LazyConv2d(8, 1)), "ste", ALL, "no shape yet"),
    "bare convolution": (nn.Conv2d(8, 8, 1), "ste", ALL, "the model is a bare layer"),
    "1-d": (nn.Sequential(nn.Conv1d(8, 8, 1)), "ste", ALL, "of Conv1d, which cannot be"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_leave_the_model_unchanged(case):
    model, method, options, words = REFUSALS[case]
    model = model if isinstance(model, nn.Module) else model()
    before = [(name, type(m), dict(m._buffers)) for name, m in model.named_modules()]
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(ConfigError, match=words) as caught:
        sparsify(model, method, **options)
    assert all(message and "\n" not in message for message in caught.value.messages)
    assert [(name, type(m), dict(m._buffers)) for name, m in model.named_modules()] == before
    assert len(model._forward_pre_hooks) == hooks


@pytest.mark.parametrize(
    ("model", "targets", "problems"),
    [
        (nn.ModuleDict({"a": nn.Linear(10, 4), "b": nn.Linear(9, 4)}), "*", ["= 10", "= 9"]),
        (nn.ModuleDict({"c": nn.Linear(8, 4)}), ["x*", "y*"], ["'x", "'y"]),
        (
            convolutions(6, 6, 10, 6, 6, 6, 6),
            "*",
            ["'0', '1', '3' and 2 more: in_channels = 6", "layer '2': in_channels = 10"],
        ),
    ],
    ids=["widths", "globs", "equal widths"],
)
def test_all_problems_are_reported_together(model, targets, problems):
    with pytest.raises(ConfigError) as caught:
        sp.sparsify(model, "ste", targets=targets)
    assert len(caught.value.messages) == len(problems)
    assert all(problem in str(caught.value) for problem in problems)


@pytest.mark.parametrize("model", [None, {}, torch.ones(2), [nn.Linear(4, 4)], nn.Linear])
def test_only_modules_can_be_sparse(model):
    with pytest.raises(ConfigError, match="model must be a torch"):
        sp.sparsify(model, "ste", targets="*")


def test_repr_names_method_layers_and_step():
    model, optimizer, sparsifier = build("srste", {"n": 1, "m": 8})
    train(model, optimizer, 0, 2)
    assert repr(sparsifier) == "Sparsifier(srste 1:8, 2 layers, step 2)"
    sp.densify(model)
    assert repr(sparsifier) == "Sparsifier(srste 1:8, 2 layers, step 2, densified)"


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (None, "needs a torch optimizer, got NoneType"),
        (Net(), "needs a torch optimizer, got Net"),
        (torch.optim.SGD(Net().parameters(), lr=1.0), "missing in the optimizer: fc1, fc2"),
    ],
)
def test_attach_refuses_wrong_optimizers(optimizer, words):
    sparsifier = sparsify(Net(), "ste")
    with pytest.raises(ConfigError, match=words):
        sparsifier.attach(optimizer)


def test_another_optimizer_is_refused_and_detach_allows_it():
    model, optimizer, sparsifier = build("ste")
    with pytest.raises(ConfigError, match=r"attached to another \w+: call detach\(\)"):
        sparsifier.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    sparsifier.detach()
    train(model, optimizer, 0, 1)
    assert sparsifier.completed_steps == 0
    sparsifier.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    sparsifier.detach()
    with pytest.raises(ConfigError, match=r"optimizer: fc2$"):
        sparsifier.attach(torch.optim.SGD([model.fc1.weight], lr=0.1))


def test_state_of_another_run_is_refused():
    _, _, sparsifier = build("ste")
    good = sparsifier.state_dict()
    for bad in ({"method": "srste"}, {"pattern": [1, 4]}, {"layers": ["fc1"]}):
        with pytest.raises(CheckpointError, match=next(iter(bad))):
            sparsifier.load_state_dict(good | bad)
    with pytest.raises(CheckpointError):
        sparsifier.load_state_dict({})
    sparsifier.load_state_dict(good)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("slope", 2, 4), ("slope", 1, 4)),
        (("ste", 2, 4), ("ste", 4, 8)),
        (("ste", 2, 4), ("srste", 2, 4)),
        (("tsrste", 2, 4), ("asp", 2, 4)),
        (("sste", 2, 4), ("dense", 2, 4)),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_the_state_dict_of_another_method_or_pattern_is_refused(saved, loaded, strict):
    state, model = (build(name, {"n": n, "m": m})[0] for name, n, m in (saved, loaded))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        state.fc1.weight.add_(1.0)
    names = (n if n == "dense" else f"{n} {k}:{m}" for n, k, m in (saved, loaded))
    with pytest.raises(
        ConfigError, match="of a model with {}, this one has {}: call".format(*names)
    ):
        model.load_state_dict(state.state_dict(), strict=strict)
    assert_equal_bits(model.state_dict(), before)


def test_the_state_dict_of_a_method_with_a_long_name_is_its_own(monkeypatch):
    name = "a_method_of_one_owner_ä_" + "x" * 60
    monkeypatch.setitem(registry._registered["method"], name, registry.get("method", "ste"))
    model, other = (build(name, {})[0] for _ in range(2))
    model.load_state_dict(other.state_dict())


def test_module_under_two_names_is_replaced_once():
    for target, layers in (("second", ["first"]), ("alias.0", ["block.0"]), ("f*", ["first"])):
        model = Shared()
        sparsifier = sp.sparsify(model, "srste", targets=target)
        assert list(sparsifier.layers) == layers
    model = Shared()
    weight = model.first.weight
    sparsifier = sp.sparsify(model, "srste", targets="*")
    assert list(sparsifier.layers) == ["first", "block.0"]
    assert model.second is model.first and type(model.second) is sparse_class(nn.Linear)
    assert model.first.weight is weight
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 8)).sum().backward()
    gradient, mask = weight.grad.clone(), sparsifier.masks()["first"]
    expected = gradient + 2e-4 * weight.detach().masked_fill(mask, 0)
    optimizer.step()
    torch.testing.assert_close(weight.grad, expected)
    sp.densify(model)
    assert type(model.second) is nn.Linear and model.second is model.first


def test_globs_select_layers():
    blocks = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})})
    model = nn.ModuleDict({"mlp": nn.Linear(8, 8), "h": nn.ModuleList([blocks])})
    for targets, names in (
        ("*.mlp.*", ["h.0.mlp.up", "h.0.mlp.down"]),
        ("*.mlp", ["mlp"]),
        (["*.up", "h.?.mlp.down"], ["h.0.mlp.up", "h.0.mlp.down"]),
        ("*", ["mlp", "h.0.mlp.up", "h.0.mlp.down"]),
        ("h.[0-3].mlp.up", ["h.0.mlp.up"]),
    ):
        trial = copy.deepcopy(model)
        assert list(sp.sparsify(trial, "ste", targets=targets).layers) == names


def test_parameters_hooks_and_optimizers_survive():
    model = Net()
    calls = []
    model.fc1.register_forward_hook(lambda *_: calls.append(1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # built before
    sparsifier = sparsify(model, "sste")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(map(torch.equal, parameters, Net().parameters())), "not initialized again"
    sparsifier.attach(optimizer)
    train(model, optimizer, 0, 1)
    assert calls == [1]
    assert isinstance(model.fc1, nn.Linear) and "sste 2:4" in repr(model)


def test_subclasses_with_equal_names_are_kept_apart():
    """Two classes called alike, as re-running a notebook cell makes them."""
    classes = [type("Named", (nn.Linear,), {}) for _ in range(2)] + [Named]
    for cls in classes:
        model = nn.Sequential(cls(8, 8))
        sp.sparsify(model, "ste", targets="*")
        assert model[0].replaces is cls and isinstance(model[0], cls)
        sp.densify(model)
        assert type(model[0]) is cls


@pytest.mark.parametrize("cls", [nn.Linear, Named, nn.Conv2d, NamedConvolution])
def test_pickled_and_copied_layers_compute_the_same(cls):
    linear = issubclass(cls, nn.Linear)
    layers = [cls(8, 8) if linear else cls(8, 8, 3, padding=1) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    sp.sparsify(model, "sste", targets="*", seed=4)
    x = draw(*((8, 8) if linear else (1, 8, 4, 4)), dtype=torch.float32)
    expected = model(x)
    for copied in (pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert torch.equal(copied(x), expected)
        assert isinstance(copied[0], SparseLayer) and type(copied[0]) is type(model[0])
    assert isinstance(model[0], cls) and "sste 2:4" in repr(model[0])
    expected = pickle.loads(pickle.dumps(model)).eval()(x)
    assert type(sp.densify(model)[0]) is cls and torch.equal(model(x), expected)


def test_pickle_loads_in_a_fresh_process(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    sp.sparsify(model, "sste", targets="*")
    torch.save(model, tmp_path / "model.pt")
    x = torch.arange(8.0)
    code = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False); "
        "print(type(m[0]).__name__, m(torch.arange(8.0)).sum().item())"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert out == ["SparseLinear", str(model(x).sum().item())]


def test_scale_stays_fp32_in_low_precision():
    model, _, _ = build("sste", dtype=torch.float32)
    beta = model.fc1.sparsity.beta.clone()
    for convert in (model.bfloat16, model.half, model.cpu):
        convert()
        assert model.fc1.sparsity.beta.dtype == torch.float32
        assert torch.equal(model.fc1.sparsity.beta, beta)
    model.double()
    assert model.fc1.sparsity.beta.dtype == torch.float32
    assert model.to("meta").fc1.sparsity.beta.is_meta


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        *((Net, shape) for shape in [(16,), (0, 16), (3, 0, 16), (2, 3, 4, 16)]),
        (ConvNet, (0, 16, 5, 6)),
    ],
)
@pytest.mark.parametrize("method", ["ste", "sste", "sdgp"])
def test_empty_and_odd_batches_have_finite_gradients(method, net, shape):
    model, _, _ = build(method, net=net)
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == net()(x).shape and x.grad.shape == x.shape
    for gradient in (model.fc1.weight.grad, model.fc1.bias.grad):
        assert gradient.isfinite().all() and (x.numel() or not gradient.any())


@pytest.mark.parametrize("net", [Net, ConvNet])
@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_frozen_tensors_get_no_gradient(frozen, net):
    model, _, _ = build("sste", net=net)
    layer = model.fc1
    x = model.example(0)[0].requires_grad_(frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).requires_grad_(False)
    layer(x).sum().backward()
    grads = {"input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert [k for k, g in grads.items() if g is None] == [frozen]


def test_coverage_counts_and_prints():
    _, _, sparsifier = build("sste")
    coverage = sparsifier.coverage()
    assert coverage.sparse_parameters == 2 * 16 * 32
    assert coverage.total_parameters == 16 * 32 * 2 + 32 + 16 * 5 + 5
    assert coverage.dense_linears == ["head"]
    assert coverage.row.sparse == ["fprop", "wgrad"]
    table = str(coverage)
    assert "fc1    32 × 16" in table and "2:4" in table


def test_cached_operands_are_not_pickled():
    model, _, sparsifier = build("sste", dtype=torch.float32)
    before = len(pickle.dumps(model))
    sparsifier.store_operands()
    model(draw(4, 16, dtype=torch.float32))
    assert model.fc1.operands._kept
    assert abs(len(pickle.dumps(model)) - before) < 64
    assert copy.deepcopy(model).fc1.operands._kept == {}


def test_a_matching_weight_that_cannot_be_sparse_is_an_error():
    with pytest.raises(ConfigError) as caught:
        sp.sparsify(Mixed(), "ste", targets=["mlp.*"])
    (text,) = caught.value.messages
    assert "mlp.table.mix (16, 32) of Table" in text and "exclude=['*.table']" in text
    assert "supported: nn.Linear" in text
    sparsifier = sp.sparsify(Mixed(), "ste", targets=["mlp.*"], exclude=["*.table"])
    assert list(sparsifier.layers) == ["mlp.0"]


def test_weights_that_stay_dense_warn_and_are_counted():
    model = Routed()
    with pytest.warns(sp.errors.SparsePretrainWarning, match=r"mlp\.experts\.up \(4, 16, 32\)"):
        sparsifier = sp.sparsify(model, "ste", targets=["*"])
    coverage = sparsifier.coverage()
    assert coverage.other_weights == {"mlp.experts.up": (4, 16, 32)}
    assert coverage.embeddings == {"embedding": (8, 16)}
    text = str(coverage)
    assert "2,048 entries: mlp.experts.up (4, 16, 32)" in text and "embeddings: 128 entries" in text
    assert str(sparsifier.prove()).endswith("have 11.1% of the weights outside embeddings")


def test_densify_after_a_dense_tail_warns():
    model, optimizer, _ = build("tsrste", {"dense_tail": 0.95})
    train(model, optimizer, 0, 4)
    with pytest.warns(sp.errors.SparsePretrainWarning, match="tsrste evaluates dense weights"):
        sp.densify(model)
    assert (model.fc1.weight != 0).all()


def test_a_part_can_be_densified():
    model, optimizer, _ = build("srste")
    expected = model.eval()(draw(4, 16))
    sp.densify(model.fc2)
    assert torch.equal(model(draw(4, 16)), expected) and type(model.fc2) is nn.Linear
    remaining = sp.sparsifier_of(model)
    assert [*remaining.layers] == ["fc1"]
    remaining.attach(optimizer)  # it is already
    train(model.train(), optimizer, 0, 1)
    assert remaining.completed_steps == 1


@pytest.mark.parametrize("part", ["fc1", "fc2"])
def test_other_layers_train_on_after_a_part_was_densified(part):
    settings = {"cls": torch.optim.SGD, "lr": 0.1}
    model, optimizer, handle = build("srste", {"decay": 0.1}, **settings)
    train(model, optimizer, 0, 2)
    sp.densify(getattr(model, part))
    (rest,) = {"fc1", "fc2"} - {part}
    remaining = sp.sparsifier_of(model)
    assert [*remaining.layers] == [rest] and remaining.optimizer is optimizer
    layer = getattr(model, rest)
    for step in range(2, 4):
        accumulate(model, step)
        weight, grad = layer.weight.detach().clone(), layer.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        decayed = grad + 0.1 * ~nm_mask(weight) * weight
        torch.testing.assert_close(layer.weight.detach(), weight - 0.1 * decayed)
    assert remaining.completed_steps == 4
    with pytest.raises(ConfigError, match="was densified"):
        handle.metrics()
    sp.densify(model)
    assert remaining.optimizer is None
    train(model, optimizer, 4, 5)


def test_other_layers_train_on_with_the_optimizers_of_before():
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    handle = sp.sparsify(model, "slope", targets=["*"], total_steps=4, adapters={"rank": 2})
    adapters = [p for name, p in model.named_parameters() if "sparsity" in name]
    weights = [p for name, p in model.named_parameters() if "sparsity" not in name]
    first, second = torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(adapters, lr=0.1)
    handle.attach(first, second)
    sp.densify(model["a"])
    assert sp.sparsifier_of(model).optimizer is first
    model["b"](torch.ones(2, 16)).sum().backward()
    first.step()
    assert sp.sparsifier_of(model).completed_steps == 1


def test_nested_tensors_in_training_are_refused():
    model, _, _ = build("srste", dtype=torch.float32)
    x = torch.nested.nested_tensor([torch.ones(3, 16), torch.ones(5, 16)])
    with pytest.raises(ConfigError, match="enable_nested_tensor=False"):
        model.fc1(x)


@pytest.mark.parametrize("method", ["ste", "sste"])
def test_encoder_with_padding_evaluates_on_nested_tensors(method):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    sp.sparsify(encoder, method, targets=["*.linear*"])
    x, padding = draw(2, 5, 16, dtype=torch.float32), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
        expected = sp.densify(encoder)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding])


def test_importing_the_library_does_not_import_the_compiler():
    code = (
        "import sparsepretrain as sp, sys; sp.sparsify; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Bank(nn.Module):
    """Weights of all blocks in one Parameter of the root (modded-nanogpt)."""

    def __init__(self, *shapes):
        super().__init__()
        for index, shape in enumerate(shapes):
            setattr(self, f"bank{index}", nn.Parameter(torch.randn(shape)))
        self.head = nn.Linear(16, 8)


BANKS = {(3, 2, 64, 32): True, (64, 32): True, (1, 1, 64): False, (64,): False}


@pytest.mark.parametrize(("shape", "warned"), BANKS.items())
def test_weights_of_the_root_that_stay_dense_are_named(shape, warned):
    model = Bank(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sp.sparsify(model, "ste", targets=["*"])
    texts = [str(w.message) for w in caught]
    assert any("stay dense" in text and "bank0" in text for text in texts) == warned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.sparsify(Bank(shape), "ste", targets=["head"])


def test_views_of_one_buffer_share_nothing():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    flat = torch.randn(2 * 16 * 32)
    model[0].weight.data, model[2].weight.data = flat[:512].view(32, 16), flat[512:].view(16, 32)
    handle = sparsify(model, "ste", targets=["*"])
    assert len(handle.layers) == 2
    fused = torch.randn(48, 16)
    parts = {"columns": fused.t().chunk(3, dim=1), "rows": [fused[i::3] for i in range(3)]}
    for views in parts.values():
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in views))
        for layer, view in zip(model, views, strict=True):
            layer.weight = nn.Parameter(view)
        assert len(sparsify(model, "ste", targets=["*"]).layers) == 3
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].weight, model[1].weight = nn.Parameter(fused[:16]), nn.Parameter(fused[15:31])
    with pytest.raises(ConfigError, match="shares its weight"):
        sparsify(model, "ste", targets=["*"])
    with torch.device("meta"):
        sparsify(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), "ste", targets=["*"])


@pytest.mark.parametrize("when", ["before attach", "after attach", "without training"])
@pytest.mark.parametrize("how", ["Parameter", "data"])
def test_weights_that_are_tied_after_sparsify_are_refused(when, how):
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    handle = sparsify(model, "ste", targets=["*"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "after attach":
        handle.attach(optimizer)
    if how == "Parameter":
        model[1].weight = model[0].weight
    else:
        model[1].weight.data = model[0].weight.data
    told = r"layer '1' shares its weight since sparsify \(0.weight, 1.weight\)"
    if when == "without training":
        with pytest.raises(ConfigError, match=told):
            sp.densify(model)
        return
    model(torch.arange(8)).square().mean().backward()
    with pytest.raises(ConfigError, match=told):
        if when == "before attach":
            handle.attach(optimizer)
        optimizer.step()


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
)
def test_weights_of_other_types_are_refused(dtype):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    values = torch.zeros(16, 16).to(dtype)
    model[1].weight = nn.Parameter(values, requires_grad=False)
    with pytest.raises(ConfigError, match=r"'1' has a weight of \w+, expected real floating-point"):
        sp.sparsify(model, "ste", targets=["*"])
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", ["layer[0]", "a*b", "what?", "[!x]"])
def test_names_with_wildcards_match_themselves(name):
    model = nn.ModuleDict({name: nn.Linear(16, 16), "other": nn.Linear(16, 16)})
    assert list(sp.sparsify(model, "ste", targets=[name, "other"], exclude=["other"]).layers) == [
        name
    ]


@pytest.mark.parametrize("linear", [True, False])
def test_layers_are_called_with_the_keyword_of_torch(linear):
    layer = nn.Linear(8, 8) if linear else nn.Conv2d(8, 8, 1)
    model = nn.Sequential(layer)
    sp.sparsify(model, "ste", targets=["*"])
    x = draw(*((8, 8) if linear else (1, 8, 4, 4)), dtype=torch.float32)
    assert torch.equal(layer(input=x), layer(x))


def test_a_compiled_model_is_refused_and_stays_as_it_was():
    compiled = torch.compile(Net(), backend="eager")
    before = list(compiled.state_dict())
    with pytest.raises(ConfigError, match="compile the sparse model afterwards"):
        sparsify(compiled, "ste")
    assert list(compiled.state_dict()) == before and not compiled._forward_pre_hooks
    compiled(draw(8, 16))


class HasSparsity(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.sparsity = 0.5


class HasGeometry(nn.Linear):
    def geometry(self):
        return self.weight.shape


@pytest.mark.parametrize(("cls", "name"), [(HasSparsity, "sparsity"), (HasGeometry, "geometry")])
def test_names_that_sparse_layers_use_are_refused(cls, name):
    model = nn.Sequential(nn.Linear(16, 16), cls(16, 32))
    with pytest.raises(
        ConfigError, match=rf"layer '1' \({cls.__name__}\) has an attribute '{name}'"
    ):
        sp.sparsify(model, "ste", targets=["*"])
    assert untouched(model)
    sp.sparsify(model, "ste", targets=["*"], exclude=["1"])


def untouched(model):
    kinds = [type(layer) for layer in model]
    names = {name.rpartition(".")[2] for name in model.state_dict()}
    return SparseLayer not in kinds and names == {"weight", "bias"} and not model._forward_pre_hooks


def test_a_method_that_fails_at_a_layer_leaves_all_as_they_were(monkeypatch):
    """Such as a method of one's own, or memory that is not enough."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32))
    initial = registry.get("method", "sste").initial_state

    def fails(self, weight, state):
        if state.layer_name == "1":
            raise MemoryError("no memory")
        return initial(self, weight, state)

    with monkeypatch.context() as patched:
        patched.setattr(registry.get("method", "sste"), "initial_state", fails)
        with pytest.raises(MemoryError):
            sp.sparsify(model, "sste", targets=["*"])
    assert untouched(model) and type(model[0]) is nn.Linear
    sp.sparsify(model, "sste", targets=["*"])


@pytest.mark.parametrize(
    "use", ["densify", "prove", "dense_state_dict", "metrics", "masks", "refresh"]
)
@pytest.mark.parametrize("how", ["weight_norm", "prune"])
def test_weights_that_are_computed_since_sparsify_are_refused_where_they_are_read(use, how):
    model = Net()
    handle = sparsify(model, "ste")
    if how == "prune":
        prune.l1_unstructured(model.fc1, "weight", amount=0.3)
    else:
        parametrizations.weight_norm(model.fc1)
    names = list(model.state_dict())
    with pytest.raises(ConfigError, match="'fc1' is computed from another tensor since sparsify"):
        sp.densify(model) if use == "densify" else getattr(handle, use)()
    assert list(model.state_dict()) == names and isinstance(model.fc2, SparseLayer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("method", "options"),
    [("slope", {"adapters": {"rank": 2, "start": 0.0}}), ("ast", {"slorb": 4})],
)
def test_branches_of_weights_in_low_precision_run_and_are_folded(method, options, dtype):
    model = Net().to(dtype)
    handle = sparsify(model, method, total_steps=10, **options)
    branch = [*model.fc1.sparsity.parameters(), *model.fc2.sparsity.parameters()]
    for parameter in branch:
        nn.init.uniform_(parameter, -0.3, 0.3)
    x = draw(8, 16).to(dtype)
    y = model(x)
    y.square().mean().backward()
    assert all(parameter.grad.any() for parameter in branch)
    folded = handle.dense_state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparsePretrainWarning)
        sp.densify(model)
    assert folded["fc1.weight"].dtype == dtype
    assert torch.equal(folded["fc1.weight"], model.fc1.weight)
    torch.testing.assert_close(model(x), y, rtol=0.05, atol=0.05)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 16))

    def forward(self, x):
        return self.mlp(x)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_blocks_may_be_wrapped_after_sparsify():
    model = nn.Sequential(Block(), nn.Linear(16, 8)).double()
    sp.sparsify(model, "srste", targets=["*"])
    model[0] = Wrapper(model[0])
    handle = sp.sparsifier_of(model)
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(draw(8, 16)).square().mean().backward()
        optimizer.step()
    sp.densify(model[1])  # the other layers are attached again
    model(draw(8, 16)).square().mean().backward()
    optimizer.step()
    assert handle.completed_steps == 3 and "flip_rate" in sp.sparsifier_of(model).metrics()
    model[0].inner.mlp[0] = nn.Linear(16, 16).double()
    model(draw(8, 16)).square().mean().backward()
    with pytest.raises(ConfigError, match=r"replaced after sparsify: 0\.mlp\.0"):
        optimizer.step()


def test_sparsify_in_inference_mode_is_refused():
    model = Net()
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
        sp.sparsify(model, "sste", targets=["fc1"])
    sp.sparsify(model, "sste", targets=["fc1"])


@pytest.mark.parametrize("method", sp.list_methods())
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(method, default):
    """Loaders of large models set it."""

    def ends():
        model, optimizer, _ = build(method, dtype=torch.float32)
        train(model, optimizer, 0, 3)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    expected = ends()
    torch.set_default_dtype(default)
    try:
        found = ends()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal_bits(expected, found)


def test_offloaded_buffers_are_refused():
    from accelerate import cpu_offload

    model, _, _ = build("sste", dtype=torch.float32)
    expected = model.eval()(draw(4, 16, dtype=torch.float32))
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    with pytest.raises(ConfigError, match="offload_buffers=False"):
        model(draw(4, 16, dtype=torch.float32))
    other, _, _ = build("sste", dtype=torch.float32)
    cpu_offload(other.eval(), execution_device=torch.device("cpu"))
    assert torch.equal(other(draw(4, 16, dtype=torch.float32)), expected)


def test_layers_with_numbers_as_names_are_quoted_in_messages():
    with pytest.raises(ConfigError, match=r"matches 'mlp' \(choose from '0', '2'\)"):
        sp.sparsify(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), "ste", targets=["mlp"]
        )
