"""Packed products by cuSPARSELt against the reference, and what its algorithms are trusted with."""

import itertools

import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.kernels.cusparselt import packed24 as library
from sparsepretrain.kernels.cusparselt.startup import unsupported
from sparsepretrain.sparsity.matmuls.policy import Case, random_matmul
from sparsepretrain.sparsity.matmuls.sparse24 import packing
from sparsepretrain.sparsity.matmuls.three import DENSE, Estimate


@pytest.fixture(autouse=True)
def supported(device, request):
    named = getattr(request.node, "callspec", None)
    dtype = named.params.get("dtype", torch.bfloat16) if named else torch.bfloat16
    if reason := unsupported(torch.empty(0, device=device).device, dtype):
        pytest.skip(reason)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m, k, n", [(256, 512, 128), (768, 3072, 2048), (64, 192, 40)])
def test_products_are_those_of_the_reference(m, k, n, dtype, device):
    print(f"cuSPARSELt {library.version()}")
    x = kernels.nm_prune(torch.randn(m, k, device=device))[0].to(dtype)
    packed = kernels.compress_24(x)
    assert packed.shape == kernels.compress_24(x.cpu()).shape
    for flags in itertools.product([False, True], repeat=3):
        transpose_dense, transpose_result, has_bias = flags
        dense = torch.randn((n, k) if transpose_dense else (k, n), device=device).to(dtype)
        bias = torch.randn(m, device=device).to(dtype) if has_bias else None
        options = {"transpose_dense": transpose_dense, "transpose_result": transpose_result}
        got = kernels.matmul_24(packed, dense, bias, **options)
        columns = (dense.t() if transpose_dense else dense).double()
        expected, spread = x.double() @ columns, x.double().abs() @ columns.abs()
        if bias is not None:
            expected += bias.double()[:, None]
        got = (got.t() if transpose_result else got).double()
        slack = torch.finfo(dtype).eps * expected.abs() + 2.0**-16 * spread
        assert bool(((got - expected).abs() <= slack).all())


@pytest.mark.cuda
def test_products_repeat_and_can_be_captured(device):
    x = kernels.nm_prune(torch.randn(256, 512, device=device))[0].bfloat16()
    dense = torch.randn(512, 128, device=device).bfloat16()
    packed = kernels.compress_24(x)
    expected = kernels.matmul_24(packed, dense)
    assert all(torch.equal(kernels.matmul_24(packed, dense), expected) for _ in range(100))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.matmul_24(packed, dense)
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1376, 512), (512, 1376), (20, 36)])
@pytest.mark.parametrize("dim", [1, 0])
@pytest.mark.parametrize("operand", ["A", "B", "P", "U"])
def test_padded_matmuls_are_those_in_fp64(operand, dim, sizes, dtype, device):
    case = Case(operand, *sizes, 300, dtype, dim, bias=True)
    left, right, call, bias = random_matmul(case, torch.empty(0, device=device).device)
    names = {"fprop": ("Xf", "A"), "dgrad": ("P", "B"), "wgrad": ("U", "Xw")}[call.name]
    product = getattr(packing(DENSE, operand), call.name)
    pair = product.prepare(left, names[0]), product.prepare(right, names[1])
    got = product(call, *pair, bias)
    left = (left.grad if isinstance(left, Estimate) else left).double()
    expected = call.dense(left, right.double(), None if bias is None else bias.double())
    spread = call.dense(left.abs(), right.double().abs(), None)
    slack = torch.finfo(got.dtype).eps * expected.abs() + 2.0**-16 * spread
    assert got.shape == expected.shape and bool(((got - expected).abs() <= slack).all())
