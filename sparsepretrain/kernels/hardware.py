"""Facts about tensor cores and NVIDIA's libraries that references and kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_SLACK = 2.0**-10
"""Error of a sum on fp8 tensor cores, in units of the sum of magnitudes: they add with about 14
bits (arXiv:2412.19437 section 3.3.2)."""


class Limits(NamedTuple):
    """Sizes of packed products that cuSPARSELt is trusted with, for one type.

    Positions lie in tiles: in 16 bits a packed (m, k) has m·k + ⌈m/64⌉·⌈k/64⌉·512 bytes (measured
    on an H200 with version 0.8.0). Where the tiles are whole that is k·9/16 columns, what torch 2.9
    allocates for every size: with others the library would write past the end. In fp8 tiles of
    64 × 128 are right there too; smaller ones were not tried.
    """

    rows: int
    """Rows of the sparse operand are multiples of it."""
    columns: int
    """Columns of the sparse operand are multiples of it."""
    dense: int
    """Rows and columns of the dense operand are multiples of it."""
    sixteenths: int
    """Sixteenths of the elements that are left when a matrix is packed: half of the values, and
    four bits for each group of four."""


LIMITS = {
    torch.float16: Limits(64, 64, 8, 9),
    torch.bfloat16: Limits(64, 64, 8, 9),
    torch.float8_e4m3fn: Limits(64, 128, 16, 10),
}
"""The types that are packed. In fp32 the library would multiply in TF32."""


def no_cuda(device: torch.device) -> str:
    """Return the reason for which NVIDIA's libraries do not run on ``device``, or ""."""
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    return (
        "" if device.type == "cuda" else f"the weights are on {device.type}, not on a CUDA device"
    )


def broken(error: Exception, device: torch.device) -> bool:
    """Return True if ``error`` left ``device`` unusable: every later call on it fails too.

    Its type does not tell: where cuSPARSELt breaks a device, torch raises a RuntimeError with the
    status of the library, as for a size that the library refuses.
    """
    if not isinstance(error, RuntimeError) or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def packed_columns(k: int, dtype: torch.dtype) -> int:
    """Columns of a packed matrix that has ``k`` before."""
    return k * LIMITS[dtype].sixteenths // 16
