"""Views of a tensor as groups of consecutive elements along one axis, and the backend choice."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8)
"""What the Triton kernels take; masks and packed codes among them."""
_HAS_TRITON = find_spec("triton") is not None
"""Its wheels exist for Linux only; the references need torch alone."""
MOST_KEPT = 2**24
"""Bytes of buffers that a thread keeps at most."""
_LINE = 64
"""Bytes of a cache line."""
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a floating dtype -> what its bits are viewed as."""


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


def widen(x: Tensor) -> Tensor:
    """``x`` in fp32, which every value of fewer bits is in exactly; fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


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
    integer = INTEGER_OF_SIZE[x.itemsize]
    return mask.to(integer).neg_().bitwise_and_(x.view(integer)).view(x.dtype)  # -1: all ones


def numpy_for(x: Tensor) -> Any | None:
    """The module ``numpy`` if ``x`` is computed with it: eager mode on the CPU; else None.

    There the ``*_numpy`` files take over from the reference and give the same bits: they write into
    buffers that are kept, and a call of NumPy costs a third of torch's.
    Without NumPy (torch alone is enough), in compiled graphs and on other devices the reference
    runs.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    if wrapped or type(x) not in (Tensor, torch.nn.Parameter):  # DTensor: no memory to share
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
    chunk: int,
) -> None:
    """Call ``prepare(rows)(start, stop)`` on consecutive parts of ``range(count)``.

    A long chain of element-wise NumPy operations runs part by part in the same few buffers. Small
    parts stay in the inner caches, large ones call the interpreter less often. One thread: a second
    one would share a core with OpenMP's, which spin for milliseconds after every product of
    matrices, and made training steps slower.

    Args:
        prepare: makes :func:`buffers` for the most rows of a part; what it returns writes results
            of its own part only.
        count: number of rows.
        width: elements per row.
        chunk: most elements of a part, unless a single row has more.
    """
    import numpy

    rows = max(1, min(count, chunk // max(width, 1)))
    work = prepare(rows)
    with numpy.errstate(all="ignore"):  # NaN and infinity take their course
        for start in range(0, count, rows):
            work(start, min(start + rows, count))


def buffers(xp: Any, *wanted: tuple[tuple[int, ...], Any]) -> list[Any]:
    """Uninitialised arrays for intermediate results, valid until the next call on this thread.

    They lie in memory that the thread keeps: touching pages of freshly allocated memory costs more
    than most of what is computed in them.

    Args:
        xp: numpy.
        wanted: shape and dtype of each.
    """
    sizes = [math.prod(shape) * xp.dtype(dtype).itemsize for shape, dtype in wanted]
    ends = list(itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes))
    block = getattr(_kept, "block", None)
    if block is None or len(block) < ends[-1]:
        block = xp.empty(ends[-1], xp.uint8)
        _kept.block = block if ends[-1] <= MOST_KEPT else None
    return [
        block[start : start + size].view(dtype).reshape(shape)
        for (shape, dtype), size, start in zip(wanted, sizes, [0, *ends], strict=False)
    ]


_kept = threading.local()
