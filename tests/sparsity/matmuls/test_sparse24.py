"""Sparse products of packed operands, by the reference: equal to emulated ones, and chosen so."""

import copy

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels, registry
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import Projection
from sparsepretrain.sparsity.matmuls import policy, sparse24
from sparsepretrain.sparsity.matmuls.three import DENSE
from support.matmul_cases import (
    Stopwatch,
    assert_close,
    cut_groups,
    magnitudes,
    outputs,
    train_in_bf16,
)
from support.operands import into_sparse_phase, packed
from support.small_loops import attached
from support.small_models import Layer, Mixed, draw
from support.sparse_cases import CASES, IDS, PACKED, SETTLED, STEPS
from support.tiny_runs import assert_equal_bits

NAMES = sorted(PACKED)
pytestmark = pytest.mark.usefixtures("semi_structured_device")


def sparsify(model, method, options=None, **settings):
    options = SETTLED.get(method, {}) | (options or {})
    settings = {
        "targets": ["*fc*"],
        "total_steps": STEPS,
        "sparse_matmuls": "semi_structured",
    } | settings
    handle = sp.sparsify(model, method, **options, **settings)
    into_sparse_phase(handle)
    return handle


def same_products(method, options, dtype, monkeypatch, shape=(2, 32), **kind):
    emulated, sparse = Layer(**kind), Layer(**kind)
    sparsify(emulated, method, options, sparse_matmuls="emulate")
    handle = sparsify(sparse, method, options)
    expected, got = outputs(emulated, dtype, shape), outputs(sparse, dtype, shape)
    if sparse.fc.bias is not None:
        assert torch.equal(sparse.fc.bias.grad, emulated.fc.bias.grad)
    assert_close(got, expected, magnitudes(emulated, dtype, shape, monkeypatch), dtype)
    return handle


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("method", NAMES)
def test_sparse_matmuls_equal_emulated_ones(method, kind, bias, dtype, monkeypatch):
    handle = same_products(method, {}, dtype, monkeypatch, kind=kind, bias=bias)
    own = handle.layers["fc"].operands
    assert packed(own.matmuls.now(dtype, True)) == PACKED[method]
    (layer,) = handle.coverage().layers
    assert set(layer.emulated.values()) == {""}


def test_only_layers_that_are_2_to_4_run_sparse():
    models = [nn.Sequential(*(Layer(inputs=64, outputs=64) for _ in range(3))) for _ in range(2)]
    patterns = {"1.fc": "1:4", "2.fc": "dense"}
    policies = ("semi_structured", "emulate")
    sparse, emulated = (
        sparsify(model, "sste", {"patterns": patterns}, sparse_matmuls=policy)
        for model, policy in zip(models, policies, strict=True)
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    for model, handle, optimizer in zip(models, (sparse, emulated), optimizers, strict=True):
        handle.attach(optimizer)
        train_in_bf16(model, optimizer, 0, 2, shape=(2, 8, 64))
    why = {layer.name: layer.emulated for layer in sparse.coverage().layers}
    assert why == {
        "0.fc": {"fprop": "", "wgrad": ""},
        "1.fc": dict.fromkeys(("fprop", "wgrad"), "1:4, not 2:4"),
    }
    for key, value in models[0].state_dict().items():
        torch.testing.assert_close(value, models[1].state_dict()[key], rtol=0.05, atol=1e-3)


VARIANTS = [
    pytest.param(*case, id=name)
    for case, name in zip(CASES, IDS, strict=True)
    if case[1] and case[0] in PACKED and not {"n", "m"} & {*case[1]}  # 2:4
]


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_sparse_matmuls_of_variants_equal_emulated_ones(method, options, monkeypatch):
    same_products(method, options, torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("shape", [(15,), (3, 5), (2, 10), (4, 8), (2, 2, 12)])
@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
def test_any_number_of_tokens_equals_emulation(method, shape, monkeypatch):
    """Zeros fill up the tokens; groups of four that samples cut are emulated, and it is said."""
    handle = same_products(method, {}, torch.bfloat16, monkeypatch, shape=shape)
    (layer,) = handle.coverage().layers
    if method == "tsrste":
        assert layer.emulated == {"fprop": "", "dgrad": "", "wgrad": cut_groups(shape)}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("method", "options", "weights", "gradients"),
    [
        ("ste", {}, 1, 0),
        ("tsrste", {"mvue": "none"}, 2, 0),
        ("slope", {}, 2, 0),
        ("sste", {}, 1, 1),
    ],
)
def test_weights_are_packed_once_per_step(
    method, options, weights, gradients, micro_batches, monkeypatch
):
    model = nn.Sequential(Layer(), nn.Linear(256, 128), Layer())
    handle = sparsify(model, method, options)
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.store_operands(torch.bfloat16)
    handle.choose_matmuls({"0.fc": (2, 8, 128), "2.fc": (2, 8, 128)})
    own = handle.layers["0.fc"].operands
    addresses = [part.data.data_ptr() for part in own._kept[True][:2]]
    calls = []
    monkeypatch.setattr(
        sparse24, "compress_24", lambda x: calls.append(x) or kernels.compress_24(x)
    )
    for step in range(3):
        calls.clear()
        train_in_bf16(model, optimizer, step, step + 1, micro_batches=micro_batches)
        assert len(calls) == 2 * (weights + gradients * micro_batches), "layers × operands"
    assert [part.data.data_ptr() for part in own._kept[True][:2]] == addresses


def test_evaluation_masks_and_copies_are_those_of_emulation():
    model = Layer()
    handle = sparsify(model, "sste")
    handle.store_operands(torch.bfloat16)
    x = draw(2, 8, 128, dtype=torch.float32)
    twin = Layer()
    other = sparsify(twin, "sste", sparse_matmuls="emulate")
    for m in (model, twin, copy.deepcopy(model)):
        outputs(m, torch.bfloat16)
        m.eval()
    assert torch.equal(model(x), twin(x))
    assert torch.equal(handle.masks()["fc"], other.masks()["fc"])
    handle.hold(handle.masks())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.train()(x).shape == (2, 8, 256)
    assert "semi_structured" in repr(handle) and "semi_structured" in repr(model)
    assert torch.equal(sp.densify(model)(x), sp.densify(twin)(x))


def test_held_masks_need_stored_operands():
    handle = sparsify(Layer(), "sste")
    with pytest.raises(ConfigError, match=r"held masks .*store_operands"):
        handle.hold(handle.masks())


def test_operands_are_packed_in_sparse_phases_only():
    model = Layer()
    handle = sparsify(model, "tsrste", {"window": {"start": 0.25}, "dense_tail": 0.25})
    own, kinds = model.fc.operands, []
    for step in (9, 10, 29, 30):
        handle._state.set_step(step)
        kinds.append(packed(own.matmuls.now(torch.bfloat16, True)))
    assert kinds == ["", "ABU", "ABU", ""]
    assert own.matmuls.now(torch.bfloat16, False) is DENSE


def test_coverage_names_emulated_matmuls_and_reasons():
    text = str(sparsify(Mixed(), "ste").coverage()).splitlines()
    assert all("M∘W 2:4 (sparse)" in line for line in text[1:3]) and "sparse" not in text[3]
    assert text[-3:] == [
        "sparse_matmuls=semi_structured: 2 of 3 matmuls are sparse, cuSPARSELt 0.8.1",
        "  emulated: fprop of 1 layer: a convolution",
        "  padded with zeros: fprop of 1 layer: 40 × 256 to 64 × 256 (+60.0% work)",
    ]


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("dense", {}, "dense has no 2:4 operand"),
        ("act24", {}, "the 2:4 operand is an activation"),
        ("ste", {"n": 4, "m": 8}, "4:8, not 2:4"),
        ("ste", {"precision": "fp8_sim"}, "its matmuls are in simulated fp8"),
        ("ste", {"targets": ["fc_conv"]}, "a convolution"),
    ],
)
def test_backend_without_a_supported_matmul_is_refused(method, options, why):
    options = {"targets": ["*fc"], **options}
    with pytest.raises(ConfigError, match=f"semi_structured: .*{why}"):
        sparsify(Mixed(), method, **options)
    model = Mixed()
    model.fc_conv = model.fc_conv if "fc_conv" in options["targets"] else None
    coverage = sparsify(model, method, **options, sparse_matmuls="auto").coverage()
    assert coverage.sparse_matmuls == "auto"
    assert method == "dense" or coverage.chosen.endswith(f"all matmuls are emulated: {why}")


def test_unsupported_machine_is_refused_or_emulated(monkeypatch):
    reason = "this machine has no CUDA device"
    monkeypatch.setattr(policy, "unsupported", lambda device, *_: reason)
    with pytest.raises(ConfigError, match=f"semi_structured: no matmul can be sparse: {reason}"):
        sparsify(Layer(), "sste")
    model, twin = Layer(), Layer()
    handle = sparsify(model, "sste", sparse_matmuls="auto")
    sparsify(twin, "sste", sparse_matmuls="emulate")
    assert_equal_bits(outputs(model, torch.bfloat16), outputs(twin, torch.bfloat16))
    assert handle.coverage().chosen == f"sparse_matmuls=auto: all matmuls are emulated: {reason}"
    assert handle.backend["matmuls"] == []


def test_moved_model_checks_the_new_device(monkeypatch):
    model = Layer()
    handle = sparsify(model, "sste")
    monkeypatch.setattr(policy, "unsupported", lambda device, *_: f"not on {device.type}")
    model.to("cpu")  # back, from a GPU
    assert handle.layers["fc"].operands.matmuls.packs == ""
    with pytest.raises(ConfigError, match="semi_structured: not on cpu"):
        outputs(model, torch.bfloat16)


def test_sharded_weights_are_emulated():
    with pytest.raises(ConfigError, match=r"sparse_matmuls=semi_structured .*sharding"):
        sparsify(Layer(), "ste").prepare_sharding()
    handle = sparsify(Layer(), "ste", sparse_matmuls="auto")
    handle.prepare_sharding()
    assert handle.coverage().chosen.endswith("all matmuls are emulated: its weight is sharded")


def test_fp32_matmuls_are_refused_or_emulated():
    message = (
        "sparse_matmuls=semi_structured: sparse matmuls exist in fp16 and bf16, not in float32"
    )
    model = Layer()
    sparsify(model, "ste")
    with pytest.raises(ConfigError, match=message):
        model(draw(2, 8, 128, dtype=torch.float32))
    with pytest.raises(ConfigError, match=message):
        sparsify(Layer(), "ste").store_operands(torch.float32)
    model = Layer()
    handle = sparsify(model, "ste", sparse_matmuls="auto")
    model(draw(2, 8, 128, dtype=torch.float32))
    assert "not in float32" in handle.coverage().chosen


def test_auto_uses_the_faster_matmul(monkeypatch):
    clock = Stopwatch(monkeypatch, A=0.5, B=1.5, U=0.9)
    model = nn.Sequential(Layer(), nn.Linear(256, 128), Layer())
    handle = sparsify(model, "tsrste", sparse_matmuls="auto")
    assert "not tried yet" in str(handle.coverage())
    handle.store_operands(torch.bfloat16)
    x = draw(2, 8, 128, dtype=torch.float32)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
    assert clock.calls == 3, "layers of one size are tried once"
    assert [layer.operands.matmuls.packs for layer in handle.layers.values()] == ["AU", "AU"]
    coverage = handle.coverage()
    assert coverage.chosen == "sparse_matmuls=auto: 4 of 6 matmuls are sparse, cuSPARSELt 0.8.1"
    assert handle.backend["chosen"] == coverage.chosen
    assert coverage.layers[0].emulated["dgrad"] == "slower: 1500 µs, emulated 1000 µs"
    table = {row["matmul"]: row for row in handle.backend["matmuls"]}
    runs = {product: row["runs"] for product, row in table.items()}
    assert runs == {"fprop": "sparse", "dgrad": "emulated", "wgrad": "sparse"}
    assert table["dgrad"]["tokens"] == 16 and table["dgrad"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(("micro_batches", "packs"), [(1, "U"), (16, "AU")])
def test_auto_counts_the_packing_of_weights_once_per_step(micro_batches, packs, monkeypatch):
    """0.9 + 1 of an emulated product in one micro-batch, 0.9 + 1/16 in each of sixteen."""
    Stopwatch(monkeypatch, packing=1.0, A=0.9, B=1.1, U=0.9)
    model = Layer()
    handle = sparsify(model, "tsrste", sparse_matmuls="auto")
    handle.store_operands(torch.bfloat16)
    handle.choose_matmuls({"fc": (2, 8, 128)}, micro_batches)
    assert model.fc.operands.matmuls.packs == packs


@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
def test_only_the_packed_operand_of_a_timing_has_zeros(method, monkeypatch):
    """Zeros on the other side would make the dense product that ``auto`` compares with faster."""
    Stopwatch(monkeypatch, A=0.5, B=0.5, U=0.5, P=0.5)
    seen = []

    def multiply(packed, dense, *rest, **flags):
        seen.append((dense == 0).float().mean().item())
        return kernels.matmul_24(packed, dense, *rest, **flags)

    monkeypatch.setattr(sparse24, "matmul_24", multiply)
    handle = sparsify(Layer(), method, sparse_matmuls="auto")
    handle.store_operands(torch.bfloat16)
    handle.choose_matmuls({"fc": (2, 256, 128)})
    assert len(seen) >= len(PACKED[method]) and max(seen) < 1e-3


@pytest.mark.parametrize("method", ["tsrste", "sdgp"])
def test_token_counts_share_padded_matmul_sizes(method, monkeypatch):
    """An algorithm is searched for once for each of them."""
    sizes = set()

    def multiply(packed, dense, bias=None, **flags):
        sizes.add((tuple(packed.shape), tuple(dense.shape), *flags.values()))
        return kernels.matmul_24(packed, dense, bias, **flags)

    monkeypatch.setattr(sparse24, "matmul_24", multiply)
    model = Layer()
    sparsify(model, method)
    for tokens in (4, 12, 100, 256, 508):
        outputs(model, torch.bfloat16, (1, tokens))
    assert len(sizes) == len(PACKED[method])
    outputs(model, torch.bfloat16, (2, 258 * 2))
    assert len(sizes) == 2 * len(PACKED[method])


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize("sparse_matmuls", ["semi_structured", "auto"])
def test_failing_matmul_is_emulated(sparse_matmuls, kind, monkeypatch):
    Stopwatch(monkeypatch, A=0.5, U=0.5)
    reason = "a packed 256 × 512 × 128 product in bfloat16: none of 9 algorithms is right"

    def multiply(packed, dense, *rest, **flags):
        if not flags["transpose_result"]:
            raise kind(reason)
        return kernels.matmul_24(packed, dense, *rest, **flags)

    monkeypatch.setattr(sparse24, "matmul_24", multiply)
    model = Layer()
    handle = sparsify(model, "sste", sparse_matmuls=sparse_matmuls)
    outputs(model, torch.bfloat16, (2, 8))
    (layer,) = handle.coverage().layers
    assert layer.emulated == {"fprop": "", "wgrad": reason}


def test_broken_device_raises_instead_of_emulating(monkeypatch):
    def fail(*_, **__):
        raise torch.AcceleratorError("algorithm 3 of cuSPARSELt 0.8.1 broke the device")

    monkeypatch.setattr(sparse24, "matmul_24", fail)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    model = Layer()
    sparsify(model, "sste")
    with pytest.raises(torch.AcceleratorError, match="algorithm 3"):
        outputs(model, torch.bfloat16)


@pytest.mark.parametrize("name", ["auto", "semi_structured"])
def test_a_type_that_fails_the_start_up_test_is_never_tried(name, monkeypatch):
    def unsupported(device, *dtypes):
        return "fp16 breaks this device" if dtypes == (torch.float16,) else None

    monkeypatch.setattr(policy, "unsupported", unsupported)
    monkeypatch.setattr(sparse24, "matmul_24", None)  # a call would be a TypeError
    model = Layer()
    handle = sparsify(model, "sste", sparse_matmuls=name)
    if name == "semi_structured":
        with pytest.raises(ConfigError, match="semi_structured: fp16 breaks this device"):
            outputs(model, torch.float16)
        return
    outputs(model, torch.float16)
    (layer,) = handle.coverage().layers
    assert layer.emulated == dict.fromkeys(("fprop", "wgrad"), "fp16 breaks this device")


@pytest.mark.parametrize(
    "method",
    ["sste", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tsrste", "slope", "sdgp"))],
)
def test_a_compiled_layer_with_packed_operands_is_one_graph(method):
    """The matmuls are chosen before; dynamo of torch 2.11 cannot trace how they are built."""
    model = Layer()
    handle = sparsify(model, method, total_steps=10)
    expected = outputs(model, torch.bfloat16)
    assert handle.layers["fc"].operands.matmuls.packs
    model.fc.compile(backend="aot_eager", fullgraph=True)
    got = outputs(model, torch.bfloat16)
    assert_equal_bits(got[:2], expected[:2])  # dW of another micro-batch has other draws


def test_operand_that_is_not_2_4_is_an_error(monkeypatch):
    class Wrong(registry.get("method", "ste")):
        def project(self, weight, layer):
            return Projection(weight.clone(), None)

    monkeypatch.setitem(registry._registered["method"], "ste", Wrong)
    model = Layer()
    sparsify(model, "ste")
    with pytest.raises(ValueError, match="more than two non-zeros"):
        outputs(model, torch.bfloat16)


@pytest.mark.parametrize("choice", [True, False])
def test_samples_are_packed_without_a_transpose(choice, monkeypatch):
    """U(G) is stored by features, so that nothing turns it; a method may have no such choice."""
    drawn, packed, dtype = [], [], torch.bfloat16

    class Own(registry.get("method", "sste")):
        def wgrad_gradient(self, grad, key):
            return super().wgrad_gradient(grad, key)

    def mvue(*args, **options):
        drawn.append(kernels.mvue24.mvue(*args, **options))
        return drawn[-1]

    monkeypatch.setitem(vars(kernels), "mvue", mvue)
    monkeypatch.setattr(
        sparse24, "compress_24", lambda x: packed.append(x) or kernels.compress_24(x)
    )
    expected, got = Layer(), Layer()
    sparsify(expected, "sste")
    if not choice:
        monkeypatch.setitem(registry._registered["method"], "sste", Own)
    sparsify(got, "sste")
    shape = 2, 256  # without zeros to fill up tokens
    assert_equal_bits(outputs(expected, dtype, shape), outputs(got, dtype, shape))
    assert (packed[-1].data_ptr() == drawn[-1].data_ptr()) == choice
