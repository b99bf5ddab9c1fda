"""Sparse matmuls of widths that fill no tile of the library: padded with zeros, equal to dense."""

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.sparsity.matmuls import policy, sparse24
from sparsepretrain.sparsity.matmuls.fp8 import fp8_matmuls
from sparsepretrain.sparsity.matmuls.sparse24 import packing
from sparsepretrain.sparsity.matmuls.three import DENSE, Estimate
from support.matmul_cases import Stopwatch, assert_close, magnitudes, outputs, train_in_bf16
from support.operands import into_sparse_phase, packed
from support.small_loops import attached, eager_and_compiled
from support.small_models import Layer
from support.sparse_cases import PACKED, SETTLED, STEPS
from support.tiny_runs import assert_equal_bits

pytestmark = pytest.mark.usefixtures("semi_structured_device")
SIZES = [(128, 20), (36, 256), (68, 36), (20, 20), (1376, 68), (64, 2740), (36, 64)]
"""(in_features, out_features): one is odd, both, both below a tile, FFNs as wide as those of Llama,
and one whose packed weight has the shape of the weight, (64, 36)."""
BRAIN = torch.bfloat16


def sparsify(model, method, sparse_matmuls="semi_structured", options=None, **settings):
    options = SETTLED.get(method, {}) | (options or {})
    settings = {
        "targets": ["*fc*"],
        "total_steps": STEPS,
        "sparse_matmuls": sparse_matmuls,
    } | settings
    handle = sp.sparsify(model, method, **options, **settings)
    into_sparse_phase(handle)
    return handle


def equal_emulated(method, monkeypatch, dtype=BRAIN, shape=(2, 32), **kind):
    emulated, sparse = Layer(**kind), Layer(**kind)
    sparsify(emulated, method, "emulate")
    handle = sparsify(sparse, method)
    expected, got = outputs(emulated, dtype, shape), outputs(sparse, dtype, shape)
    if sparse.fc.bias is not None:
        assert torch.equal(sparse.fc.bias.grad, emulated.fc.bias.grad)
    summands = max(sparse.inputs, sparse.outputs)
    scale = magnitudes(emulated, dtype, shape, monkeypatch)
    assert_close(got, expected, scale, dtype, summands)
    return handle


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, BRAIN])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("method", ["tsrste", "sdgp"])  # which pack A, B and U; P
def test_padded_matmuls_equal_emulated_ones(method, kind, bias, dtype, sizes, monkeypatch):
    inputs, outs = sizes
    case = {"kind": kind, "bias": bias, "inputs": inputs, "outputs": outs}
    handle = equal_emulated(method, monkeypatch, dtype, **case)
    own = handle.layers["fc"].operands
    assert packed(own.matmuls.now(dtype, True)) == PACKED[method]
    (layer,) = handle.coverage().layers
    assert set(layer.emulated.values()) == {""} and layer.padded


@pytest.mark.parametrize("sizes", [(256, 64), (80, 144), (1376, 48), (16, 2736)])
@pytest.mark.parametrize("tokens", [1, 30, 600])
@pytest.mark.parametrize("dim", [1, 0])
@pytest.mark.parametrize("operand", ["A", "B", "P", "U"])
@pytest.mark.parametrize("dtype", [torch.float16, BRAIN, torch.float8_e4m3fn])
def test_padded_matmuls_equal_those_in_fp64(dtype, operand, dim, tokens, sizes):
    fp8 = dtype.itemsize == 1
    base, dtype = (fp8_matmuls("e4m3", False), BRAIN) if fp8 else (DENSE, dtype)
    case = policy.Case(operand, *sizes, tokens, dtype, dim, bias=True)
    left, right, call, bias = policy.random_matmul(case, torch.device("cpu"))
    names = {"fprop": ("Xf", "A"), "dgrad": ("P", "B"), "wgrad": ("U", "Xw")}[call.name]
    product = getattr(packing(base, operand), call.name)
    pair = product.prepare(left, names[0]), product.prepare(right, names[1])
    assert [each.kind.startswith("sparse24") for each in pair] == [
        name == operand for name in names
    ]
    got = product(call, *pair, bias)

    def exact(x, name):
        x = x.grad if isinstance(x, Estimate) else x
        encoded = product.encode(x, name, dtype)
        return kernels.dequantize_fp8(*encoded[1:]).double() if fp8 else encoded.data.double()

    left, right = exact(left, names[0]), exact(right, names[1])
    expected = call.dense(left, right, None if bias is None else bias.double())
    spread = call.dense(left.abs(), right.abs(), None if bias is None else bias.abs().double())
    slack = torch.finfo(got.dtype).eps * expected.abs() + 2.0**-16 * spread
    assert got.shape == expected.shape and got.is_contiguous()
    assert bool(((got - expected).abs() <= slack).all())


@pytest.mark.parametrize("shape", [(), (1,), (15,), (3, 5), (2, 10), (2, 2, 12), (1, 516)])
@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
def test_any_number_of_tokens_is_padded_together_with_widths(method, shape, monkeypatch):
    equal_emulated(method, monkeypatch, shape=shape, inputs=36, outputs=20)


def test_out_features_that_are_no_multiple_of_4_are_padded(monkeypatch):
    handle = equal_emulated("sste", monkeypatch, inputs=36, outputs=5)
    (layer,) = handle.coverage().layers
    assert layer.padded == {
        "fprop": "5 × 36 to 64 × 64 (+2175.6% work)",
        "wgrad": "5 × 36 to 64 × 40 (+1322.2% work)",
    }


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("method", ["sste", "slope", "sdgp"])
def test_stored_padded_operands_train_like_those_of_every_forward(method, kind, sizes):
    inputs, outs = sizes

    def run(store):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inputs, inputs), Layer(kind, inputs=inputs, outputs=outs))
        handle = sparsify(model, method)
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
        if store:
            handle.store_operands(BRAIN)
        for step in range(3):
            shape = 2, 8, inputs
            train_in_bf16(model, optimizer, step, step + 1, shape, micro_batches=2)
        return list(model.parameters())

    assert_equal_bits(run(True), run(False))


def test_stored_padded_operands_keep_their_memory_and_are_packed_once_per_step(monkeypatch):
    model = nn.Sequential(Layer(inputs=36, outputs=20))
    handle = sparsify(model, "slope")
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.store_operands(BRAIN)
    handle.choose_matmuls({"0.fc": (2, 8, 36)})
    own, calls = handle.layers["0.fc"].operands, []
    addresses = [part.data.data_ptr() for part in own._kept[True][:2]]

    def compress(x):
        calls.append(tuple(x.shape))
        return kernels.compress_24(x)

    monkeypatch.setattr(sparse24, "compress_24", compress)
    train_in_bf16(model, optimizer, 0, 2, (2, 8, 36), micro_batches=3)
    assert calls == [(64, 64), (64, 64)] * 2, "A and B of each step"
    assert [part.data.data_ptr() for part in own._kept[True][:2]] == addresses


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("method", ["slope", "sdgp"])
def test_compiled_padded_matmuls_are_one_graph_and_equal_eager(method, kind):
    def run(compile):
        model = nn.Sequential(Layer(kind, inputs=36, outputs=20))
        handle = sparsify(model, method)
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
        handle.store_operands(BRAIN)
        compile(model[0])
        train_in_bf16(model, optimizer, 0, 2, (2, 6, 36))
        assert packed(handle.layers["0.fc"].operands.matmuls.now(BRAIN, True)) == PACKED[method]
        return list(model.parameters())

    eager, compiled, graphs = eager_and_compiled(run)
    assert graphs == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
def test_auto_times_the_padded_sizes_of_training(method, monkeypatch):
    Stopwatch(monkeypatch, A=0.5, B=0.5, U=0.5, P=0.5)
    sizes = []

    def multiply(packed, dense, bias=None, **flags):
        sizes.append((tuple(packed.shape), tuple(dense.shape), *flags.items()))
        return kernels.matmul_24(packed, dense, bias, **flags)

    monkeypatch.setattr(sparse24, "matmul_24", multiply)
    model = Layer(inputs=100, outputs=20)
    handle = sparsify(model, method, "auto")
    handle.store_operands(BRAIN)
    handle.choose_matmuls({"fc": (2, 8, 100)})
    timed = set(sizes)
    sizes.clear()
    outputs(model, BRAIN, (2, 8))
    assert set(sizes) == timed and len(timed) == len(PACKED[method])


def test_fitting_operands_are_not_copied():
    x = torch.randn(512, 64, dtype=BRAIN)
    assert sparse24.padded(x, 512, 32) is x
    assert sparse24.cut(x, (2, 256, 64)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("out", "inputs"), [(5504, 2048), (1408, 512), (256, 64)])
def test_fitting_widths_have_no_padding(out, inputs):
    assert all(not sparse24.padding(DENSE, name, out, inputs) for name in "ABPU")
