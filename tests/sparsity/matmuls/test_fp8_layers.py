"""Simulated fp8: published vectors, every method against the table of formats, phases, state."""

import copy
import pickle

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.sparsity.matmuls.fp8 import fp8_matmuls
from sparsepretrain.sparsity.matmuls.three import Estimate, Matmuls
from sparsepretrain.sparsity.methods import sste
from support.golden_vectors import load
from support.operands import OperandTable, into_sparse_phase
from support.small_loops import (
    eager_and_compiled,
    everything,
    gradients,
    recomputed,
    through_disk,
    train,
)
from support.small_models import Blocks, Net, draw
from support.sparse_cases import CONVOLVED, build, every_case, optimizer_for, sparse_layer, sparsify
from support.tiny_runs import assert_equal_bits

HYBRID = {"precision": "fp8_sim"}
REFERENCE = {"precision": {"name": "fp8_sim", "recipe": "reference"}}
both_recipes = pytest.mark.parametrize(
    "precision", [HYBRID, REFERENCE], ids=["hybrid", "reference"]
)
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def rounded(x, format):
    """Independent implementation: per-tensor current scaling, nearest even, back to fp32."""
    dtype, largest = FORMATS[format]
    scale = largest / x.float().abs().max()
    return (x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


def test_layer_equals_the_published_one(monkeypatch):
    g = load("fp8")
    model, _ = sparse_layer("sste", g["sste_w"], g["sste_b"], **REFERENCE)
    torch.testing.assert_close(model[0].sparsity.beta, g["sste_beta"], rtol=1e-6, atol=0)
    draws, mvue = torch.stack([g["sste_r0"], g["sste_r1"]], -1), kernels.mvue
    monkeypatch.setattr(
        sste.kernels, "mvue", lambda x, *, dim, **_: mvue(x, dim=dim, uniforms=draws)
    )
    x = g["sste_x"].clone().requires_grad_()
    y = model(x)
    y.backward(g["sste_gy"])

    def close(value, expected, share):
        atol = share * float(expected.abs().max())
        torch.testing.assert_close(value, expected, rtol=0, atol=atol)

    close(y, g["sste_y"], 1e-3)
    close(x.grad, g["sste_gx"], 1e-3)
    close(model[0].weight.grad, g["sste_gw"], 2e-3)
    close(model[0].bias.grad, g["sste_gb"], 2e-3)


@every_case
@both_recipes
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_operands_have_the_formats_of_the_recipe(method, options, precision, kind):
    """Every matmul equals the fp32 matmul of operands that are pruned first, rounded last."""
    linear = kind == "linear"
    if not linear and (method, options) not in CONVOLVED:
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32)) if linear else nn.Sequential(nn.Conv2d(16, 16, 3))
    plain = copy.deepcopy(model[0])
    sparsifier = sparsify(model, method, targets="0", **options, **precision)
    into_sparse_phase(sparsifier)
    layer = model[0]
    x = draw(*((3, 6, 16) if linear else (2, 16, 5, 5)), seed=1, dtype=torch.float32)
    gy = draw(*plain(x).shape, seed=2, dtype=torch.float32)
    t = OperandTable(layer, x, gy)
    other = "e5m2" if precision is REFERENCE else "e4m3"

    def product(x, weight, g):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = torch.func.functional_call(plain, {"weight": weight}, x)
        y.backward(g)
        return y.detach(), x.grad, weight.grad

    y = product(rounded(t.Xf, "e4m3"), rounded(t.A, "e4m3"), gy)[0]
    dx = product(x, rounded(t.B, other), rounded(t.P, "e5m2"))[1]
    dw = product(rounded(t.Xw, other), t.A, rounded(t.U, "e5m2"))[2] * t.scale
    inputs = x.clone().requires_grad_()
    got = model(inputs)
    got.backward(gy)
    axes = [a for a in range(gy.dim()) if a != (gy.dim() - 1 if linear else 1)]
    for value, expected in (
        (got, y),
        (inputs.grad, dx),
        (layer.weight.grad, dw),
        (layer.bias.grad, gy.sum(axes)),
    ):
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=atol)
    assert (got - product(t.Xf, t.A, gy)[0]).abs().max() > 0, "nothing was rounded"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("estimator", ["approximate", "exact"])
def test_wgrad_samples_g_in_its_dtype_and_stays_unbiased(estimator, dtype):
    """A sample is rounded to the dtype of G, which moves its mean by at most half a unit of it."""
    draws = 4096
    group = draw(4, 8, seed=1).to(dtype)
    grad, seen = group.repeat(draws, 1), []

    def sample(x, order):
        seen.append(x)
        return kernels.mvue(x, dim=0, estimator=estimator, key=1, order=order)

    product = fp8_matmuls("e4m3", True).wgrad
    _, values, scale = product.prepare(Estimate(grad, sample), "U")
    assert seen[0] is grad, "nothing is cast before the draw"
    wide = kernels.mvue(grad.float(), dim=0, estimator=estimator, key=1)
    assert torch.equal(sample(grad, None), wide.to(dtype)), "drawn in fp32, rounded once"
    for drawn, unit in (
        (sample(grad, None), torch.finfo(dtype).eps),
        (kernels.dequantize_fp8(values, scale), torch.finfo(torch.float8_e4m3fn).eps),
    ):
        found = drawn.double().view(draws, 4, 8)
        spread, slack = found.std(0), unit / 2 * group.double().abs()
        assert ((found.mean(0) - group).abs() <= 5 * spread / draws**0.5 + slack).all()


@every_case
def test_evaluation_and_densified_weights_are_not_quantized(method, options):
    model, optimizer, _ = build(method, options | HYBRID, dtype=torch.float32)
    train(model, optimizer, 0, 2)
    x = draw(4, 8, 16, dtype=torch.float32)
    trained = model(x)
    expected = model.eval()(x)
    assert not torch.equal(trained, expected)
    projection = model.fc1.operands.project(model.fc1.weight).forward
    weight = model.fc1.weight.detach() if projection is None else projection
    assert torch.equal(model.fc1(x), nn.functional.linear(x, weight, model.fc1.bias))
    sp.densify(model)
    assert torch.equal(model.fc1.weight, weight) and torch.equal(model(x), expected)


@both_recipes
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_dense_phases_equal_the_dense_method(precision, dtype):
    """STEP before its switch, a window that has not begun, and the dense method are the same."""
    results = []
    for method, options in (
        ("dense", {}),
        ("step", {}),
        ("sste", {"window": {"start": 0.5}}),
        ("tsrste", {"window": {"start": 0.5}}),
    ):
        model, _, _ = build(method, options | precision, dtype=torch.float32)
        x = draw(4, 8, 16, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y = model.fc1(x)
        assert y.dtype == (dtype or torch.float32)
        y.float().square().sum().backward()
        results.append((y, x.grad, model.fc1.weight.grad, model.fc1.bias.grad))
        assert all(t.dtype == torch.float32 for t in results[-1][1:])
    for other in results[1:]:
        assert_equal_bits(list(other), list(results[0]))
    exact = nn.functional.linear(x, model.fc1.weight, model.fc1.bias)
    error = (results[0][0].float() - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.1


@both_recipes
def test_weights_are_quantized_once_per_step(precision, monkeypatch):
    model, optimizer, sparsifier = build("sste", precision, dtype=torch.float32)
    calls, prepare = [], Matmuls.prepare

    def counted(*args):
        calls.append(prepare(*args))
        return calls[-1]

    monkeypatch.setattr(Matmuls, "prepare", counted)
    sparsifier.store_operands()
    train(model, optimizer, 0, 3, micro=2)
    assert len(calls) == 2 * (1 + 3), "once per layer and step, for any number of micro-batches"
    assert (calls[0].B is not None) == (precision is REFERENCE)
    assert calls[-1].A.data.data_ptr() == calls[1].A.data.data_ptr(), "in the same memory"


@both_recipes
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e30])
def test_extreme_gradients_stay_finite(precision, value):
    """All zero, subnormal, or far beyond fp16: the published layer has NaN or infinity here."""
    model, _, _ = build("sste", precision, dtype=torch.float32)
    x = torch.zeros(8, 16) if value == 0 else draw(8, 16, dtype=torch.float32)
    x.requires_grad_()
    y = model.fc1(x)
    y.backward(torch.full_like(y, value))
    for tensor in (y, x.grad, model.fc1.weight.grad, model.fc1.bias.grad):
        assert tensor.isfinite().all()
    for bad in (torch.nan, torch.inf):  # an overflow must be seen by the loss scaler
        model.fc1.weight.grad = None
        model.fc1(x).backward(torch.full_like(y, bad))
        assert not model.fc1.weight.grad.isfinite().any()


@both_recipes
def test_loss_scale_does_not_change_gradients(precision):
    """Power-of-two scales change nothing: current scaling cancels them."""
    results = []
    for scale in (1.0, 2.0**20):
        model, _, _ = build("srste", precision, dtype=torch.float32)
        (model(draw(4, 8, 16, dtype=torch.float32)).square().sum() * scale).backward()
        results.append({k: g / scale for k, g in gradients(model).items()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


@every_case
@both_recipes
def test_resumed_copied_and_recomputed_models_are_bit_exact(method, options, precision):
    results = []
    for kind in ("plain", "recomputed", "copied", "pickled", "resumed"):
        model = (recomputed(Net, False) if kind == "recomputed" else Net)(torch.float32)
        sparsifier = sparsify(model, method, **options, **precision)
        optimizer = optimizer_for(method, model.parameters())
        sparsifier.attach(optimizer)
        train(model, optimizer, 0, 2, micro=4)
        if kind == "copied":
            model = copy.deepcopy(model)
        elif kind == "pickled":
            model = pickle.loads(pickle.dumps(model))
        elif kind == "resumed":
            saved = through_disk(everything(model, optimizer, sparsifier))
            model, optimizer, sparsifier = build(
                method, options | precision, dtype=torch.float32, seed=7
            )
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sparsifier.load_state_dict(saved[2])
        model(draw(8, 8, 16, seed=9, dtype=torch.float32)).square().sum().backward()
        results.append(gradients(model))
    for other in results[1:]:
        assert_equal_bits(other, results[0])


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("method", "precision", "dtype", "convolution"),
    [
        ("dense", HYBRID, None, False),
        ("sste", REFERENCE, None, True),
        ("sdgp", HYBRID, torch.bfloat16, False),
    ],
)
def test_compiled_block_is_one_graph_and_equals_eager(
    method, precision, dtype, convolution, backend
):
    shape = (2, 16, 4, 4) if convolution else (4, 8, 16)

    def run(compile):
        torch.manual_seed(0)
        layer = nn.Conv2d(16, 16, 3, padding=1)
        model = Blocks(nn.Sequential(layer) if convolution else Net(torch.float32))
        options = {"mvue": "none", "targets": "block.0"} if convolution else {"targets": "*fc*"}
        sparsifier = sparsify(model, method, **precision, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sparsifier.attach(optimizer)
        compile(model.block)
        for step in range(3):
            x = draw(*shape, seed=step, dtype=torch.float32)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                y = model(x)
            optimizer.zero_grad()
            y.float().square().mean().backward()
            last = gradients(model)
            optimizer.step()
        return last

    eager, compiled, graphs = eager_and_compiled(run, backend)
    for name, expected in eager.items():
        # Two graphs may differ in the last bit of bf16, or of an fp8 value next to a tie. In bf16
        # the gradients differed by 0.4 to 2.3 %: four seeds, with and without sdgp's epsilon.
        error = (compiled[name] - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype is None else 4e-2), name
    assert graphs == 1


@both_recipes
def test_precision_is_in_coverage_and_repr(precision):
    model, _, sparsifier = build("sste", precision)
    name = "reference" if precision is REFERENCE else "hybrid"
    other = "e5m2" if precision is REFERENCE else "e4m3"
    assert str(sparsifier.coverage()).splitlines()[-1] == (
        f"fp8_sim {name}: fprop e4m3×e4m3, dgrad and wgrad e5m2×{other}; evaluation without fp8"
    )
    assert repr(sparsifier) == f"Sparsifier(sste 2:4, 2 layers, fp8_sim {name}, step 0)"
    assert f"sste 2:4, fp8_sim {name}" in repr(model)
    assert build("sste")[2].coverage().precision is None
