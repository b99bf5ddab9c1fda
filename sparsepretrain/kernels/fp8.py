"""Per-tensor fp8 with current scaling (S-STE section 5; NVIDIA's e4m3fn and e5m2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.kernels.common import FP8_FORMATS
from sparsepretrain.kernels.dispatch import kernel_of


@torch.no_grad()
def quantize_fp8(x: Tensor, format: str, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(q, scale) with x ≈ q / scale and scale = FP8_MAX / max|x|; 1 for an all-zero tensor.

    Values are clamped to the format's range, then rounded to nearest even. Zeros of a finite
    tensor stay zero, so an N:M pattern survives; small entries may become zero too.

    Args:
        x: floating-point tensor.
        format: ``"e4m3"`` (largest 448) or ``"e5m2"`` (largest 57344).
        backend: None, ``"reference"`` or ``"triton"``.

    Returns:
        q of dtype float8_e4m3fn or float8_e5m2 and the shape of ``x``; scale, 0-d fp32.

    Raises:
        ValueError: unknown format.
    """
    if format not in FP8_FORMATS:
        raise ValueError(f"quantize_fp8: format must be 'e4m3' or 'e5m2', got {format!r}")
    dtype = FP8_FORMATS[format]
    if kernel := _kernel("quantize_fp8", backend, x, dtype):
        return kernel(x.detach(), format)
    largest = torch.finfo(dtype).max
    wide = x.float()
    amax = wide.abs().amax() if x.numel() else wide.new_zeros(())
    # not `largest / amax`, which torch evaluates as a product with the rounded reciprocal
    ratio = torch.full_like(amax, largest) / amax
    scale = torch.where(amax == 0, 1.0, ratio.clamp(max=torch.finfo(wide.dtype).max))
    return (wide * scale).clamp(-largest, largest).to(dtype), scale


@torch.no_grad()
def dequantize_fp8(q: Tensor, scale: Tensor, *, backend: str | None = None) -> Tensor:
    """Return q / scale in fp32, shape of ``q``; inverts :func:`quantize_fp8` up to rounding."""
    if kernel := _kernel("dequantize_fp8", backend, scale, q.dtype):
        return kernel(q, scale)
    return q.float() / scale


def _kernel(
    name: str, backend: str | None, x: Tensor, dtype: torch.dtype
) -> Callable[..., Any] | None:
    """The kernel for one format: no GPU before Ada (sm_89) converts e4m3, but torch does there."""
    e4m3 = dtype == FP8_FORMATS["e4m3"]
    old = backend is None and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9)
    return None if e4m3 and old else kernel_of(name, backend, x)
