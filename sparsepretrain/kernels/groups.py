"""Views of a tensor as groups of consecutive elements along one axis, and the backend choice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8)
"""What the Triton kernels take; masks and packed codes among them."""
CHUNK = 24_000
"""Elements per temporary on the CPU, so that a chain of operations stays in the L2 cache."""


def choose_backend(name: str, backend: str | None, x: Tensor) -> str:
    """The backend that runs the operation ``name`` on ``x``: ``reference`` or ``triton``.

    None means triton for CUDA tensors of a type that the kernels compute (fp32, fp16, bf16) and
    the reference for everything else: the CPU and fp64. A backend that was asked for by name is
    used or refused, never replaced.

    Raises:
        ValueError: an unknown backend, or one that cannot run here.
    """
    if backend not in (None, "reference", "triton"):
        raise ValueError(f"{name}: unknown backend {backend!r}; use 'reference', 'triton' or None")
    if backend is None:
        return "triton" if _preferred(x.device) and x.dtype in TRITON_DTYPES else "reference"
    if backend == "triton":
        if x.dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}: backend='triton' has no {x.dtype} kernel; use 'reference'")
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{name}: backend='triton' needs a CUDA tensor, got one on {x.device} "
                "(TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
            )
    return backend


def _preferred(device: torch.device) -> bool:
    """Whether Triton is the choice on ``device``."""
    return device.type == "cuda"


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
    xp = array_module(x.device)
    if xp is not torch:  # its transposing copy is five times faster
        grouped = torch.from_numpy(xp.ascontiguousarray(grouped.numpy()))
    return list(grouped.contiguous().unbind(0))


def join_groups(parts: list[Tensor], dim: int) -> Tensor:
    """Inverse of :func:`split_groups`."""
    dim %= parts[0].dim()
    xp = array_module(parts[0].device)
    if xp is not torch:
        joined = torch.from_numpy(xp.stack([part.numpy() for part in parts], dim + 1))
    else:
        joined = torch.stack(parts, dim + 1)
    return joined.flatten(dim, dim + 1)


def array_module(device: torch.device) -> Any:
    """The module whose functions work on arrays of ``device``: ``numpy`` or ``torch``.

    Long element-wise chains are written for either. In eager mode on the CPU, NumPy runs them two
    to three times faster: integer products, comparisons and conversions are vectorised, and a call
    costs a third. Results are the same bits.
    """
    if device.type == "cpu" and not torch.compiler.is_compiling():
        try:
            import numpy
        except ImportError:  # torch alone is enough
            return torch
        return numpy
    return torch


def signed(xp: Any, magnitude: Any, sign_of: Any) -> Any:
    """``copysign`` of arrays of ``xp``; NumPy's is not vectorised, its bit operations are."""
    if xp is torch:
        return torch.copysign(magnitude, sign_of)
    integer, top = (xp.uint64, 63) if magnitude.itemsize == 8 else (xp.uint32, 31)
    bits = sign_of.view(integer) & integer(1 << top)
    bits |= magnitude.view(integer)
    return bits.view(magnitude.dtype)


def in_chunks(
    work: Callable[[int, int], None], count: int, width: int, device: torch.device
) -> None:
    """Call ``work(start, stop)`` on consecutive parts of ``range(count)``.

    On the CPU a long chain of element-wise operations runs chunk by chunk in cache, which beats
    whole tensors on several threads. Elsewhere, and inside a compiled graph, there is one part.

    Args:
        work: writes results of its own part only.
        count: number of rows.
        width: elements per row.
        device: where the tensors are.
    """
    step = max(1, CHUNK // max(width, 1))
    if device.type != "cpu" or torch.compiler.is_compiling():
        step = max(count, 1)
    for start in range(0, count, step):
        work(start, min(start + step, count))
