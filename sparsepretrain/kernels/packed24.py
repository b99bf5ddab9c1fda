"""Matrices that are 2:4 along their rows, packed, and their products with dense ones.

On CUDA tensors cuSPARSELt does both. Its limits are the contract on every device, because it checks
next to nothing itself: an operand in another memory order gives wrong numbers without an error. On
CPU tensors the reference has its packed sizes and refuses what it would compute wrongly. There is
no factor of the product (``alpha``): the library waits for the device to read it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.kernels.dispatch import find
from sparsepretrain.kernels.hardware import LIMITS, Limits, packed_columns

TYPES = (torch.float16, torch.bfloat16)
"""Dtypes whose sparse matmuls need no scales."""


def compress_24(x: Tensor) -> Tensor:
    """Return the packed form of ``x``, which has at most two non-zeros in four neighbors of a row.

    Args:
        x: (m, k), contiguous, a type and size of :data:`LIMITS`. On a GPU more than two non-zeros
            in a group are lost.

    Returns:
        (m, k·9/16), or k·10/16 in fp8, of the same type: all values, then their positions. Only
        :func:`matmul_24` on the same device reads it, and it cannot be cut.
    """
    limits = _limits("compress_24", x)
    _check("compress_24: x", x, limits.rows, limits.columns)
    return torch.ops.sparsepretrain.compress_24(x)


def matmul_24(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_dense: bool = False,
    transpose_result: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Product of a packed (m, k) and a dense (k, n) matrix, summed in fp32 and rounded once.

    Args:
        packed: what :func:`compress_24` returned.
        dense: (k, n), or (n, k) with ``transpose_dense``; contiguous, the type of ``packed``.
        bias: (m,), added to every column before rounding; the type of the result.
        transpose_dense: take the transpose of ``dense``; a flag, never a view.
        transpose_result: return the transpose, contiguous.
        out_dtype: of an fp8 product: fp16, bf16 or fp32; None: that of ``packed``.

    Returns:
        (m, n), or (n, m) with ``transpose_result``.
    """
    limits = _limits("matmul_24", packed)
    _check("matmul_24: dense", dense, limits.dense, limits.dense)
    m, n = packed.shape[0], dense.shape[0 if transpose_dense else 1]
    k = dense.shape[1 if transpose_dense else 0]
    if packed.dtype != dense.dtype:
        raise ValueError(f"matmul_24: packed is {packed.dtype}, dense is {dense.dtype}")
    size = tuple(packed.shape)
    if packed.dim() != 2 or packed.shape[1] != packed_columns(k, packed.dtype):
        raise ValueError(f"matmul_24: packed {size} is no packed matrix with {k} columns")
    if m % limits.rows or k % limits.columns:
        raise ValueError(
            f"matmul_24: {m} × {k} is an impossible product: a packed matrix has multiples of "
            f"{limits.rows} × {limits.columns}"
        )
    out = packed.dtype if out_dtype is None else out_dtype
    if out != packed.dtype and limits == LIMITS[torch.float16]:
        raise ValueError(f"matmul_24: products of {packed.dtype} have that type, not {out}")
    if bias is not None and (bias.shape != (m,) or bias.dtype != out or not bias.is_contiguous()):
        size = tuple(bias.shape)
        raise ValueError(f"matmul_24: bias must be ({m},) in {out}, got {size} in {bias.dtype}")
    transposed = transpose_dense, transpose_result
    result: Tensor = torch.ops.sparsepretrain.matmul_24(packed, dense, bias, *transposed, out)
    assert result.shape == ((n, m) if transpose_result else (m, n))
    return result


def _limits(name: str, x: Tensor) -> Limits:
    if x.dtype not in LIMITS:
        types = ", ".join(str(t).removeprefix("torch.") for t in LIMITS)
        raise ValueError(f"{name}: packed matrices are of type {types}, not {x.dtype}")
    return LIMITS[x.dtype]


def _check(name: str, x: Tensor, rows: int, columns: int) -> None:
    if x.dim() != 2 or x.shape[0] % rows or x.shape[1] % columns or not x.numel():
        size = tuple(x.shape)
        raise ValueError(
            f"{name} must be a matrix with multiples of {rows} × {columns}, got {size}"
        )
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


@torch.library.custom_op("sparsepretrain::compress_24", mutates_args=(), device_types="cpu")
def _compress(x: Tensor) -> Tensor:
    """Compress with PyTorch; the positions of two groups share a byte, the first one low."""
    m, k = x.shape
    bits = x.view(torch.int8 if x.itemsize == 1 else torch.int16).view(m, k // 4, 4)
    used = bits << 1 != 0  # of either sign
    if bool((used.sum(-1) > 2).any()):
        raise ValueError("compress_24: x has more than two non-zeros in a group of four")
    kept = used.int().argsort(dim=-1, descending=True, stable=True)[..., :2].sort(-1).values
    pairs = (kept[..., 0] | kept[..., 1] << 2).view(-1, 2)
    positions = (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)
    values = bits.gather(-1, kept).flatten().view(torch.uint8)
    return torch.cat([values, positions]).view(x.dtype).view(m, -1)


def _uncompress(packed: Tensor, k: int) -> Tensor:
    """Invert the reference, in fp32."""
    flat, count = packed.flatten(), packed.shape[0] * k
    positions = flat[count // 2 :].view(torch.uint8).long()
    pairs = torch.stack([positions & 15, positions >> 4], 1).view(-1)
    dense = packed.new_zeros(count // 4, 4, dtype=torch.float32)
    dense.scatter_(
        1, torch.stack([pairs & 3, pairs >> 2], 1), flat[: count // 2].float().view(-1, 2)
    )
    return dense.view(packed.shape[0], k)


@torch.library.custom_op("sparsepretrain::matmul_24", mutates_args=(), device_types="cpu")
def _matmul(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    transpose_dense: bool,
    transpose_result: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    rows = dense if transpose_dense else dense.t()  # (n, k)
    wide = None if bias is None else bias.float()
    with torch.autocast("cpu", enabled=False):  # which would round the product to its own type
        product = F.linear(rows.float(), _uncompress(packed, rows.shape[1]), wide).to(out_dtype)
    return product if transpose_result else product.t().contiguous()


@_compress.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    return find("compress_24", "cusparselt")(x)  # type: ignore[misc]


@_matmul.register_kernel("cuda")
def _(packed: Tensor, dense: Tensor, *rest: object) -> Tensor:
    return find("matmul_24", "cusparselt")(packed, dense, *rest)  # type: ignore[misc]


@_compress.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], packed_columns(x.shape[1], x.dtype))


@_matmul.register_fake
def _(
    packed: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    transpose_dense: bool,
    transpose_result: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    m, n = packed.shape[0], dense.shape[0 if transpose_dense else 1]
    return dense.new_empty((n, m) if transpose_result else (m, n), dtype=out_dtype)
