"""cuSPARSELt behind :mod:`sparsepretrain.kernels.packed24`, and which of its algorithms to trust.

Some algorithms of some versions give wrong numbers, or other ones every time (pytorch#155333), and
the default one is rarely the fastest. So a product is run by the fastest of those that come close
to the product in fp64 and give the same bits twenty times. They are looked for at the first product
of a size, never while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsepretrain.kernels.hardware import FP8_SLACK, broken, no_cuda, packed_columns
from sparsepretrain.kernels.timing import medians

REPEATS = 20
"""Runs of an algorithm that must give the same bits."""
CHECKED = 2048
"""Most columns of a product that are compared with fp64; a 7B model's product of 16k tokens would
take 1.4 GB for each fp64 tensor."""
NUMBERS = 64
"""Algorithms to try where the library's search, which counts them, refuses."""


class Algorithm(NamedTuple):
    """Key of a kernel of the library."""

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
    """Version of the library that torch was built with, or "none"."""
    number = torch.backends.cusparselt.version()  # 1000·major + 100·minor + patch
    return "none" if number is None else f"{number // 1000}.{number // 100 % 10}.{number % 100}"


@functools.cache
def unsupported(device: torch.device, *, fp8: bool = False) -> str | None:
    """Return the reason for which ``device`` has no sparse matmuls (16 bits or fp8), or None.

    That torch has the library says nothing about the device, so small products of every layout are
    tested (:func:`fastest`), once per process.
    """
    if reason := no_cuda(device):
        return reason
    if torch.version.hip is not None or not torch.backends.cusparselt.is_available():
        return "this build of torch has no cuSPARSELt"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return "compute capability {}.{} has no sparse tensor cores (8.0)".format(*capability)
    types = [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16)]
    layouts = [(True, True, True), (False, False, False), (False, True, False)]
    if fp8:  # the dense operand is transposed, and scales and bias come after the product
        types = [(torch.float8_e4m3fn, torch.float32)]
        layouts = [(True, True, False), (True, False, False)]
    for pair, layout in itertools.product(types, layouts):
        try:
            fastest(Problem(device, *pair, 256, 128, 512, *layout))
        except RuntimeError as error:
            if broken(error, device):
                raise
            return str(error)
    return None


def compress_24(x: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.compress_24`."""
    packed: Tensor = torch._cslt_compress(x)
    (m, k), columns = x.shape, packed_columns(x.shape[1], x.dtype)
    if packed.numel() != m * columns:
        raise RuntimeError(
            f"cuSPARSELt {version()} packs {m} × {k} in {packed.nbytes} bytes, "
            f"not in {m * columns * x.itemsize}"
        )
    return packed.view(m, columns)  # torch 2.9 returns one row


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
    """Return the fastest algorithm among those that are right and repeat, on random numbers.

    Raises:
        RuntimeError: there is none, or a CUDA graph is being captured.
        torch.AcceleratorError: an algorithm broke the device; nothing runs on it any more.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{_name(problem)} is new: run it once before a CUDA graph is captured")
    sample = _sample(problem)
    tried = list(_candidates(problem, *sample.operands))
    right = [each for each in tried if trusted(problem, each, sample)]
    if not right:
        raise RuntimeError(
            f"{_name(problem)}: none of {len(tried)} algorithms of cuSPARSELt {version()} is right "
            f"and gives the same bits {REPEATS} times"
        )

    def seconds(algorithm: Algorithm) -> float:  # one by one: each graph keeps its result
        run = functools.partial(_multiply, problem, algorithm, *sample.operands)
        return medians({"": run}, problem.device)[""]

    return min(right, key=seconds)


class _Sample(NamedTuple):
    """Random operands of a problem, and some columns of their product in fp64."""

    operands: tuple[Tensor, Tensor, Tensor | None]  # packed, dense, bias
    step: int  # distance between compared columns
    expected: Tensor
    slack: Tensor


def _sample(problem: Problem) -> _Sample:
    device, dtype, out, m, n, k, transposed, _, has_bias = problem
    random = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device)

    wide = draw(m, k)
    fours = wide.view(m, -1, 4)
    fours.scatter_(-1, fours.abs().argsort(-1)[..., :2], 0.0)
    sparse, dense = wide.to(dtype), (draw(n, k) if transposed else draw(k, n)).to(dtype)
    bias = draw(m).to(out) if has_bias else None
    # evenly spaced columns rather than the first ones: each tile of the kernel has some of them
    step = -(-n // CHECKED)
    left, right = sparse.double(), (dense.t() if transposed else dense)[:, ::step].double()
    expected, spread = left @ right, left.abs() @ right.abs()
    if bias is not None:
        expected += bias.double()[:, None]
    # one rounding of the result, and what sums may lose in any order
    sums = FP8_SLACK if dtype.itemsize == 1 else 2.0**-16
    slack = torch.finfo(out).eps * expected.abs() + sums * spread
    return _Sample((compress_24(sparse), dense, bias), step, expected, slack)


def trusted(problem: Problem, algorithm: Algorithm, sample: _Sample) -> bool:
    """Return True if the product is close to the expected one, with the same bits every time."""
    run = functools.partial(_multiply, problem, algorithm, *sample.operands)
    try:
        first = run()
        columns = (first.t() if problem.transpose_result else first)[:, :: sample.step]
        if not bool(((columns - sample.expected).abs() <= sample.slack).all()):
            return False
        return all(torch.equal(run(), first) for _ in range(REPEATS - 1))
    except RuntimeError as error:  # refused for this size
        if broken(error, problem.device):
            raise
        return False


def _candidates(
    problem: Problem, packed: Tensor, dense: Tensor, bias: Tensor | None
) -> Iterable[Algorithm]:
    """Return the result of the library's own search, and every algorithm by its number."""
    columns = dense.t() if problem.transpose_dense else dense
    out = None if problem.out_dtype == problem.dtype else problem.out_dtype
    try:
        *found, count = torch._C._cusparselt.mm_search(  # type: ignore[attr-defined]
            packed, columns, bias, None, out, problem.transpose_result
        )
    except RuntimeError as error:  # numbered algorithms may compute layouts that it refuses
        if broken(error, problem.device):
            raise
        return map(Algorithm, range(NUMBERS))
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
