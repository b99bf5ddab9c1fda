"""cuSPARSELt behind :mod:`sparsepretrain.kernels.packed24`, and which of its algorithms to trust.

Some algorithms of some versions give wrong numbers, or other ones every time (pytorch#155333), and
the default one is rarely the fastest. So a product is run by the fastest of those that come close
to the product in fp64 and give the same bits twenty times. A search takes tenths of a second: the
result is kept in the user's cache directory, and sizes that first appear in training take the
algorithm of a similar size (:func:`fastest`). Nothing is searched while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from sparsepretrain.errors import one_line
from sparsepretrain.kernels.cusparselt.choices import Key, drop_choice, load_choice, save_choice
from sparsepretrain.kernels.hardware import FP8_SLACK, broken, packed_columns
from sparsepretrain.kernels.timing import medians, once

REPEATS = 20
"""Runs of an algorithm that must give the same bits."""
SUMS = 2.0**-16
"""Error that a sum in fp32 may have in any order, in units of the sum of magnitudes."""
CHECKED = 2048
"""Most columns of a product that are compared with fp64; a 7B model's product of 16k tokens would
take 1.4 GB for each fp64 tensor."""
NUMBERS = 64
"""Algorithms to try where the library's search, which counts them, refuses."""
MEASURED = 3
"""Algorithms whose time is measured: the fastest by a single run among those that repeat their
bits. A measurement takes a captured graph and seven rounds of 2 ms."""
LIBRARY = "libcusparseLt.so.0"
"""Name under which torch loads the library."""


SLOW_VERSIONS = {
    "0.8.0": "is slower on H100 and L4 than versions before and after it (release notes of 0.8.1): "
    "pip install 'nvidia-cusparselt-cu13>=0.8.1'"
}
"""Version -> what is slow in it, and the remedy: `auto` would emulate and not name the cause.
Wrong algorithms have no entry: a test before use finds them."""
SLOW_ON = ((9, 0), (8, 9))
"""Compute capabilities of H100 and L4."""


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


_decided: dict[Problem, Algorithm] = {}
"""Algorithms that this process uses."""
_searches = ContextVar("_searches", default=False)
"""True within :func:`searching`."""


def version() -> str:
    """Version of the library that is loaded; "none" if torch has none.

    A machine may load another one than torch was built with. If the loaded one cannot be asked, the
    version is marked with "(built with)".
    """
    number = torch.backends.cusparselt.version()  # 1000·major + 100·minor + patch
    if number is None:
        return "none"
    try:
        # RTLD_NOLOAD: fail rather than load the library a second time
        library = ctypes.CDLL(LIBRARY, os.RTLD_NOLOAD | os.RTLD_NOW)
        parts = [ctypes.c_int() for _ in range(3)]  # major, minor, patch
        codes = [library.cusparseLtGetProperty(i, ctypes.byref(p)) for i, p in enumerate(parts)]
    except (OSError, AttributeError):
        codes = [1]
    if any(codes):
        return f"{number // 1000}.{number // 100 % 10}.{number % 100} (built with)"
    return ".".join(str(part.value) for part in parts)


def slow_version(device: torch.device) -> str | None:
    """Return a line about a loaded version that is known to be slow on ``device``, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in SLOW_ON:
        return None
    number, _, _ = version().partition(" ")
    why = SLOW_VERSIONS.get(number)
    return None if why is None else f"cuSPARSELt {number} {why}"


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


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """Search for the fastest algorithm of every new size in this block, as trials before training.

    Elsewhere a new size takes the algorithm of a similar one.
    """
    token = _searches.set(True)
    try:
        yield
    finally:
        _searches.reset(token)


def fastest(problem: Problem) -> Algorithm:
    """Return the fastest algorithm among those that are right and repeat, on random numbers.

    The first that applies and passes the check of :func:`trusted`:

    1. the algorithm in the cache directory, for the same problem, device, library and torch;
    2. outside :func:`searching`: the algorithm of the nearest problem of this process that differs
       in m, n or k alone. Translation has new token counts in the middle of training, and tokens
       are n where a weight is packed, m or k where a gradient is;
    3. the result of a search, which goes to the cache directory.

    Raises:
        RuntimeError: there is none, or a CUDA graph is being captured.
        torch.AcceleratorError: an algorithm broke the device; nothing runs on it any more. Where
            the library itself notices, torch raises another RuntimeError.
    """
    if (decided := _decided.get(problem)) is not None:
        return decided
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{_name(problem)} is new: run it once before a CUDA graph is captured")
    sample, key = _sample(problem), _key(problem)
    algorithm = _cached(problem, key, sample)
    if algorithm is None and not _searches.get():
        algorithm = _similar(problem, sample)
    if algorithm is None:
        algorithm = _search(problem, sample)
        save_choice(key, list(algorithm))
    _decided[problem] = algorithm
    return algorithm


def _cached(problem: Problem, key: Key, sample: _Sample) -> Algorithm | None:
    """Return the algorithm in the cache directory; drop one that is not trusted any more."""
    numbers = load_choice(key)
    if numbers is None or len(numbers) != len(Algorithm._fields):
        return None
    algorithm, is_trusted = Algorithm(*numbers), False
    try:
        is_trusted = trusted(problem, algorithm, sample)
    finally:  # also if it breaks the device: the next process must not run it again
        if not is_trusted:
            drop_choice(key)
    return algorithm if is_trusted else None


def _similar(problem: Problem, sample: _Sample) -> Algorithm | None:
    """Return the trusted algorithm of the nearest problem that differs in one size, or None."""

    def distance(other: Problem) -> float:
        sizes = zip(_sizes(problem), _sizes(other), strict=True)
        ratios = [abs(math.log(a / b)) for a, b in sizes if a != b]
        same_kind = other._replace(m=0, n=0, k=0) == problem._replace(m=0, n=0, k=0)
        return ratios[0] if same_kind and len(ratios) == 1 else math.inf

    nearest = min(_decided, key=distance, default=problem)
    if math.isinf(distance(nearest)):
        return None
    algorithm = _decided[nearest]
    return algorithm if trusted(problem, algorithm, sample) else None


def _search(problem: Problem, sample: _Sample) -> Algorithm:
    """Try every algorithm once; check and measure the most promising ones."""
    tried = list(_candidates(problem, *sample.operands))
    single = {each: _single_run(problem, each, sample) for each in tried}
    ranked = sorted((each for each in tried if single[each] < math.inf), key=single.__getitem__)
    right = (each for each in ranked if trusted(problem, each, sample))
    best = list(itertools.islice(right, MEASURED))
    if not best:
        raise RuntimeError(
            f"{_name(problem)}: none of {len(tried)} algorithms of cuSPARSELt {version()} is right "
            f"and gives the same bits {REPEATS} times"
        )

    def seconds(algorithm: Algorithm) -> float:  # one by one: each graph keeps its result
        run = functools.partial(_multiply, problem, algorithm, *sample.operands)
        return medians({"": run}, problem.device)[""]

    return min(best, key=seconds)


def _single_run(problem: Problem, algorithm: Algorithm, sample: _Sample) -> float:
    """Return the seconds of a run after the first one; infinite if wrong or refused."""
    run = functools.partial(_multiply, problem, algorithm, *sample.operands)
    try:
        return once(run, problem.device) if _is_right(run(), problem, sample) else math.inf
    except RuntimeError as error:  # refused for this size
        if broken(error, problem.device):
            raise
        return math.inf


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
    sums = FP8_SLACK if dtype.itemsize == 1 else SUMS
    slack = allowed_error(expected, spread, out, sums)
    return _Sample((compress_24(sparse), dense, bias), step, expected, slack)


def allowed_error(
    expected: Tensor, magnitudes: Tensor, dtype: torch.dtype, sums: float = SUMS
) -> Tensor:
    """Return the largest error of a right product: one rounding, and what its sums may lose.

    Args:
        expected: product in fp64.
        magnitudes: product of the absolute values, fp64.
        dtype: of the result.
        sums: error of a sum in any order, in units of the sum of magnitudes.
    """
    return torch.finfo(dtype).eps * expected.abs() + sums * magnitudes


def fault_of(
    run: Callable[[], Tensor], is_right: Callable[[Tensor], bool], device: torch.device
) -> str:
    """Return why a product cannot be trusted, or "": refused, wrong, or other bits when repeated.

    Raises:
        torch.AcceleratorError: it broke the device.
    """
    try:
        first = run()
        if not is_right(first):
            return "the matmul is wrong"
        if not all(torch.equal(run(), first) for _ in range(REPEATS - 1)):
            return "the matmul gives other bits when it is repeated"
    except RuntimeError as error:  # refused for this size
        if broken(error, device):
            raise
        return one_line(error)
    return ""


def trusted(problem: Problem, algorithm: Algorithm, sample: _Sample) -> bool:
    """Return True if the product is close to the expected one, with the same bits every time."""
    run = functools.partial(_multiply, problem, algorithm, *sample.operands)
    is_right = functools.partial(_is_right, problem=problem, sample=sample)
    return not fault_of(run, is_right, problem.device)


def _is_right(product: Tensor, problem: Problem, sample: _Sample) -> bool:
    columns = (product.t() if problem.transpose_result else product)[:, :: sample.step]
    return bool(((columns - sample.expected).abs() <= sample.slack).all())


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


def _sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.m, problem.n, problem.k


def _key(problem: Problem) -> Key:
    """Return all that the choice of an algorithm depends on."""
    device, dtype, out_dtype, *_ = problem
    major, minor = torch.cuda.get_device_capability(device)
    return problem._asdict() | {
        "device": torch.cuda.get_device_name(device),
        "dtype": str(dtype),
        "out_dtype": str(out_dtype),
        "capability": f"{major}.{minor}",
        "cusparselt": version(),
        "torch": torch.__version__,
    }
