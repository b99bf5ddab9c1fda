"""A method whose projection autograd differentiates: trained scales per output feature."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.kernels import nm_mask
from sparsepretrain.sparsity.fsdp.sharding import whole
from support import ROOT
from support.small_loops import accumulate, attached, eager_and_compiled, gradients, recomputed
from support.small_models import Blocks, ConvNet, Layer, Net, draw
from support.sparse_cases import sparsify
from support.tiny_runs import assert_equal_bits

EXAMPLE = ROOT / "docs/examples/row_scales.py"


@pytest.fixture(autouse=True)
def row_scales():
    """Register the example for one test."""
    spec = importlib.util.spec_from_file_location("row_scales", EXAMPLE)
    before = copy.copy(registry._registered["method"])
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    registry._registered["method"] = before


def build(net=Net, dtype=torch.float64, **options):
    model = net(dtype)
    handle = sparsify(model, "row_scales", **options)
    with torch.no_grad():
        for index, layer in enumerate(handle.layers.values()):
            layer.sparsity.scale.copy_(1 + 0.3 * draw(*layer.sparsity.scale.shape, seed=index))
    return model, handle


def plain_gradients(model, handle, x, gy):
    """Gradients of the plain formula in ordinary layers."""
    dense = type(model)(torch.float64)
    leaves = {}
    for name, layer in handle.layers.items():
        weight, scale = (
            p.detach().clone().requires_grad_() for p in (layer.weight, layer.sparsity.scale)
        )
        leaves |= {f"{name}.weight": weight, f"{name}.sparsity.scale": scale}
        own = getattr(dense, name)
        del own.weight
        own.weight = scale * (weight * nm_mask(weight.detach(), dim=layer.in_dim))
    y = dense(x)
    (y * gy).sum().backward()
    return y, {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("net", [Net, ConvNet])
def test_gradients_equal_autograd_of_the_plain_formula(net):
    model, handle = build(net)
    x, gy = model.example(0)
    y, expected = plain_gradients(model, handle, x, gy)
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
    for micro in (8, 2):  # gradient accumulation
        model.zero_grad()
        accumulate(model, 0, micro=micro)
        found = gradients(model)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_conv1d_layout_equals_linear():
    results = []
    for kind in ("Linear", "Conv1D"):
        model = Layer(kind).double()
        weight = draw(256, 128, seed=1)
        model.fc.weight.data.copy_(weight if kind == "Linear" else weight.t())
        sparsify(model, "row_scales", targets="fc")
        model(draw(4, 128)).square().sum().backward()
        grads = model.fc.weight.grad, model.fc.sparsity.scale.grad
        results.append(grads if kind == "Linear" else [g.t() for g in grads])
    torch.testing.assert_close(*map(list, results))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_bit_exact(reentrant):
    results = []
    for net in (Net, recomputed(Net, reentrant)):
        model, _ = build(net)
        model(draw(4, 16).requires_grad_()).square().sum().backward()
        results.append(gradients(model))
    assert_equal_bits(*results)


def test_compiled_block_is_one_graph_and_equals_eager():
    def run(compile):
        model, _ = build(lambda dtype: Blocks(Net(dtype)), targets="*fc*")
        compile(model.block)
        for step in range(2):
            model(draw(4, 16, seed=step)).square().sum().backward()
        return gradients(model.block)

    eager, compiled, graphs = eager_and_compiled(run)
    assert graphs == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stored", [True, False])
def test_ddp_of_one_rank_trains_scales_like_a_plain_loop(group, stored):
    results = []
    for wrapped in (False, True):
        model, handle = build(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle.attach(optimizer)
        if stored:
            handle.store_operands()
        run = DistributedDataParallel(model) if wrapped else model
        before = model.fc1.sparsity.scale.detach().clone()
        for step in range(3):
            run(draw(4, 16, seed=step, dtype=torch.float32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()(draw(2, 16, dtype=torch.float32))  # keeps operands for evaluation only
            model.train()
        assert not torch.equal(model.fc1.sparsity.scale, before)
        assert handle.prove().holds
        results.append(copy.deepcopy(model.state_dict()))
    assert_equal_bits(*results)


def test_resumed_and_densified_models_keep_the_scales():
    model, handle = build()
    x = draw(4, 16)
    other, _ = build()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(model.state_dict())
    expected = model.eval()(x)
    assert torch.equal(other.eval()(x), expected) and handle.metrics()["density"] == 0.5
    torch.testing.assert_close(sp.densify(model)(x), expected)


def test_one_shard_trains_like_the_unsharded_model(mesh):
    results = []
    for is_sharded in (False, True):
        model, handle = build()
        if is_sharded:
            handle.prepare_sharding()
            fully_shard(model, mesh=mesh)
        optimizer = attached(handle, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            model(draw(4, 16, seed=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.prove().holds
        state = {key: whole(value) for key, value in model.state_dict().items()}
        results.append(copy.deepcopy(state | handle.dense_state_dict()))
    assert_equal_bits(*results)
