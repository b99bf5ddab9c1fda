"""Matmuls of matrices in fp8: values, contracts, and which devices have them."""

import itertools

import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.kernels import fp8
from sparsepretrain.kernels.cusparselt import startup

FORMATS = ("e4m3", "e5m2")
no_fp8_matmuls = fp8.no_fp8_matmuls.__wrapped__  # without its cache


def quantized(*shape, seed=0, format="e4m3"):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return kernels.quantize_fp8(x, format)


def given(formats=("e4m3", "e4m3"), m=24, n=48, k=64):
    (a, scale_a), (b, scale_b) = (
        quantized(rows, k, seed=rows, format=format)
        for rows, format in zip((m, n), formats, strict=True)
    )
    return a, b, scale_a, scale_b


@pytest.mark.parametrize("formats", [*itertools.product(FORMATS, FORMATS)][:3])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_matmuls_equal_fp64_matmuls_of_the_values(formats, out_dtype, has_bias, backend):
    a, b, scale_a, scale_b = operands = given(formats)
    bias = torch.linspace(-2, 2, 48).bfloat16() if has_bias else None
    got = kernels.matmul_fp8(*operands, bias, out_dtype=out_dtype, backend=backend)
    left, right = a.double() / scale_a, (b.double() / scale_b).t()
    expected = left @ right + (bias.double() if has_bias else 0)
    # one rounding of the result and of the bias; sums of 64, and three factors, in fp32
    slack = torch.finfo(out_dtype).eps * (expected.abs() + 2) + 70 * 2.0**-24 * (
        left.abs() @ right.abs()
    )
    assert got.dtype == out_dtype and got.shape == (24, 48)
    assert bool(((got.double() - expected).abs() <= slack).all())


def test_the_reference_takes_any_layout_and_size():
    a, b, *scales = given(m=5, n=7, k=11)
    got = kernels.matmul_fp8(
        a.t().contiguous().t(), b, *scales, out_dtype=torch.float32, backend="reference"
    )
    expected = kernels.dequantize_fp8(a, scales[0]) @ kernels.dequantize_fp8(b, scales[1]).t()
    torch.testing.assert_close(got, expected)


def test_unknown_backend_of_matmul_fp8_is_refused():
    with pytest.raises(ValueError, match="backend='triton'"):
        kernels.matmul_fp8(*given(), out_dtype=torch.float32, backend="triton")


@pytest.fixture
def device(monkeypatch):
    """A GPU of compute capability 9.0 whose products are computed on the CPU."""
    randn, generator = torch.randn, torch.Generator
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(torch, "randn", lambda size, generator, device, dtype: randn(size))
    return torch.device("cuda", 0)


def test_device_needs_cuda_and_fp8_tensor_cores(device, monkeypatch):
    assert no_fp8_matmuls(device) == ""
    assert "on cpu" in no_fp8_matmuls(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "compute capability 8.6" in no_fp8_matmuls(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in no_fp8_matmuls(device)


@pytest.mark.parametrize(
    ("fault", "told"), [(lambda y: y.neg(), "e4m3 and e4m3"), (lambda y: y[999], "index 999")]
)
def test_device_with_wrong_or_failing_fp8_matmuls_is_refused(device, fault, told, monkeypatch):
    multiply = torch._scaled_mm

    def faulty(*args, **options):
        try:
            return fault(multiply(*args, **options))
        except IndexError as error:
            raise RuntimeError(str(error)) from error

    monkeypatch.setattr(torch, "_scaled_mm", faulty)
    assert told in no_fp8_matmuls(device)


def test_packed_fp8_products_are_tested_in_their_own_layouts(device, monkeypatch):
    tested = []
    monkeypatch.setattr(startup, "fastest", tested.append)
    assert startup.fault(device, startup.FP8) is None
    assert {(p.dtype, p.out_dtype) for p in tested} == {(torch.float8_e4m3fn, torch.float32)}
    assert all(p.transpose_dense and not p.bias for p in tested)
    assert {p.transpose_result for p in tested} == {False, True}


def test_fp8_matmul_compiles_to_one_graph():
    def product(a, b, scale_a, scale_b):
        return kernels.matmul_fp8(a, b, scale_a, scale_b, out_dtype=torch.bfloat16) * 2

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given()), product(*given()))
