"""Real fp8 products: those of simulated fp8, dense and sparse; where there are none, and why."""

import copy

import pytest
import torch
from product_cases import assert_close, magnitudes, outputs
from sparse_cases import PACKED, SETTLED, STEPS, Layer, Mixed, draw, into_sparse_phase, packed
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import backend as backends
from sparsepretrain.sparsity.products import FP8, Products, Sparse24FP8, fp8_products

METHODS = [name for name in sp.list_methods() if name not in PACKED]
RECIPES = ("hybrid", "e4m3")


@pytest.fixture(autouse=True)
def supported(monkeypatch, semi_structured_device):
    """A device with correct fp8 matmuls, computed on the CPU."""
    monkeypatch.setattr(backends, "no_fp8_products", lambda device: "")


def sparsify(model, method, recipe="hybrid", name="fp8", backend="emulate", options=None):
    options = SETTLED.get(method, {}) | (options or {})
    settings = {"targets": ["*fc*"], "total_steps": STEPS, "backend": backend}
    precision = name and {"name": name, "recipe": recipe}
    handle = sp.sparsify(model, method, precision=precision, **settings, **options)
    into_sparse_phase(handle)
    return handle


def layer(kind="Linear", bias=True):
    """With a bias that bf16 has."""
    made = Layer(kind, bias)
    if bias:
        made.fc.bias.data = made.fc.bias.data.bfloat16().float()
    return made


def compare(got, twin, method, recipe, dtype, monkeypatch, shape=(2, 32)):
    """``got`` equals the matmuls of ``twin`` in simulated fp8."""
    sparsify(twin, method, recipe, "fp8_sim")
    expected = outputs(twin, dtype, shape)
    assert_close(got, expected, magnitudes(twin, dtype, shape, monkeypatch, recipe), dtype)


KINDS = pytest.mark.parametrize(("kind", "bias"), [("Linear", False), ("Conv1D", True)])


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", [*METHODS, *PACKED])
def test_fp8_matmuls_equal_simulated_ones(method, recipe, kind, bias, monkeypatch):
    model, exact = layer(kind, bias), layer(kind, bias)
    sparsify(model, method, recipe)
    assert model.fc.sparsity.products.now(torch.bfloat16, True) is fp8_products(recipe, False)
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
        told = "no product can be sparse: cuSPARSELt has no kernel of e5m2×e4m3"
        with pytest.raises(ConfigError, match=told):
            sparsify(model, method, recipe, backend="semi_structured")
        return
    handle = sparsify(model, method, recipe, backend="semi_structured")
    assert packed(model.fc.sparsity.products.now(torch.bfloat16, True)) == packs
    got = outputs(model, torch.bfloat16)
    compare(got, layer(kind, bias), method, recipe, torch.bfloat16, monkeypatch)
    (covered,) = handle.coverage().layers
    mixed = {why for why in covered.emulated.values() if why}
    assert mixed <= {"cuSPARSELt has no kernel of e5m2×e4m3"}
    assert list(covered.emulated.values()).count("") == len(packs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "bias"), [("Linear", True), ("Conv1D", False)])
@pytest.mark.parametrize("backend", ["emulate", "semi_structured"])
def test_fp8_matmuls_equal_simulated_ones_in_fp32_and_fp16(dtype, kind, bias, backend, monkeypatch):
    model = layer(kind, bias)
    sparsify(model, "tsrste", "e4m3", backend=backend)
    got = outputs(model, dtype)
    compare(got, layer(kind, bias), "tsrste", "e4m3", dtype, monkeypatch)


@pytest.mark.parametrize("shape", [(15,), (3, 5), (2, 10), (4, 12)])
@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
@pytest.mark.parametrize("backend", ["emulate", "semi_structured"])
def test_any_number_of_tokens_equals_simulated_fp8(method, shape, backend, monkeypatch):
    """Zeros fill up what tensor cores sum over; groups of tokens that are none stay dense."""
    model = layer()
    handle = sparsify(model, method, "e4m3", backend=backend)
    got = outputs(model, torch.bfloat16, shape)
    compare(got, layer(), method, "e4m3", torch.bfloat16, monkeypatch, shape)
    why = {
        (3, 5): "samples of 5 tokens, no multiple of 4",
        (2, 10): "samples of 10 tokens, no multiple of 4",
    }
    if (method, backend) == ("tsrste", "semi_structured"):
        (covered,) = handle.coverage().layers
        assert covered.emulated == {"fprop": "", "dgrad": "", "wgrad": why.get(shape, "")}


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


@pytest.mark.parametrize("backend", ["emulate", "semi_structured"])
def test_weights_are_quantized_once_per_step_in_the_same_memory(backend, monkeypatch):
    model = nn.Sequential(Layer(), nn.Linear(256, 128), Layer())
    handle = sparsify(model, "tsrste", "e4m3", backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.attach(optimizer)
    handle.store_operands(torch.bfloat16)
    handle.choose_products({"0.fc": (2, 32, 128), "2.fc": (2, 32, 128)})
    own = handle.layers["0.fc"].sparsity
    (_, a, scale_a), (_, b, scale_b), _ = own.cache._kept[True]
    columns = (80, 160) if backend == "semi_structured" else (128, 256)
    transposed = b if backend == "semi_structured" else b.t()
    assert a.shape == (256, columns[0]) and transposed.shape == (128, columns[1])
    assert a.is_contiguous() and transposed.is_contiguous()
    calls, prepare = [], Products.prepare
    monkeypatch.setattr(
        Products, "prepare", lambda *args: calls.append(prepare(*args)) or calls[-1]
    )
    for step in range(2):
        for micro in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(draw(2, 32, 128, seed=2 * step + micro, dtype=torch.float32))
            y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 2 * 2, "layers × steps, whatever the micro-batches"
    after = [t for operand in own.cache._kept[True][:2] for t in operand[1:]]
    before = a, scale_a, b, scale_b
    assert [t.data_ptr() for t in after] == [t.data_ptr() for t in before]


def test_unsupported_layers_are_simulated():
    model, twin = Mixed(), Mixed()
    twin.load_state_dict(model.state_dict())
    handle = sparsify(model, "ste", backend="semi_structured")
    sparsify(twin, "ste", name="fp8_sim")
    assert str(handle.coverage()).splitlines()[-5:] == [
        "fp8 hybrid: fprop e4m3×e4m3, dgrad and wgrad e5m2×e4m3; evaluation without fp8",
        "  simulated: 1 layer: out_features = 40, no multiple of 16",
        "  simulated: 1 layer: a convolution",
        "backend semi_structured: 1 of 3 products are sparse, cuSPARSELt 0.8.1",
        "  emulated: fprop of 2 layers: its products are in simulated fp8",
    ]
    x = draw(8, 256, dtype=torch.float32)
    assert torch.equal(model.narrow_fc(x), twin.narrow_fc(x))
    x = draw(2, 16, 5, 5, dtype=torch.float32)
    assert torch.equal(model.fc_conv(x), twin.fc_conv(x))


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
    monkeypatch.setattr(backends, "no_fp8_products", lambda device: reason)
    with pytest.raises(ConfigError) as caught:
        sp.sparsify(Layer(), "ste", targets="fc", precision="fp8")
    assert f"precision=fp8: no product can be in fp8: {reason}" in str(caught.value)
    model.to("cpu")  # back, from a GPU
    with pytest.raises(ConfigError):
        outputs(model, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"compute capability 8\.6"):
        outputs(model, torch.bfloat16)


def test_auto_times_sparse_products_against_dense_ones_in_fp8(monkeypatch):
    taken = []

    def medians(works, device):
        found = {}
        for name, run in works.items():
            run()
            taken.append(run.args[0])
            found[name] = {"A": 1e-3, "B": 3e-3}.get(taken[-1].packs, 2e-3)
        return found

    monkeypatch.setattr(backends, "medians", medians)
    handle = sparsify(model := layer(), "slope", "e4m3", backend="auto")
    outputs(model, torch.bfloat16)
    assert handle.layers["fc"].sparsity.products.packs == "A"
    assert {type(each) for each in taken} == {FP8, Sparse24FP8}
    (covered,) = handle.coverage().layers
    assert covered.emulated == {"fprop": "", "dgrad": "slower: 3000 µs, emulated 2000 µs"}


@pytest.mark.parametrize("backend", ["emulate", "semi_structured"])
def test_compiled_block_is_one_graph_and_equals_eager(backend):
    torch._dynamo.reset()
    results, counter = [], CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        model = nn.Sequential(Layer())
        options = {"mvue": "none"}  # tracing the draws takes ten seconds
        handle = sparsify(model, "tsrste", "e4m3", backend=backend, options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle.attach(optimizer)
        handle.store_operands(torch.bfloat16)
        if compiled:
            model[0].compile(backend=counter, fullgraph=True)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(draw(2, 32, 128, seed=step, dtype=torch.float32))
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert counter.frame_count == 1
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-4)
    torch._dynamo.reset()


def test_held_masks_evaluation_and_copies_work_in_fp8():
    model = layer()
    handle = sparsify(model, "sste", "e4m3", backend="semi_structured")
    twin = layer()
    sparsify(twin, "sste", "e4m3", "fp8_sim")
    handle.store_operands(torch.bfloat16)
    copied = copy.deepcopy(model)
    assert copied.fc.sparsity.products.base is model.fc.sparsity.products.base
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
