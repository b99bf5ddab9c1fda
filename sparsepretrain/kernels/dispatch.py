"""Choose the backend of an operation and find its kernel.

The kernel of an operation is the function of that name in any file of ``kernels/<backend>/``;
nothing is registered anywhere else.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.errors import warn_once

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8)
"""Dtypes of the Triton kernels, including masks and packed codes."""
CPU_DTYPES = (*TRITON_DTYPES, torch.float64)
_HAS_TRITON = find_spec("triton") is not None
"""Triton has wheels for Linux only; the references need torch alone."""


def kernel_of(
    operation: str, backend: str | None, x: Tensor, *, composed: bool = False
) -> Callable[..., Any] | None:
    """Return the kernel that runs ``operation`` on ``x``; None: its reference.

    ``composed``: the reference calls other operations with ``backend``, so that a backend without a
    function for this one is no error.
    """
    chosen = choose_backend(operation, backend, x)
    kernel = None if chosen == "reference" else find(operation, chosen)
    if kernel is None and not composed and backend not in (None, "reference"):
        raise ValueError(f"{operation}: there is no backend={backend!r}; use 'reference'")
    return kernel


def find(name: str, backend: str) -> Callable[..., Any] | None:
    """Return the kernel of ``backend`` for the operation ``name``, or None."""
    if backend == "triton":  # import statements, which torch.compile can follow
        from sparsepretrain.kernels.triton import KERNELS
    elif backend == "cusparselt":
        from sparsepretrain.kernels.cusparselt import KERNELS
    else:
        from sparsepretrain.kernels.cpu import KERNELS
    return KERNELS.get(name)


def choose_backend(name: str, backend: str | None, x: Tensor) -> str:
    """Return the backend of the operation ``name`` on ``x``: ``reference``, ``cpu`` or ``triton``.

    None means triton for CUDA tensors of a type that the kernels compute (fp32, fp16, bf16) where
    Triton is installed, cpu for CPU tensors outside compiled graphs where Numba runs, and the
    reference for everything else. A backend that was asked for by name is used or refused, never
    replaced.
    """
    if backend is None:
        if prefers_triton(x.device) and x.dtype in TRITON_DTYPES:
            return "triton"
        return "cpu" if prefers_cpu(x) else "reference"
    if backend == "triton":
        if x.dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}: backend='triton' has no {x.dtype} kernel; use 'reference'")
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"{name}: backend='triton' needs a CUDA tensor, got one on {x.device} "
                "(TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
            )
    elif backend == "cpu":
        if reason := _no_loops_on(x) or _numba_fails():
            raise ValueError(f"{name}: backend='cpu' {reason}; use 'reference'")
    elif backend != "reference":
        raise ValueError(
            f"{name}: unknown backend {backend!r}; use 'reference', 'cpu', 'triton' or None"
        )
    return backend


def prefers_triton(device: torch.device) -> bool:
    """Return True on a GPU if Triton is installed."""
    return device.type == "cuda" and _HAS_TRITON


def prefers_cpu(x: Tensor) -> bool:
    """Return True if Numba's loops should run on ``x``; warn once if Numba fails."""
    if _no_loops_on(x):
        return False
    if reason := _numba_fails():
        warn_once(f"kernels run their slower references on this CPU: Numba {reason}")
    return reason is None


def _no_loops_on(x: Tensor) -> str | None:
    """Return the reason for which Numba's loops cannot run on ``x``, or None."""
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
    """Return the reason for which Numba cannot compile here, or None."""
    try:
        from numba import config
    except Exception as error:  # also of a NumPy that it does not know
        return f"cannot be imported ({error})"
    return "is disabled (NUMBA_DISABLE_JIT)" if getattr(config, "DISABLE_JIT", 0) else None
