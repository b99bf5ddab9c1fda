"""Views of a tensor as groups of consecutive elements along one axis, and the backend choice."""

from __future__ import annotations

import functools
import os
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from sparsepretrain.errors import SparsePretrainWarning

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8)
"""What the Triton kernels take; masks and packed codes among them."""
_HAS_TRITON = find_spec("triton") is not None
"""Its wheels exist for Linux only; the references need torch alone."""
CPU_DTYPES = (*TRITON_DTYPES, torch.float64)
"""What the loops on the CPU take."""
WITHOUT_LOOPS = ("unpack_24", "quantize_fp8", "dequantize_fp8", "geglu", "swiglu")
"""Operations that have no loops: torch runs their reference on the CPU."""
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a floating dtype -> what its bits are viewed as."""


def choose_backend(name: str, backend: str | None, x: Tensor) -> str:
    """The backend that runs the operation ``name`` on ``x``: ``reference``, ``cpu`` or ``triton``.

    None means triton for CUDA tensors of a type that the kernels compute (fp32, fp16, bf16) where
    Triton is installed, cpu for CPU tensors outside compiled graphs where Numba runs, and the
    reference for everything else. A backend that was asked for by name is used or refused, never
    replaced.

    Raises:
        ValueError: an unknown backend, or one that cannot run here.
    """
    if backend is None:
        if prefers_triton(x.device) and x.dtype in TRITON_DTYPES:
            return "triton"
        return "cpu" if prefers_cpu(x) and name not in WITHOUT_LOOPS else "reference"
    if backend == "triton":
        if x.dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}: backend='triton' has no {x.dtype} kernel; use 'reference'")
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{name}: backend='triton' needs a CUDA tensor, got one on {x.device} "
                "(TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
            )
    elif backend == "cpu":
        if name in WITHOUT_LOOPS:
            raise ValueError(f"{name}: there is no backend='cpu'; use 'reference'")
        if reason := _no_loops_on(x) or _numba_fails():
            raise ValueError(f"{name}: backend='cpu' {reason}; use 'reference'")
    elif backend != "reference":
        raise ValueError(
            f"{name}: unknown backend {backend!r}; use 'reference', 'cpu', 'triton' or None"
        )
    return backend


def prefers_triton(device: torch.device) -> bool:
    """Whether Triton is the choice on ``device``: on a GPU, where it is installed."""
    return device.type == "cuda" and _HAS_TRITON


def prefers_cpu(x: Tensor) -> bool:
    """Whether the loops compiled by Numba are the choice for ``x``; says once where Numba fails."""
    if _no_loops_on(x):
        return False
    if reason := _numba_fails():
        _warn_once(f"kernels run their slower references on this CPU: Numba {reason}")
    return reason is None


def _no_loops_on(x: Tensor) -> str | None:
    """Why there are no loops for ``x``; None: there are."""
    if torch.compiler.is_compiling():  # the compiler fuses the reference
        return "does not run in compiled graphs"
    if x.device.type != "cpu":
        return f"needs a CPU tensor, got one on {x.device}"
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    if wrapped or type(x) not in (Tensor, torch.nn.Parameter):  # DTensor: no memory to share
        return f"needs a plain tensor, got {type(x).__name__}"
    return None if x.dtype in CPU_DTYPES else f"has no {x.dtype} kernel"


@functools.lru_cache(maxsize=1)
def _numba_fails() -> str | None:
    """Why Numba cannot compile here; None: it can. Imports it."""
    try:
        from numba import config
    except Exception as error:  # also of a NumPy that it does not know
        return f"cannot be imported ({error})"
    return "is disabled (NUMBA_DISABLE_JIT)" if getattr(config, "DISABLE_JIT", 0) else None


@functools.lru_cache(maxsize=1)
def _warn_once(message: str) -> None:
    warnings.warn(message, SparsePretrainWarning, stacklevel=4)


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
    divided by m.
    """
    dim %= x.dim()
    grouped = x.unflatten(dim, (x.shape[dim] // m, m)).movedim(dim + 1, 0)
    return list(grouped.contiguous().unbind(0))


def join_groups(parts: list[Tensor], dim: int) -> Tensor:
    """Inverse of :func:`split_groups`."""
    dim %= parts[0].dim()
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def apply_mask(x: Tensor, mask: Tensor, *, backend: str | None = None) -> Tensor:
    """``x`` where ``mask`` is true, +0.0 elsewhere (NaN and infinities too).

    Args:
        x: tensor of any floating dtype and strides.
        mask: bool, same shape.
        backend: None, ``"reference"`` or ``"cpu"``.

    Returns:
        a new tensor.
    """
    if choose_backend("apply_mask", backend, x) == "cpu":
        from sparsepretrain.kernels.cpu import masks

        return masks.apply_mask(x, mask)
    return x.detach().masked_fill(~mask, 0)
