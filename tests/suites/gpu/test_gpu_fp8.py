"""Matmuls in fp8 on a device against fp64, and layers against simulated ones."""

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.kernels.cusparselt.startup import FP8, unsupported
from sparsepretrain.kernels.hardware import FP8_SLACK


@pytest.fixture(autouse=True)
def supported(device):
    if reason := kernels.no_fp8_matmuls(torch.empty(0, device=device).device):
        pytest.skip(reason)


@pytest.mark.cuda
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("m, n, k", [(256, 128, 512), (2048, 3072, 768), (37, 48, 80)])
def test_products_are_those_of_the_values(m, n, k, format, out_dtype, backend, device):
    a, scale_a = kernels.quantize_fp8(torch.randn(m, k, device=device), format)
    b, scale_b = kernels.quantize_fp8(torch.randn(n, k, device=device), "e4m3")
    bias = torch.randn(n, device=device).bfloat16()
    given = a, b, scale_a, scale_b, bias
    got = kernels.matmul_fp8(*given, out_dtype=out_dtype, backend=backend)
    left, right = a.double() / scale_a, (b.double() / scale_b).t()
    expected, spread = left @ right + bias.double(), left.abs() @ right.abs()
    sums = FP8_SLACK if backend is None else 2.0**-16
    slack = torch.finfo(out_dtype).eps * (expected.abs() + bias.abs()) + sums * spread
    assert bool(((got.double() - expected).abs() <= slack).all())


@pytest.mark.cuda
@pytest.mark.parametrize("sparse_matmuls", ["emulate", "semi_structured"])
@pytest.mark.parametrize("method", ["sste", "tsrste", "sdgp"])
def test_layers_are_those_of_simulated_fp8(method, sparse_matmuls, device):
    where = torch.empty(0, device=device).device
    reason = unsupported(where, FP8) if sparse_matmuls != "emulate" else None
    if reason:
        pytest.skip(reason)
    found = []
    for name, kind in (("fp8_sim", "emulate"), ("fp8", sparse_matmuls)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 1024, device=device))
        precision = {"name": name, "recipe": "e4m3"}
        sp.sparsify(
            model,
            method,
            targets="0",
            precision=precision,
            sparse_matmuls=kind,
            total_steps=100,
        )
        x = torch.randn(4, 256, 512, device=device, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.backward(torch.randn(4, 256, 1024, device=device).bfloat16())
        found.append((y, x.grad, model[0].weight.grad))
    for a, b in zip(*found, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 1e-2
