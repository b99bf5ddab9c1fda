"""Triton kernels of :mod:`sparsepretrain.kernels.fp8`: largest magnitude, then scale and cast."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import FP8_FORMATS
from sparsepretrain.kernels.triton.launch import INTERPRETED, axis_order, launch_elements, operator
from sparsepretrain.kernels.triton.tiles import block_offsets, maximum, minimum, widen

_MOST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_FIELDS = {"e4m3": (3, -6), "e5m2": (2, -14)}
"""Mantissa bits and exponent of the smallest normal number."""


@operator(
    "quantize_fp8",
    fake=lambda x, format: (
        torch.empty_like(_dense(x), dtype=FP8_FORMATS[format]),
        torch.empty((), dtype=torch.float32, device=x.device),
    ),
)
def quantize_fp8(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """See :func:`sparsepretrain.kernels.quantize_fp8`."""
    dtype = FP8_FORMATS[format]
    dense = _dense(x)
    q = torch.empty_like(dense, dtype=dtype)
    make = torch.empty if x.numel() else torch.ones  # the kernel writes it, if it runs
    scale = make((), dtype=torch.float32, device=x.device)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    flat = dense.as_strided((dense.numel(),), (1,))
    out = q.as_strided((q.numel(),), (1,))
    launch_elements(_largest, (flat, amax), flat.numel())
    mantissa, exponent = _FIELDS[format]
    options: Any = {"MOST": torch.finfo(dtype).max, "MANTISSA": mantissa, "EXPONENT": exponent}
    launch_elements(_quantize, (flat, amax, out, scale), flat.numel(), **options)
    return q, scale


def _dense(x: Tensor) -> Tensor:
    """``x`` if its elements fill their memory without gaps, in any order of axes; or a copy."""
    return x if x.permute(axis_order(x)).is_contiguous() else x.contiguous()


@triton.jit
def _largest(x, amax, count, BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    value = widen(tl.load(x + offsets, offsets < count, 0))
    # magnitudes compare like their bits, NaN above infinity
    tl.atomic_max(amax, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


@triton.jit
def _quantize(
    x, amax, q, scale, count,
    BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    MOST: tl.constexpr, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr,
):  # fmt: skip
    largest = tl.load(amax).to(tl.float32, bitcast=True)
    factor = minimum(tl.div_rn(MOST * 1.0, largest), _MOST)
    factor = tl.where(largest == 0, 1.0, factor)
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    value = widen(tl.load(x + offsets, offsets < count, 0)) * factor
    value = minimum(maximum(value, -MOST), MOST)
    if _INTERPRETED:  # which does not round to nearest even by itself
        value = _round(value, MANTISSA, EXPONENT)
    tl.store(q + offsets, value.to(q.dtype.element_ty), offsets < count)
    if tl.program_id(0) == 0:
        tl.store(scale, factor)


@triton.jit
def _round(value, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """The nearest number of the format, ties to even, still as fp32."""
    bits = value.to(tl.uint32, bitcast=True)
    drop: tl.constexpr = 23 - MANTISSA
    normal = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = ((normal >> drop) << drop).to(tl.float32, bitcast=True)
    # below the smallest normal number the spacing is fixed: adding 1.5·2²³ spacings rounds to it
    magic: tl.constexpr = 1.5 * 2.0 ** (23 + EXPONENT - MANTISSA)
    small = (value + magic) - magic
    small = tl.where(small == 0, value * 0, small)  # keeps the sign of zero
    rounded = tl.where(tl.abs(value) < 2.0**EXPONENT, small, normal)
    return tl.where(value == value, rounded, value)


@operator("dequantize_fp8", fake=lambda q, scale: torch.empty_like(_dense(q), dtype=torch.float32))
def dequantize_fp8(q: Tensor, scale: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.dequantize_fp8`."""
    dense = _dense(q)
    out = torch.empty_like(dense, dtype=torch.float32)
    flat, result = (t.as_strided((t.numel(),), (1,)) for t in (dense, out))
    launch_elements(_dequantize, (flat, scale, result), flat.numel())
    return out


@triton.jit
def _dequantize(q, scale, out, count, BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    value = tl.load(q + offsets, offsets < count).to(tl.float32)
    tl.store(out + offsets, tl.div_rn(value, tl.load(scale)), offsets < count)
