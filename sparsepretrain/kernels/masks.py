"""Apply masks, decay pruned weights, count flips, and pack masks into bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepretrain.kernels.common import check_out, packed_shape
from sparsepretrain.kernels.dispatch import kernel_of


@torch.no_grad()
def apply_mask(
    x: Tensor, mask: Tensor, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """``x`` where ``mask`` (bool, or :func:`pack_rows`) is true, +0.0 elsewhere, also for NaN.

    The result is a new tensor like ``x``, or ``out``, rounded once to its dtype.
    """
    check_out("apply_mask", x, out)
    if kernel := kernel_of("apply_mask", backend, x):
        return kernel(x.detach(), _readable(mask, x), out)
    pruned = x.detach().masked_fill(~unpacked(mask, x.shape), 0)
    return pruned if out is None else out.copy_(pruned)


@torch.no_grad()
def masked_decay_(
    grad: Tensor,
    weight: Tensor,
    mask: Tensor,
    decay: float | Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """``grad += λ·(1 - mask)·weight`` in place; the sum is formed in fp32 and rounded once.

    Args:
        grad: gradient of the weight, any floating dtype and strides.
        weight: the dense master weight, same shape.
        mask: kept positions (bool or 0/1), same shape; or packed (:func:`pack_rows`).
        decay: λ, a number or 0-d tensor (so that a loss scale can be folded in without a sync).

    Returns:
        ``grad``.

    Raises:
        ValueError: shapes differ.
    """
    if grad.shape != weight.shape or mask.shape not in (grad.shape, packed_shape(grad.shape)):
        shapes = tuple(grad.shape), tuple(weight.shape), tuple(mask.shape)
        raise ValueError(f"masked_decay_: shapes of grad, weight and mask differ: {shapes}")
    if kernel := kernel_of("masked_decay_", backend, grad):
        kernel(grad, weight.detach(), _readable(mask, grad), decay)
        return grad
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    pull = wide.masked_fill(unpacked(mask, grad.shape), 0) * decay
    if grad.dtype in (torch.float16, torch.bfloat16):
        return grad.copy_(grad.float() + pull)
    return grad.add_(pull)


def flip_count(previous: Tensor, current: Tensor, *, backend: str | None = None) -> Tensor:
    """Count the positions where two masks differ (numerator of the flip rate, arXiv:2404.01847).

    Args:
        previous: mask, bool or 0/1.
        current: mask of the same shape, bool or 0/1.

    Returns:
        0-d int64 tensor.

    Raises:
        ValueError: shapes differ.
    """
    _require_pair("flip_count", previous, current)
    previous, current = previous.bool(), current.bool()
    if kernel := kernel_of("flip_count", backend, current):
        return kernel(previous, current)
    return (previous ^ current).sum()


@torch.no_grad()
def packed_flip_count(
    previous: Tensor, current: Tensor, *, replace: bool = False, backend: str | None = None
) -> Tensor:
    """Count the flips between two packed masks; reads an eighth of the bytes of :func:`flip_count`.

    ``replace``: also copy ``current`` into ``previous``, in the same pass.
    """
    _require_pair("packed_flip_count", previous, current)
    if kernel := kernel_of("packed_flip_count", backend, current):
        return kernel(previous, current, replace)
    flips = _bits(previous ^ current).sum()
    if replace:
        previous.copy_(current)
    return flips


def packed_flip_counts(previous: Tensor, current: Tensor, slices: int) -> Tensor:
    """Count the flips of each of ``slices`` equal parts of two masks packed by rows.

    Needs a byte of memory per mask bit.

    Returns:
        (slices,) int64 tensor.
    """
    _require_pair("packed_flip_counts", previous, current)
    return _bits(previous ^ current).view(slices, -1).sum(1)


def _require_pair(name: str, previous: Tensor, current: Tensor) -> None:
    if previous.shape != current.shape:
        shapes = tuple(previous.shape), tuple(current.shape)
        raise ValueError(f"{name}: shapes differ: {shapes[0]} and {shapes[1]}")
    if previous.device != current.device:
        places = f"{previous.device} and {current.device}"
        raise ValueError(f"{name}: masks are on {places}; move one of them")


def pack_24(mask: Tensor, *, backend: str | None = None) -> Tensor:
    """Pack a mask, one bit per element: position i of a group of four is bit i of its nibble.

    Groups follow the row-major order of ``mask``, two per byte, the first in the low nibble. Any
    mask can be packed, not only a 2:4 one. The last byte is padded with zeros.

    Returns:
        uint8 tensor of ceil(numel / 8) bytes.
    """
    if kernel := kernel_of("pack_24", backend, mask):
        return kernel(mask.bool())
    bits = mask.bool().flatten()
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits.to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)


def unpack_24(code: Tensor, shape: Sequence[int], *, backend: str | None = None) -> Tensor:
    """Return the bool mask of ``shape`` that :func:`pack_24` made ``code`` from.

    Raises:
        ValueError: ``code`` does not have the number of bytes that ``shape`` needs.
    """
    count = math.prod(shape)
    if code.numel() != -(-count // 8):
        raise ValueError(f"unpack_24: {code.numel()} bytes cannot hold a mask of {tuple(shape)}")
    if kernel := kernel_of("unpack_24", backend, code):
        return kernel(code, list(shape))
    return _bits(code).flatten()[:count].bool().reshape(tuple(shape))


def pack_rows(mask: Tensor) -> Tensor:
    """Pack each row of a mask as :func:`pack_24` does, into whole bytes, so rows can be sharded.

    The result is uint8 of :func:`packed_shape`; rows are padded with zero bits.
    """
    flat = mask.flatten(1)
    if flat.shape[1] % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8))
    return pack_24(flat).view(packed_shape(mask.shape))


def unpack_rows(code: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the bool mask of ``shape`` that :func:`pack_rows` made ``code`` from."""
    if code.shape != packed_shape(shape):
        size = tuple(code.shape)
        raise ValueError(f"unpack_rows: {size} packed bytes do not fit a mask of {tuple(shape)}")
    rows, row = shape[0], math.prod(shape[1:])
    return unpack_24(code.flatten(), (rows, 8 * code.shape[1]))[:, :row].reshape(tuple(shape))


def unpacked(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a mask of ``shape``, or one packed by :func:`pack_rows`, as bool of ``shape``."""
    return mask.bool() if mask.shape == tuple(shape) else unpack_rows(mask, shape)


def _readable(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that kernels can read: packed in the memory order of ``like``, or bool."""
    whole = like.is_contiguous() and like.shape[1:].numel() % 8 == 0
    bits = whole and mask.shape != like.shape and mask.shape == packed_shape(like.shape)
    return mask if bits else unpacked(mask, like.shape)


def _bits(code: Tensor) -> Tensor:
    """Return the eight bits of each byte, the lowest first; uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
    return (code.unsqueeze(-1) >> shifts).bitwise_and_(1)
