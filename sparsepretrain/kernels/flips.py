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
    return _differing_bits("flip_count", previous.bool(), current.bool(), backend)


def packed_flip_count(previous: Tensor, current: Tensor, *, backend: str | None = None) -> Tensor:
    """:func:`flip_count` of two packed masks (:func:`pack_24`), an eighth of the traffic.

    Returns:
        0-d int64 tensor.
    """
    return _differing_bits("packed_flip_count", previous, current, backend)


def _differing_bits(name: str, previous: Tensor, current: Tensor, backend: str | None) -> Tensor:
    chosen = choose_backend(name, backend, current)
    if chosen == "triton":
        from sparsepretrain.kernels.triton import flips as flips_triton

        return flips_triton.differing_bits(previous, current)
    if chosen == "cpu":
        from sparsepretrain.kernels.cpu import masks

        return masks.count_differing_bits(previous, current)
    differing = previous ^ current
    return (differing if differing.dtype == torch.bool else _bits(differing)).sum()


def pack_24(mask: Tensor, *, backend: str | None = None) -> Tensor:
    """A mask in one bit per element: position i of a group of four is bit i of its nibble.

    Groups follow the row-major order of ``mask``, two per byte, the first in the low nibble. Any
    mask can be packed, not only 2:4 ones; the last byte is filled with zeros.

    Returns:
        uint8 tensor of ceil(numel / 8) bytes.
    """
    chosen = choose_backend("pack_24", backend, mask)
    if chosen == "triton":
        from sparsepretrain.kernels.triton import flips as flips_triton

        return flips_triton.pack_24(mask.bool())
    if chosen == "cpu":
        from sparsepretrain.kernels.cpu import masks

        return masks.pack_24(mask.bool())
    bits = mask.bool().flatten()
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits.to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def unpack_24(code: Tensor, shape: Sequence[int], *, backend: str | None = None) -> Tensor:
    """The bool mask of ``shape`` that :func:`pack_24` made ``code`` from.

    Raises:
        ValueError: ``code`` does not have the number of bytes that ``shape`` needs.
    """
    count = math.prod(shape)
    if code.numel() != -(-count // 8):
        raise ValueError(f"unpack_24: {code.numel()} bytes cannot hold a mask of {tuple(shape)}")
    if choose_backend("unpack_24", backend, code) == "triton":
        from sparsepretrain.kernels.triton import flips as flips_triton

        return flips_triton.unpack_24(code, list(shape))
    return _bits(code).flatten()[:count].bool().reshape(tuple(shape))


def _bits(code: Tensor) -> Tensor:
    """The eight bits of each byte, the lowest first; uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=code.device)
    return (code.unsqueeze(-1) >> places).bitwise_and_(1)
