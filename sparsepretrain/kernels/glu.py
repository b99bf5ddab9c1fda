"""Gated activations, value half first and gate half second (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.kernels.dispatch import kernel_of


def geglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """GEGLU: value · gelu_tanh(gate) of x = (…, value ‖ gate); differentiable.

    Args:
        x: (…, 2h).
        backend: None, ``"reference"`` or ``"triton"``.

    Returns:
        (…, h), dtype of ``x``.

    Raises:
        ValueError: the last axis is odd.
    """
    if kernel := _kernel("geglu", x, backend):
        return kernel(x)
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate, approximate="tanh")


def swiglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """SwiGLU: value · silu(gate) of x = (…, value ‖ gate); as :func:`geglu` otherwise."""
    if kernel := _kernel("swiglu", x, backend):
        return kernel(x)
    value, gate = x.chunk(2, dim=-1)
    return value * F.silu(gate)


def _kernel(name: str, x: Tensor, backend: str | None) -> Callable[..., Tensor] | None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{name}: the last axis must be even, got shape {tuple(x.shape)}")
    return kernel_of(name, backend, x)
