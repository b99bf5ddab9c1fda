"""Convolutions: every method in every geometry, published vectors, the report."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import sparsepretrain as sp
from sparsepretrain import kernels, registry
from sparsepretrain.sparsity.engine.layer_classes import sparse_class
from support.golden_vectors import load
from support.operands import OperandTable, into_sparse_phase
from support.small_loops import gradients
from support.small_models import ConvNet, draw
from support.sparse_cases import CONVOLVED, build, ids, sparsify

IDS = ids(CONVOLVED)
GEOMETRIES = {
    "same": {"kernel_size": 3, "padding": "same"},
    "even": {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3)},
    "strided": {"kernel_size": 3, "stride": (2, 1), "padding": (1, 2), "bias": False},
    "dilated": {"kernel_size": (1, 3), "dilation": 2, "padding": "valid"},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": "same", "padding_mode": "circular", "stride": 1},
    "grouped": {"kernel_size": 2, "groups": 2},
    "pointwise": {"kernel_size": 1},
}
RULES = [
    pytest.param(method, options, geometry, id=f"{name}-{geometry}")
    for (method, options), name in zip(CONVOLVED, IDS, strict=True)
    for geometry, arguments in GEOMETRIES.items()
    if "grouped convolution" in registry.get("method", method).layer_kinds
    or "groups" not in arguments  # refused
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("method", "options", "geometry"), RULES)
def test_gradient_rule_against_autograd_in_fp64(method, options, geometry):
    """The layer equals the operand table written out with ordinary autograd."""
    arguments = GEOMETRIES[geometry]
    groups = arguments.get("groups", 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Conv2d(16 * groups, 16 * groups, dtype=torch.float64, **arguments)
    model = nn.Sequential(copy.deepcopy(plain))
    sparsifier = sparsify(model, method, **options | {"targets": "0"})
    into_sparse_phase(sparsifier)  # the rule of the sparse phase
    layer = model[0]
    assert type(layer) is sparse_class(nn.Conv2d)
    x = draw(2, 16 * groups, 7, 6, seed=1)
    gy = draw(*plain(x).shape, seed=2)
    t = OperandTable(layer, x, gy)
    expected = {}
    for name, weight, g in (("x", t.B, t.P), ("weight", t.A, t.U), ("bias", t.A, gy)):
        leaves = {"x": x, "weight": weight} | ({} if plain.bias is None else {"bias": plain.bias})
        leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
        if name not in leaves:
            continue
        inputs = leaves.pop("x")
        y = functional_call(plain, leaves, inputs)
        y.backward(g)
        expected[name] = (leaves | {"x": inputs})[name].grad
    expected["weight"] = expected["weight"] * t.scale
    inputs = x.clone().requires_grad_()
    got = layer(inputs)
    got.backward(gy)
    for name, tensor in {"x": inputs, "weight": layer.weight, "bias": layer.bias}.items():
        if tensor is not None:
            torch.testing.assert_close(tensor.grad, expected[name], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, y, rtol=1e-12, atol=1e-12)
    # a single image without the batch axis
    if t.scale == 1.0 and t.P is gy and t.U is gy:
        alone = [x[0].clone().requires_grad_(), x[:1].clone().requires_grad_()]
        outputs = [layer(image) for image in alone]
        assert torch.equal(outputs[0], outputs[1][0])
        outputs[0].backward(gy[0]), outputs[1].backward(gy[:1])
        torch.testing.assert_close(alone[0].grad, alone[1].grad[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("method", "options"), CONVOLVED, ids=IDS)
def test_channels_last_equals_contiguous(method, options):
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model, optimizer, sparsifier = build(method, options, net=ConvNet)
        model.to(memory_format=layout)
        for step in range(3):
            x = model.example(step)[0].to(memory_format=layout).requires_grad_()
            model(x).square().sum().backward()
            last = gradients(model) | {"x": x.grad}
            optimizer.step()
            optimizer.zero_grad()
        assert model.fc1.weight.is_contiguous(memory_format=layout)
        results.append((last, sparsifier.masks(), model.fc1.weight.detach()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


def conv(*arguments, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(*arguments, **options))


def test_masks_equal_the_published_ones():
    g = load("hard_masks")
    out, inputs, *kernel = g["conv_w"].shape
    model = conv(inputs, out, kernel, bias=False)
    model[0].weight.data.copy_(g["conv_w"])
    sparsifier = sp.sparsify(model, "srste", targets="0")
    assert torch.equal(sparsifier.masks()["0"], g["conv_mask"].bool())
    x = draw(2, inputs, 5, 5, dtype=torch.float32)
    dense = nn.functional.conv2d(x, g["conv_w"] * g["conv_mask"])
    torch.testing.assert_close(model(x), dense)


@pytest.mark.parametrize(("variant", "name"), [("magnitude", "max"), ("rescaled", "maxnorm")])
def test_published_gradient_pruning(variant, name):
    """A 1×1 convolution with the unit matrix as weight returns P(G) itself."""
    g = load("sdgp")
    channels = g["conv_gy"].shape[1]
    model = conv(channels, channels, 1, bias=False)
    model[0].weight.data.copy_(torch.eye(channels)[..., None, None])
    sp.sparsify(model, "sdgp", targets="0", variant=variant, epsilon=1e-4)
    x = torch.zeros_like(g["conv_gy"], requires_grad=True)
    model(x).backward(g["conv_gy"])
    torch.testing.assert_close(x.grad, g[f"conv_{name}_2_4"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4)])
def test_masks_are_transposable_at_every_kernel_position(n, m):
    model = conv(8, 24, (2, 3))
    sparsifier = sp.sparsify(model, "tsrste", targets="0", n=n, m=m, dense_tail=0.0)
    mask = sparsifier.masks()["0"]
    for row in range(2):
        for column in range(3):
            own = mask[:, :, row, column]
            expected = kernels.transposable_mask(model[0].weight[:, :, row, column], n, m)
            assert torch.equal(own, expected)
            assert (own.view(-1, m, 8).sum(1) == n).all() and (
                own.view(24, -1, m).sum(2) == n
            ).all()


def test_bimask_permutes_output_channels():
    model = conv(8, 16, 2)
    sp.sparsify(model, "bimask", targets="0")
    layer = model[0]
    permutation = layer.sparsity.permutation
    assert permutation.shape == (16,) and not torch.equal(permutation, torch.arange(16))
    backward = layer.operands.project(layer.weight).backward
    assert ((backward[permutation] != 0).view(4, 4, 8, 2, 2).sum(1) <= 2).all()


def test_coverage_and_proof(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, (3, 5), groups=2), nn.Conv2d(16, 4, 1)
    )
    sparsifier = sp.sparsify(model, "srste", targets=["1", "2"], n=1)
    coverage = sparsifier.coverage()
    assert coverage.sparse_parameters == 16 * 4 * 15 + 64 and coverage.dense_linears == ["0"]
    table = str(coverage)
    assert "16 × 4 × 3 × 5" in table and "4 × 16 × 1 × 1" in table
    proof = sparsifier.prove()
    assert proof.holds and proof.groups == (16 * 4 * 15 + 64) // 4
    # what the proof would find if the projection were wrong
    wrong = sparsifier.layers["1"].operands.project(model[1].weight)
    wrong.forward[0, :, 0, 0] = 1.0
    monkeypatch.setattr(sparsifier.layers["1"].operands, "project", lambda weight: wrong)
    assert sparsifier.prove().violations == ("1",)
