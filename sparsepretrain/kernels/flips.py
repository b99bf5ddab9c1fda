"""Flip counting and packed masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import choose_backend


def flip_count(previous: Tensor, current: Tensor, *, backend: str | None = None) -> Tensor:
    """Number of positions where two masks differ (numerator of the flip rate, arXiv:2404.01847).

    Args:
        previous, current: masks of one shape, bool or 0/1.

    Returns:
        0-d int64 tensor.

    Raises:
        ValueError: shapes differ.
    """
    if previous.shape != current.shape:
        shapes = tuple(previous.shape), tuple(current.shape)
        raise ValueError(f"flip_count: shapes differ: {shapes[0]} and {shapes[1]}")
    if choose_backend("flip_count", backend, current) == "triton":
        from sparsepretrain.kernels import flips_triton

        return flips_triton.differing_bits(previous.bool(), current.bool())
    return (previous.bool() ^ current.bool()).sum()


def packed_flip_count(previous: Tensor, current: Tensor, *, backend: str | None = None) -> Tensor:
    """:func:`flip_count` of two packed masks (:func:`pack_24`), an eighth of the traffic.

    Returns:
        0-d int64 tensor.
    """
    if choose_backend("packed_flip_count", backend, current) == "triton":
        from sparsepretrain.kernels import flips_triton

        return flips_triton.differing_bits(previous, current)
    different = previous ^ current
    if different.numel() % 8:
        different = torch.nn.functional.pad(different, (0, -different.numel() % 8))
    words = different.view(torch.int64)
    # sums of neighbouring bits, then pairs, then nibbles; the multiplication adds up the bytes
    pairs = words - (words >> 1).bitwise_and_(0x5555555555555555)
    nibbles = (pairs >> 2).bitwise_and_(0x3333333333333333) + (pairs & 0x3333333333333333)
    in_bytes = (nibbles >> 4).add_(nibbles).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    return (in_bytes.mul_(0x0101010101010101) >> 56).sum()


def pack_24(mask: Tensor, *, backend: str | None = None) -> Tensor:
    """A mask in one bit per element: position i of a group of four is bit i of its nibble.

    Groups follow the row-major order of ``mask``, two per byte, the first in the low nibble. Any
    mask can be packed, not only 2:4 ones; the last byte is filled with zeros.

    Returns:
        uint8 tensor of ceil(numel / 8) bytes.
    """
    if choose_backend("pack_24", backend, mask) == "triton":
        from sparsepretrain.kernels import flips_triton

        return flips_triton.pack_24(mask.bool())
    bits = mask.bool().flatten()
    if bits.numel() % 8 or bits.storage_offset() % 8:  # a copy: words must be aligned
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).clone()
    # eight 0/1 bytes as one little-endian word; the multiplication moves byte i to bit 56 + i
    words = bits.contiguous().view(torch.uint8).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).bitwise_and_(255).to(torch.uint8)


def unpack_24(code: Tensor, shape: Sequence[int], *, backend: str | None = None) -> Tensor:
    """The bool mask of ``shape`` that :func:`pack_24` made ``code`` from.

    Raises:
        ValueError: ``code`` does not have the number of bytes that ``shape`` needs.
    """
    count = math.prod(shape)
    if code.numel() != -(-count // 8):
        raise ValueError(f"unpack_24: {code.numel()} bytes cannot hold a mask of {tuple(shape)}")
    if choose_backend("unpack_24", backend, code) == "triton":
        from sparsepretrain.kernels import flips_triton

        return flips_triton.unpack_24(code, list(shape))
    shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
    bits = (code.unsqueeze(-1) >> shifts).bitwise_and_(1)
    return bits.flatten()[:count].bool().reshape(tuple(shape))
