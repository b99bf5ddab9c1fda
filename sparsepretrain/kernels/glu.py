"""Gated activations, value half first and gate half second (arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.kernels.groups import choose_backend


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
    if _triton("geglu", x, backend):
        from sparsepretrain.kernels.triton import glu as glu_triton

        return glu_triton.gated(x, True)
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate, approximate="tanh")


def swiglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """SwiGLU: value · silu(gate) of x = (…, value ‖ gate); as :func:`geglu` otherwise."""
    if _triton("swiglu", x, backend):
        from sparsepretrain.kernels.triton import glu as glu_triton

        return glu_triton.gated(x, False)
    value, gate = x.chunk(2, dim=-1)
    return value * F.silu(gate)


def _triton(name: str, x: Tensor, backend: str | None) -> bool:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{name}: the last axis must be even, got shape {tuple(x.shape)}")
    return choose_backend(name, backend, x) == "triton"
