"""Gated activations in Triton, forward and backward, against the reference in fp64."""

import pytest
import torch

from sparsepretrain.kernels import geglu, swiglu
from support.parity import DTYPES
from support.same_bits import DEVICE, assert_same

GATED = [geglu, swiglu]
# fp32: a few roundings, and |exponent|·2⁻²⁴ from the exponential; else one rounding at the end
TOLERANCE = {torch.float32: 8e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FLOOR = 1e-6


def random(shape, seed, dtype, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to(DEVICE, dtype)


def check(gated, x, grad):
    near = x.detach().requires_grad_()
    wide = x.detach().cpu().double().requires_grad_()
    y, expected = gated(near, backend="triton"), gated(wide, backend="reference")
    assert y.dtype == x.dtype and y.shape == expected.shape
    y.backward(grad)
    expected.backward(grad.cpu().double())
    assert near.grad.shape == x.shape and near.grad.dtype == x.dtype
    for got, wanted in ((y, expected), (near.grad, wide.grad)):
        torch.testing.assert_close(
            got.detach().cpu().double(), wanted.detach(),
            rtol=TOLERANCE[x.dtype], atol=FLOOR,
        )  # fmt: skip


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_equal_fp64(gated, dtype):
    """Any number of axes; matrices are in tests/kernels/test_block_properties.py."""
    for shape in ((3, 5, 26), (8,)):
        grad = random((*shape[:-1], shape[-1] // 2), 2, dtype)
        check(gated, random(shape, 1, dtype), grad)
    deep = random((3, 4, 5, 6), 5, dtype).permute(2, 0, 1, 3)
    check(gated, deep, random((5, 3, 4, 3), 6, dtype))
    column_major = random((20, 36), 3, dtype).t()
    assert gated(column_major, backend="triton").stride() == (1, 36), "layout follows"


@pytest.mark.parametrize("gated", GATED)
def test_large_and_special_gates(gated):
    gates = [0.0, -0.0, 1e-45, 30.0, -30.0, 200.0, -200.0, 1e30, -1e30, 3e38, float("inf")]
    x = torch.tensor([*[2.0] * len(gates), *gates], device=DEVICE, requires_grad=True)
    y = gated(x, backend="triton")
    y.sum().backward()
    finite = torch.tensor([*(2.0 * max(g, 0) for g in gates)], device=DEVICE)
    saturated = x[len(gates) :].detach().abs() > 16
    torch.testing.assert_close(y[saturated].detach(), finite[saturated], rtol=1e-6, atol=1e-6)
    slope = 2.0 * (x[len(gates) :].detach() > 0)
    last = torch.isfinite(x[len(gates) :]) & saturated
    got = x.grad[len(gates) :]
    torch.testing.assert_close(got[last], slope[last], rtol=1e-6, atol=1e-6)
    assert gated is swiglu or got[-1] == 2, "the slope of GELU has a limit"


@pytest.mark.parametrize("gated", GATED)
def test_nan_propagates(gated):
    x = torch.tensor([1.0, float("nan"), 1.0, float("nan"), 1.0, 1.0], device=DEVICE)
    x.requires_grad_()
    y = gated(x, backend="triton")
    y.sum().backward()
    assert y.isnan().tolist() == [True, True, False]
    # of (value, gate) = (1, NaN): both; of (NaN, 1): that of the gate, which the value multiplies
    assert x.grad.isnan().tolist() == [True, False, False, True, True, False]


@pytest.mark.parametrize("gated", GATED)
def test_offsets_beyond_32_bits(gated):
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=DEVICE)
    x = storage.as_strided((3, 4), (2**30 + 8, 1))
    x.copy_(random((3, 4), 7, torch.bfloat16))
    wide = x.clone(memory_format=torch.contiguous_format).requires_grad_()
    near = x.detach().requires_grad_()
    grad = random((3, 2), 8, torch.bfloat16)
    results = [gated(t, backend="triton") for t in (near, wide)]
    for result in results:
        result.backward(grad)
    assert_same(results[0].detach(), results[1].detach())
    assert_same(near.grad.contiguous(), wide.grad)


def test_no_second_derivative():
    x = random((2, 4), 9, torch.float32).requires_grad_()
    grad = torch.autograd.grad(geglu(x, backend="triton").sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="gated_backward"):
        grad.sum().backward()
