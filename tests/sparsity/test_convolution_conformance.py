"""What every registered method must do to convolutions, with every option variant."""

import copy

import pytest
import torch
from sparse_cases import (
    CONVOLVED,
    ConvNet,
    OperandTable,
    build,
    draw,
    gradients,
    ids,
    into_sparse_phase,
    sparsify,
)
from torch import nn
from torch.func import functional_call

from sparsepretrain import registry
from sparsepretrain.sparsity.layer_classes import sparse_class

IDS = ids(CONVOLVED)
every_case = pytest.mark.parametrize(("method", "options"), CONVOLVED, ids=IDS)


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


@every_case
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
