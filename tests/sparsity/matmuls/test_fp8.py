"""Real fp8 products: those of simulated fp8, dense and sparse; where there are none, and why."""

import copy

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.matmuls import fp8
from sparsepretrain.sparsity.matmuls.fp8 import FP8, fp8_matmuls
from sparsepretrain.sparsity.matmuls.sparse24 import Sparse24FP8
from sparsepretrain.sparsity.matmuls.three import Matmuls
from support.matmul_cases import (
    Stopwatch,
    assert_close,
    cut_groups,
    magnitudes,
    outputs,
    train_in_bf16,
)
from support.operands import into_sparse_phase, packed
from support.small_loops import attached, eager_and_compiled
from support.small_models import Layer, Mixed, draw
from support.sparse_cases import PACKED, SETTLED, STEPS, TRAINED

METHODS = [name for name in TRAINED if name not in PACKED]
RECIPES = ("hybrid", "e4m3")


@pytest.fixture(autouse=True)
def supported(monkeypatch, semi_structured_device):
    """A device with correct fp8 matmuls, computed on the CPU."""
    monkeypatch.setattr(fp8, "no_fp8_matmuls", lambda device: "")


def sparsify(model, method, recipe="hybrid", name="fp8", sparse_matmuls="emulate", options=None):
    options = SETTLED.get(method, {}) | (options or {})
    settings = {"targets": ["*fc*"], "total_steps": STEPS, "sparse_matmuls": sparse_matmuls}
    precision = name and {"name": name, "recipe": recipe}
    handle = sp.sparsify(model, method, precision=precision, **settings, **options)
    into_sparse_phase(handle)
    return handle


def layer(kind="Linear", bias=True, **sizes):
    """With a bias that bf16 has."""
    made = Layer(kind, bias, **sizes)
    if bias:
        made.fc.bias.data = made.fc.bias.data.bfloat16().float()
    return made


def compare(got, twin, method, recipe, dtype, monkeypatch, shape=(2, 32)):
    """``got`` equals the matmuls of ``twin`` in simulated fp8."""
    sparsify(twin, method, recipe, "fp8_sim")
    expected, summands = outputs(twin, dtype, shape), max(256, twin.inputs, twin.outputs)
    scale = magnitudes(twin, dtype, shape, monkeypatch, recipe)
    assert_close(got, expected, scale, dtype, summands)


KINDS = pytest.mark.parametrize(("kind", "bias"), [("Linear", False), ("Conv1D", True)])


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", [*METHODS, *PACKED])
def test_fp8_matmuls_equal_simulated_ones(method, recipe, kind, bias, monkeypatch):
    model, exact = layer(kind, bias), layer(kind, bias)
    sparsify(model, method, recipe)
    assert model.fc.operands.matmuls.now(torch.bfloat16, True) is fp8_matmuls(recipe, False)
    got = outputs(model, torch.bfloat16)
    compare(got, layer(kind, bias), method, recipe, torch.bfloat16, monkeypatch)
    sparsify(exact, method, name=None)
    for a, b in zip(got, outputs(exact, torch.bfloat16), strict=True):
        assert 1e-3 < (a - b).norm() / b.norm() < 0.1, "nothing was rounded, or too much"


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", PACKED)
def test_sparse_fp8_matmuls_equal_simulated_ones(method, recipe, kind, bias, monkeypatch):
    """Of e4m3×e4m3; the backward products of the hybrid recipe are dense."""
    model = layer(kind, bias)
    packs = PACKED[method] if recipe == "e4m3" else PACKED[method].strip("BPU")
    if not packs:
        told = "no matmul can be sparse: cuSPARSELt has no kernel of e5m2×e4m3"
        with pytest.raises(ConfigError, match=told):
            sparsify(model, method, recipe, sparse_matmuls="semi_structured")
        return
    handle = sparsify(model, method, recipe, sparse_matmuls="semi_structured")
    assert packed(model.fc.operands.matmuls.now(torch.bfloat16, True)) == packs
    got = outputs(model, torch.bfloat16)
    compare(got, layer(kind, bias), method, recipe, torch.bfloat16, monkeypatch)
    (covered,) = handle.coverage().layers
    mixed = {why for why in covered.emulated.values() if why}
    assert mixed <= {"cuSPARSELt has no kernel of e5m2×e4m3"}
    assert list(covered.emulated.values()).count("") == len(packs)


@KINDS
@pytest.mark.parametrize("sizes", [(128, 80), (48, 256), (1376, 48), (16, 16), (144, 2736)])
@pytest.mark.parametrize("method", ["tsrste", "sdgp"])  # which pack A, B and U; P
def test_padded_fp8_matmuls_equal_simulated_ones(method, sizes, kind, bias, monkeypatch):
    """Widths are multiples of 16, which tensor cores need, and of no tile of the library."""
    options = {"kind": kind, "bias": bias, "inputs": sizes[0], "outputs": sizes[1]}
    for shape in ((2, 32), (15,)):
        model = layer(**options)
        sparsify(model, method, "e4m3", sparse_matmuls="semi_structured")
        assert packed(model.fc.operands.matmuls.now(torch.bfloat16, True)) == PACKED[method]
        got = outputs(model, torch.bfloat16, shape)
        compare(got, layer(**options), method, "e4m3", torch.bfloat16, monkeypatch, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "bias"), [("Linear", True), ("Conv1D", False)])
@pytest.mark.parametrize("sparse_matmuls", ["emulate", "semi_structured"])
def test_fp8_matmuls_equal_simulated_ones_in_fp32_and_fp16(
    dtype, kind, bias, sparse_matmuls, monkeypatch
):
    model = layer(kind, bias)
    sparsify(model, "tsrste", "e4m3", sparse_matmuls=sparse_matmuls)
    got = outputs(model, dtype)
    compare(got, layer(kind, bias), "tsrste", "e4m3", dtype, monkeypatch)


@pytest.mark.parametrize("shape", [(15,), (3, 5), (2, 10), (4, 12)])
@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
@pytest.mark.parametrize("sparse_matmuls", ["emulate", "semi_structured"])
def test_any_number_of_tokens_equals_simulated_fp8(method, shape, sparse_matmuls, monkeypatch):
    """Zeros fill up what tensor cores sum over; groups of tokens that are none stay dense."""
    model = layer()
    handle = sparsify(model, method, "e4m3", sparse_matmuls=sparse_matmuls)
    got = outputs(model, torch.bfloat16, shape)
    compare(got, layer(), method, "e4m3", torch.bfloat16, monkeypatch, shape)
    if (method, sparse_matmuls) == ("tsrste", "semi_structured"):
        (covered,) = handle.coverage().layers
        assert covered.emulated == {"fprop": "", "dgrad": "", "wgrad": cut_groups(shape)}


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("recipe", ["hybrid", "reference", "e4m3"])
def test_simulated_fp8_of_gpus_equals_that_of_cpus(kind, recipe, monkeypatch):
    """GPUs multiply unscaled values, exact in bf16, and CPUs scaled ones in fp32."""
    model = layer(kind)
    sparsify(model, "sste", recipe, "fp8_sim")
    with monkeypatch.context() as patch:
        patch.setattr(FP8, "dequantizes", lambda *_: False)
        got = outputs(model, torch.bfloat16)
    compare(got, layer(kind), "sste", recipe, torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("sparse_matmuls", ["emulate", "semi_structured"])
def test_weights_are_quantized_once_per_step_in_the_same_memory(sparse_matmuls, monkeypatch):
    model = nn.Sequential(Layer(), nn.Linear(256, 128), Layer())
    handle = sparsify(model, "tsrste", "e4m3", sparse_matmuls=sparse_matmuls)
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.store_operands(torch.bfloat16)
    handle.choose_matmuls({"0.fc": (2, 32, 128), "2.fc": (2, 32, 128)})
    own = handle.layers["0.fc"].operands
    (_, a, scale_a), (_, b, scale_b), _ = own._kept[True]
    columns = (80, 160) if sparse_matmuls == "semi_structured" else (128, 256)
    transposed = b if sparse_matmuls == "semi_structured" else b.t()
    assert a.shape == (256, columns[0]) and transposed.shape == (128, columns[1])
    assert a.is_contiguous() and transposed.is_contiguous()
    calls, prepare = [], Matmuls.prepare
    monkeypatch.setattr(Matmuls, "prepare", lambda *args: calls.append(prepare(*args)) or calls[-1])
    train_in_bf16(model, optimizer, 0, 2, shape=(2, 32, 128), micro_batches=2)
    assert len(calls) == 2 * 2, "layers × steps, whatever the micro-batches"
    after = [t for operand in own._kept[True][:2] for t in operand[1:]]
    before = a, scale_a, b, scale_b
    assert [t.data_ptr() for t in after] == [t.data_ptr() for t in before]


def test_unsupported_layers_are_simulated():
    model, twin = Mixed(), Mixed()
    twin.load_state_dict(model.state_dict())
    handle = sparsify(model, "ste", sparse_matmuls="semi_structured")
    sparsify(twin, "ste", name="fp8_sim")
    assert str(handle.coverage()).splitlines()[-5:] == [
        "fp8 hybrid: fprop e4m3×e4m3, dgrad and wgrad e5m2×e4m3; evaluation without fp8",
        "  simulated: 1 layer: out_features = 40, no multiple of 16",
        "  simulated: 1 layer: a convolution",
        "sparse_matmuls=semi_structured: 1 of 3 matmuls are sparse, cuSPARSELt 0.8.1",
        "  emulated: fprop of 2 layers: its matmuls are in simulated fp8",
    ]
    for name, shape in (("narrow_fc", (8, 256)), ("fc_conv", (2, 16, 5, 5))):
        x = draw(*shape, dtype=torch.float32)
        assert torch.equal(getattr(model, name)(x), getattr(twin, name)(x))


@pytest.mark.parametrize("targets", [["narrow_fc"], ["fc_conv"], ["narrow_fc", "fc_conv"]])
def test_fp8_without_a_supported_layer_is_refused(targets):
    why = "a convolution" if targets == ["fc_conv"] else "out_features = 40, no multiple of 16"
    told = f"precision=fp8: .*{why}: precision=fp8_sim"
    with pytest.raises(ConfigError, match=told) as caught:
        sp.sparsify(Mixed(), "ste", targets=targets, precision="fp8")
    assert len(caught.value.messages) == 1 and "\n" not in caught.value.messages[0]


def test_device_without_fp8_tensor_cores_is_refused(monkeypatch):
    model = Layer()
    sparsify(model, "ste")
    reason = "compute capability 8.6 has no fp8 tensor cores (8.9 is the first)"
    monkeypatch.setattr(fp8, "no_fp8_matmuls", lambda device: reason)
    with pytest.raises(ConfigError, match=r"no matmul can be in fp8: .*8\.6 has no"):
        sp.sparsify(Layer(), "ste", targets="fc", precision="fp8")
    model.to("cpu")  # back, from a GPU
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"compute capability 8\.6"):
            outputs(model, torch.bfloat16)


def test_auto_times_sparse_products_against_dense_ones_in_fp8(monkeypatch):
    clock = Stopwatch(monkeypatch, A=0.5, B=1.5)
    handle = sparsify(model := layer(), "slope", "e4m3", sparse_matmuls="auto")
    outputs(model, torch.bfloat16)
    assert handle.layers["fc"].operands.matmuls.packs == "A"
    assert {type(product) for product in clock.products} == {FP8, Sparse24FP8}
    (covered,) = handle.coverage().layers
    assert covered.emulated == {"fprop": "", "dgrad": "slower: 1500 µs, emulated 1000 µs"}


@pytest.mark.parametrize(
    ("name", "sparse_matmuls", "mvue", "tolerance"),
    [
        ("fp8", "emulate", "none", 1e-2),
        ("fp8", "semi_structured", "none", 1e-2),
        (None, "semi_structured", "gradient", 1e-3),  # tracing the draws takes ten seconds
    ],
)
def test_compiled_block_is_one_graph_and_equals_eager(name, sparse_matmuls, mvue, tolerance):
    def run(compile):
        model = nn.Sequential(Layer())
        handle = sparsify(model, "tsrste", "e4m3", name, sparse_matmuls, {"mvue": mvue})
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
        handle.store_operands(torch.bfloat16)
        compile(model[0])
        train_in_bf16(model, optimizer, 0, 2, shape=(2, 32, 128))
        if name is None:
            assert handle.layers["0.fc"].operands.matmuls.packs == PACKED["tsrste"]
        return list(model.parameters())

    eager, compiled, graphs = eager_and_compiled(run)
    assert graphs == 1
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance / 100)


def test_held_masks_evaluation_and_copies_work_in_fp8():
    model = layer()
    handle = sparsify(model, "sste", "e4m3", sparse_matmuls="semi_structured")
    twin = layer()
    sparsify(twin, "sste", "e4m3", "fp8_sim")
    handle.store_operands(torch.bfloat16)
    copied = copy.deepcopy(model)
    assert copied.fc.operands.matmuls.base is model.fc.operands.matmuls.base
    before = outputs(model, torch.bfloat16)
    for a, b in zip(outputs(copied, torch.bfloat16), before, strict=True):
        assert torch.equal(a, b)
    handle.hold(handle.masks())
    held = outputs(model, torch.bfloat16)[0]
    torch.testing.assert_close(held, before[0], rtol=1e-2, atol=1e-2)
    handle.refresh()
    x = draw(2, 32, 128, dtype=torch.float32)
    assert torch.equal(model.eval()(x), twin.eval()(x))
    assert "fp8 e4m3 semi_structured" in repr(handle)
    assert torch.equal(sp.densify(model)(x), sp.densify(twin)(x))
