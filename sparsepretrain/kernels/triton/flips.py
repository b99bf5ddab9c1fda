"""Triton kernels of :mod:`sparsepretrain.kernels.flips`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import TILE as ELEMENTS
from sparsepretrain.kernels.triton.launch import memory_order, over_elements, part_of


@torch.library.custom_op("sparsepretrain::differing_bits", mutates_args=())
def differing_bits(previous: Tensor, current: Tensor) -> Tensor:
    """Number of bits in which two tensors of bytes (masks or packed codes) differ; 0-d int64."""
    total = torch.zeros((), dtype=torch.int64, device=current.device)
    order = memory_order(current)
    pair = [t.permute(order).contiguous().view(-1).view(torch.uint8) for t in (previous, current)]
    if all(t.numel() % 4 == 0 and t.storage_offset() % 4 == 0 for t in pair):
        pair = [t.view(torch.int32) for t in pair]
    over_elements(_differing_bits, (*pair, total), pair[0].numel())
    return total


differing_bits.register_fake(lambda previous, current: current.new_empty((), dtype=torch.int64))


@triton.jit
def _differing_bits(previous, current, total, count, TILE: tl.constexpr, WIDE: tl.constexpr):
    i = part_of(TILE, WIDE)
    inside = i < count
    bits = tl.load(previous + i, inside, 0) ^ tl.load(current + i, inside, 0)
    bits = bits.to(tl.uint32, bitcast=bits.dtype.primitive_bitwidth == 32)
    # population count in parallel fields of 2, 4 and 8 bits; libdevice's has no interpreter
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    ones = (bits * 0x01010101) >> 24
    tl.atomic_add(total, tl.sum(ones.to(tl.int32), 0).to(tl.int64))


@torch.library.custom_op("sparsepretrain::pack_24", mutates_args=())
def pack_24(mask: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.pack_24`."""
    bits = mask.contiguous().view(-1).view(torch.uint8)
    code = torch.empty(-(-bits.numel() // 8), dtype=torch.uint8, device=mask.device)
    length, tile = bits.numel(), ELEMENTS // 8
    over_elements(_pack, (bits, code), code.numel(), length, tile=tile, reach=length + ELEMENTS)
    return code


pack_24.register_fake(lambda mask: mask.new_empty(-(-mask.numel() // 8), dtype=torch.uint8))


@triton.jit
def _pack(bits, code, count, length, TILE: tl.constexpr, WIDE: tl.constexpr):
    i = part_of(TILE, WIDE)
    position = tl.arange(0, 8)
    place = i[:, None] * 8 + position[None, :]
    kept = tl.load(bits + place, place < length, 0).to(tl.int32)
    byte = tl.sum((kept != 0).to(tl.int32) << position[None, :], 1)
    tl.store(code + i, byte.to(tl.uint8), i < count)


@torch.library.custom_op("sparsepretrain::unpack_24", mutates_args=())
def unpack_24(code: Tensor, shape: list[int]) -> Tensor:
    """See :func:`sparsepretrain.kernels.unpack_24`."""
    mask = torch.empty(shape, dtype=torch.bool, device=code.device)
    over_elements(_unpack, (code.contiguous(), mask.view(torch.uint8)), mask.numel())
    return mask


unpack_24.register_fake(lambda code, shape: code.new_empty(shape, dtype=torch.bool))


@triton.jit
def _unpack(code, mask, count, TILE: tl.constexpr, WIDE: tl.constexpr):
    i = part_of(TILE, WIDE)
    inside = i < count
    byte = tl.load(code + i // 8, inside, 0).to(tl.int32)
    tl.store(mask + i, ((byte >> (i % 8).to(tl.int32)) & 1).to(tl.uint8), inside)
