"""Per-tensor fp8 with current scaling (S-STE section 5; NVIDIA's e4m3fn and e5m2), and products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.errors import one_line
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.hardware import FP8_FORMATS, FP8_SLACK, no_cuda

FP8_MULTIPLE = 16
"""``torch._scaled_mm`` needs every dimension but the first operand's rows to be a multiple."""
FP8_CAPABILITY = (8, 9)
"""The first compute capability with fp8 tensor cores."""


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
    # clamped: the ratio to a subnormal maximum overflows
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
    """Return the kernel of a format; before Ada (sm_89) no GPU converts e4m3, and torch does."""
    e4m3 = dtype is FP8_FORMATS["e4m3"]  # torch 2.9 compiles no == of dtypes
    old = backend is None and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9)
    return None if e4m3 and old else kernel_of(name, backend, x)


def matmul_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    backend: str | None = None,
) -> Tensor:
    """Return a·bᵀ / (scale_a·scale_b) + bias, summed in fp32 and rounded once.

    By default it is torch's scaled product: fp8 tensor cores compute it, which add with fewer bits
    than fp32 between promotions to it, and CPUs in fp32. The reference multiplies the same values
    in fp32, on GPUs in bf16, in which they are exact.

    Unless ``backend`` is ``"reference"``, a (m, k) and b (n, k) are contiguous, not both e5m2, and
    16 divides k and n. ``bias`` is (n,); tensor cores add it in a 16-bit ``out_dtype``.
    """
    if backend == "reference":
        if a.is_cuda:
            product = torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
        else:
            product = a.float() @ b.float().t()
        return unscaled(product, scale_a, scale_b, bias, out_dtype=out_dtype)
    if backend is not None:
        raise ValueError(f"matmul_fp8: there is no backend={backend!r}; use 'reference' or None")
    # which cuBLAS does not add in fp32
    inside = None if bias is None or out_dtype == torch.float32 else bias.to(out_dtype)
    inverse = scale_a.reciprocal(), scale_b.reciprocal()
    result: Tensor = torch._scaled_mm(a, b.t(), *inverse, bias=inside, out_dtype=out_dtype)
    return result if bias is None or inside is not None else result + bias


def unscaled(
    product: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return product / (scale_a·scale_b) + bias for a ``product`` (m, n) of fp8 values in fp32."""
    result = product * (scale_a.reciprocal() * scale_b.reciprocal())
    return (result if bias is None else result + bias.float()).to(out_dtype)


@functools.cache
def no_fp8_matmuls(device: torch.device) -> str:
    """Return the reason for which ``device`` has no fp8 matmuls, tried with a small one, or ""."""
    if reason := no_cuda(device):
        return reason
    if torch.version.hip is not None:
        return "this build of torch is for ROCm, whose formats are others"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        found, first = ("{}.{}".format(*each) for each in (capability, FP8_CAPABILITY))
        return f"compute capability {found} has no fp8 tensor cores ({first} is the first)"
    random = torch.Generator(device).manual_seed(0)
    given = [
        torch.randn(size, generator=random, device=device, dtype=torch.float32)
        for size in ((64, 128), (48, 128))
    ]
    b = quantize_fp8(given[1], "e4m3")
    for format in FP8_FORMATS:
        a = quantize_fp8(given[0], format)
        pairs: Any = a[0], b[0], a[1], b[1]
        try:
            result = matmul_fp8(*pairs, out_dtype=torch.float32)
        except RuntimeError as error:
            return one_line(error)
        left, right = (dequantize_fp8(*each).double() for each in (a, b))
        slack = FP8_SLACK * (left.abs() @ right.abs().t())
        if not bool(((result - left @ right.t()).abs() <= slack).all()):
            return f"its product of {format} and e4m3 is wrong"
    return ""
