"""Triton kernels of :mod:`sparsepretrain.kernels.fp8`: reduce to amax, then scale and cast."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.hardware import FP8_FORMATS
from sparsepretrain.kernels.triton.launch import INTERPRETED, axis_order, launch_elements, operator
from sparsepretrain.kernels.triton.tiles import block_offsets, maximum, minimum, widen

_FP32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_FP8_FIELDS = {"e4m3": (3, -6), "e5m2": (2, -14)}
"""Mantissa bits, and exponent of the smallest normal number."""


@triton.jit
def _amax_kernel(
    x_ptr, amax_ptr, n_elements, BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr
):
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    value = widen(tl.load(x_ptr + offsets, offsets < n_elements, 0))
    # integer atomics: the bits of magnitudes sort like magnitudes, NaN above infinity
    tl.atomic_max(amax_ptr, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


@triton.jit
def _round_to_fp8(value, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Round fp32 to a number of the fp8 format, ties to even; the result is fp32."""
    bits = value.to(tl.uint32, bitcast=True)
    dropped: tl.constexpr = 23 - MANTISSA_BITS
    normal = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    normal = ((normal >> dropped) << dropped).to(tl.float32, bitcast=True)
    # subnormals have a fixed spacing: adding and subtracting 1.5·2²³ spacings rounds to it
    magic: tl.constexpr = 1.5 * 2.0 ** (23 + MIN_EXPONENT - MANTISSA_BITS)
    small = (value + magic) - magic
    small = tl.where(small == 0, value * 0, small)  # keep the sign of zero
    rounded = tl.where(tl.abs(value) < 2.0**MIN_EXPONENT, small, normal)
    return tl.where(value == value, rounded, value)


@triton.jit
def _quantize_kernel(
    x_ptr, amax_ptr, q_ptr, scale_ptr, n_elements,
    BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr,
):  # fmt: skip
    amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    scale = minimum(tl.div_rn(FP8_MAX * 1.0, amax), _FP32_MAX)
    scale = tl.where(amax == 0, 1.0, scale)
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    value = widen(tl.load(x_ptr + offsets, offsets < n_elements, 0)) * scale
    value = minimum(maximum(value, -FP8_MAX), FP8_MAX)
    if _INTERPRETED:  # the interpreter's cast does not round to nearest even
        value = _round_to_fp8(value, MANTISSA_BITS, MIN_EXPONENT)
    tl.store(q_ptr + offsets, value.to(q_ptr.dtype.element_ty), offsets < n_elements)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)


@triton.jit
def _dequantize_kernel(
    q_ptr, scale_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr
):
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    value = tl.load(q_ptr + offsets, offsets < n_elements).to(tl.float32)
    tl.store(out_ptr + offsets, tl.div_rn(value, tl.load(scale_ptr)), offsets < n_elements)


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` if it is contiguous in some order of its axes, else a contiguous copy."""
    return x if x.permute(axis_order(x)).is_contiguous() else x.contiguous()


@operator(
    "quantize_fp8",
    fake=lambda x, format: (
        torch.empty_like(_dense(x), dtype=FP8_FORMATS[format]),
        torch.empty((), dtype=torch.float32, device=x.device),
    ),
)
def quantize_fp8(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """See :func:`sparsepretrain.kernels.quantize_fp8`."""
    dtype, dense = FP8_FORMATS[format], _dense(x)
    q = torch.empty_like(dense, dtype=dtype)
    make = torch.empty if x.numel() else torch.ones  # empty tensors launch no kernel
    scale = make((), dtype=torch.float32, device=x.device)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    flat_x, flat_q = (t.as_strided((t.numel(),), (1,)) for t in (dense, q))
    launch_elements(_amax_kernel, (flat_x, amax), flat_x.numel())
    bits, exponent = _FP8_FIELDS[format]
    meta: Any = {"FP8_MAX": torch.finfo(dtype).max, "MANTISSA_BITS": bits, "MIN_EXPONENT": exponent}
    launch_elements(_quantize_kernel, (flat_x, amax, flat_q, scale), flat_x.numel(), **meta)
    return q, scale


@operator("dequantize_fp8", fake=lambda q, scale: torch.empty_like(_dense(q), dtype=torch.float32))
def dequantize_fp8(q: Tensor, scale: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.dequantize_fp8`."""
    dense = _dense(q)
    out = torch.empty_like(dense, dtype=torch.float32)
    flat_q, flat_out = (t.as_strided((t.numel(),), (1,)) for t in (dense, out))
    launch_elements(_dequantize_kernel, (flat_q, scale, flat_out), flat_q.numel())
    return out
