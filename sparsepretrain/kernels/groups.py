"""Views of a tensor as groups of consecutive elements along one axis, and the backend choice."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8)
"""What the Triton kernels take; masks and packed codes among them."""
_HAS_TRITON = find_spec("triton") is not None
"""Its wheels exist for Linux only; the references need torch alone."""
CHUNK = 48_000
"""Elements per temporary on the CPU, so that a chain of operations stays in cache."""
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_THREADS = 4
"""Threads of one operation on the CPU; the interpreter lock leaves nothing for more."""


def choose_backend(name: str, backend: str | None, x: Tensor) -> str:
    """The backend that runs the operation ``name`` on ``x``: ``reference`` or ``triton``.

    None means triton for CUDA tensors of a type that the kernels compute (fp32, fp16, bf16) where
    Triton is installed, and the reference for everything else: the CPU and fp64. A backend that
    was asked for by name is used or refused, never replaced.

    Raises:
        ValueError: an unknown backend, or one that cannot run here.
    """
    if backend not in (None, "reference", "triton"):
        raise ValueError(f"{name}: unknown backend {backend!r}; use 'reference', 'triton' or None")
    if backend is None:
        return "triton" if prefers_triton(x.device) and x.dtype in TRITON_DTYPES else "reference"
    if backend == "triton":
        if x.dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}: backend='triton' has no {x.dtype} kernel; use 'reference'")
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{name}: backend='triton' needs a CUDA tensor, got one on {x.device} "
                "(TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
            )
    return backend


def prefers_triton(device: torch.device) -> bool:
    """Whether Triton is the choice on ``device``: on a GPU, where it is installed."""
    return device.type == "cuda" and _HAS_TRITON


def check_pattern(name: str, x: Tensor, n: int, m: int, dim: int) -> None:
    """Refuse patterns and shapes that have no exact N:M answer.

    Raises:
        ValueError: N > M or N < 1, or the axis is not a multiple of M.
    """
    if not 1 <= n <= m:
        raise ValueError(f"{name}: N:M needs 1 ≤ N ≤ M, got {n}:{m}")
    if x.dim() == 0 or x.shape[dim] % m:
        size = tuple(x.shape)
        raise ValueError(f"{name}: axis {dim} of shape {size} is not a multiple of M = {m}")


def split_groups(x: Tensor, m: int, dim: int) -> list[Tensor]:
    """The m positions of every group as m contiguous tensors.

    Element k of the result holds position k of all groups, in the order of ``x`` with ``dim``
    divided by m. Contiguous inputs to element-wise operations are several times faster on the CPU
    than the stride-m views of the last axis.
    """
    dim %= x.dim()
    grouped = x.unflatten(dim, (x.shape[dim] // m, m)).movedim(dim + 1, 0)
    if numpy := numpy_for(grouped):  # its transposing copy is five times faster
        grouped = torch.from_numpy(numpy.ascontiguousarray(grouped.numpy()))
    return list(grouped.contiguous().unbind(0))


def join_groups(parts: list[Tensor], dim: int) -> Tensor:
    """Inverse of :func:`split_groups`."""
    dim %= parts[0].dim()
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def apply_mask(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask`` is true, +0.0 elsewhere (NaN and infinities too).

    Selecting by a bool mask is a loop over elements on the CPU; as bits it is ten times faster.

    Args:
        x: tensor of any floating dtype and strides.
        mask: bool, same shape.

    Returns:
        a new tensor.
    """
    x = x.detach()
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.masked_fill(~mask, 0)
    integer = _INTEGER_OF_SIZE[x.itemsize]
    return mask.to(integer).neg_().bitwise_and_(x.view(integer)).view(x.dtype)  # -1: all ones


def numpy_for(x: Tensor) -> Any | None:
    """The module ``numpy`` if ``x`` is computed with it: eager mode on the CPU; else None.

    There the ``*_numpy`` files take over from the reference and give the same bits: NumPy writes
    into buffers that stay in cache, and a call costs a third of torch's. Without NumPy (torch alone
    is enough), in compiled graphs and on other devices the reference runs.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if type(x) not in (Tensor, torch.nn.Parameter):  # DTensor, FakeTensor: no memory to share
        return None
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def in_chunks(
    prepare: Callable[[int], Callable[[int, int], None]],
    count: int,
    width: int,
    chunk: int = CHUNK,
) -> None:
    """Call ``prepare(rows)(start, stop)`` on consecutive parts of ``range(count)``.

    A long chain of element-wise NumPy operations runs part by part, so that its temporaries stay in
    cache, on as many threads as torch may use (at most :data:`MAX_THREADS`). Which thread takes
    which part does not matter to the result.

    Args:
        prepare: called once per thread with the most rows of a part, to make the buffers; what it
            returns writes results of its own part only.
        count: number of rows.
        width: elements per row.
        chunk: most elements of a part, unless a single row has more.
    """
    import numpy

    threads = min(torch.get_num_threads(), MAX_THREADS)
    parts = -(-count * width // chunk)
    if parts > 1:  # as much for each thread
        parts = -(-parts // threads) * threads
    rows = max(1, -(-count // max(parts, 1)))
    starts = deque(range(0, count, rows))

    def drain() -> None:
        work = prepare(rows)
        with numpy.errstate(all="ignore"):  # NaN and infinity take their course
            while starts:
                try:
                    start = starts.popleft()
                except IndexError:  # another thread was faster
                    return
                work(start, min(start + rows, count))

    extra = min(threads, len(starts)) - 1
    running = [_pool().submit(drain) for _ in range(extra)]
    drain()
    for future in running:
        if not future.cancel():
            future.result()


@functools.lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="sparsepretrain")


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
