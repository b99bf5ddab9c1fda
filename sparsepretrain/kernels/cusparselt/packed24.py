"""cuSPARSELt behind :mod:`sparsepretrain.kernels.packed24`, and which of its algorithms to trust.

Some algorithms of some versions give wrong numbers, or other ones every time (pytorch#155333), and
the default one is rarely the fastest. So a product is run by the fastest of those that come close
to the product in fp64 and give the same bits twenty times. They are looked for at the first product
of a size, never while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsepretrain.kernels.common import FP8_SLACK, no_cuda

REPEATS = 20
"""Runs of an algorithm that must give the same bits."""
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Compute capabilities that the library names kernels for (its versions 0.8.0 and 0.8.1)."""


class Algorithm(NamedTuple):
    """What selects a kernel of the library."""

    id: int
    split_k: int = 1
    split_k_mode: int = -1


class Problem(NamedTuple):
    """A kind of product: (m, k), packed, times (k, n)."""

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    m: int
    n: int
    k: int
    transpose_dense: bool
    transpose_result: bool
    bias: bool


def version() -> str:
    """Of the library that torch has loaded; it need not be the one that torch was built with."""
    number = torch.backends.cusparselt.version()
    return "none" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@functools.cache
def unsupported(device: torch.device, *, fp8: bool = False) -> str | None:
    """Why ``device`` multiplies no packed matrices of fp16 and bf16, or of fp8; None: it does.

    That torch has the library says nothing about the device, so small products of every layout are
    tested (:func:`fastest`), once per process.
    """
    if reason := no_cuda(device):
        return reason
    if torch.version.hip is not None or not torch.backends.cusparselt.is_available():
        return "this build of torch has no cuSPARSELt"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        found = "{}.{}".format(*capability)
        listed = ", ".join("{}.{}".format(*known) for known in CAPABILITIES)
        return f"compute capability {found} is none of those with kernels ({listed})"
    types = [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16)]
    layouts = [(True, True, True), (False, False, False), (False, True, False)]
    if fp8:  # the dense operand is transposed, and scales and bias come after the product
        types = [(torch.float8_e4m3fn, torch.float32)]
        layouts = [(True, True, False), (True, False, False)]
    for pair, layout in itertools.product(types, layouts):
        try:
            fastest(Problem(device, *pair, 256, 128, 512, *layout))
        except RuntimeError as error:
            return str(error)
    return None


def compress_24(x: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.compress_24`."""
    packed: Tensor = torch._cslt_compress(x)
    return packed.view(x.shape[0], -1)  # older versions of torch return one row


def matmul_24(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    transpose_dense: bool,
    transpose_result: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """See :func:`sparsepretrain.kernels.matmul_24`."""
    n, k = dense.shape if transpose_dense else dense.shape[::-1]
    types = dense.device, dense.dtype, out_dtype
    layout = transpose_dense, transpose_result, bias is not None
    problem = Problem(*types, packed.shape[0], n, k, *layout)
    return _multiply(problem, fastest(problem), packed, dense, bias)


@functools.cache
def fastest(problem: Problem) -> Algorithm:
    """The fastest algorithm among those that are right and repeat, on random numbers.

    Raises:
        RuntimeError: there is none, or a CUDA graph is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{_name(problem)} is new: run it once before a CUDA graph is captured")
    random = torch.Generator(problem.device).manual_seed(0)
    device, m, n, k = problem.device, problem.m, problem.n, problem.k
    sparse, dense, bias = (
        torch.randn(size, generator=random, device=device).to(problem.dtype).double()
        for size in ((m, k), (n, k) if problem.transpose_dense else (k, n), (m,))
    )
    fours = sparse.view(m, -1, 4)
    fours.scatter_(-1, fours.abs().argsort(-1)[..., :2], 0.0)
    columns = dense.t() if problem.transpose_dense else dense
    expected, spread = sparse @ columns, sparse.abs() @ columns.abs()
    if problem.bias:
        expected += bias[:, None]
    if problem.transpose_result:
        expected, spread = expected.t(), spread.t()
    # one rounding of the result, and what sums may lose in any order
    sums = FP8_SLACK if problem.dtype.itemsize == 1 else 2.0**-16
    slack = torch.finfo(problem.out_dtype).eps * expected.abs() + sums * spread
    packed = compress_24(sparse.to(problem.dtype))
    given = packed, dense.to(problem.dtype), bias.to(problem.out_dtype) if problem.bias else None

    def run(algorithm: Algorithm) -> Callable[[], Tensor]:
        return functools.partial(_multiply, problem, algorithm, *given)

    tried = list(_candidates(problem, *given))
    right = [each for each in tried if trusted(run(each), expected, slack)]
    if not right:
        raise RuntimeError(
            f"{_name(problem)}: none of {len(tried)} algorithms of cuSPARSELt {version()} is right "
            f"and gives the same bits {REPEATS} times"
        )
    return min(right, key=lambda each: seconds(run(each), device))


def trusted(run: Callable[[], Tensor], expected: Tensor, slack: Tensor) -> bool:
    """Whether ``run`` comes within ``slack`` of ``expected``, with the same bits every time."""
    try:
        first = run()
        if not bool(((first - expected).abs() <= slack).all()):
            return False
        return all(torch.equal(run(), first) for _ in range(REPEATS - 1))
    except RuntimeError:  # refused for this size
        return False


def seconds(run: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    """Mean duration of ``calls`` calls in a row, after three to warm up."""
    for _ in range(3):
        run()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda *_: None
    wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return (time.perf_counter() - started) / calls


def _candidates(
    problem: Problem, packed: Tensor, dense: Tensor, bias: Tensor | None
) -> Iterable[Algorithm]:
    """What the library's own search finds, and every algorithm by its number."""
    columns = dense.t() if problem.transpose_dense else dense
    out = None if problem.out_dtype == problem.dtype else problem.out_dtype
    *found, count = torch._C._cusparselt.mm_search(  # type: ignore[attr-defined]
        packed, columns, bias, None, out, problem.transpose_result
    )
    return dict.fromkeys([Algorithm(*found), *map(Algorithm, range(count))])


def _multiply(
    problem: Problem, algorithm: Algorithm, packed: Tensor, dense: Tensor, bias: Tensor | None
) -> Tensor:
    columns = dense.t() if problem.transpose_dense else dense
    product: Tensor = torch._cslt_sparse_mm(
        packed,
        columns,
        bias,
        out_dtype=None if problem.out_dtype == problem.dtype else problem.out_dtype,
        transpose_result=problem.transpose_result,
        alg_id=algorithm.id,
        split_k=algorithm.split_k,
        split_k_mode=algorithm.split_k_mode,
    )
    return product


def _name(problem: Problem) -> str:
    dtype = str(problem.dtype).removeprefix("torch.")
    return f"a packed {problem.m} × {problem.k} × {problem.n} product in {dtype}"
