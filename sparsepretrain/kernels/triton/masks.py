"""Triton kernels of :mod:`sparsepretrain.kernels.masks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import BLOCK_SIZE, axis_order, launch_elements, operator
from sparsepretrain.kernels.triton.tiles import block_offsets, narrow, widen


@triton.jit
def load_mask(mask_ptr, offsets, mask, PACKED: tl.constexpr):
    """Load a bool mask, or unpack bits if PACKED; true outside ``mask``."""
    if PACKED:
        byte = tl.load(mask_ptr + offsets // 8, mask, 255).to(tl.int32)
        return ((byte >> (offsets % 8).to(tl.int32)) & 1) != 0
    return tl.load(mask_ptr + offsets, mask, 1) != 0


@triton.jit
def _apply_mask_kernel(
    x_ptr, mask_ptr, out_ptr, n_elements,
    BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    mask = offsets < n_elements
    keep = load_mask(mask_ptr, offsets, mask, PACKED)
    values = widen(tl.load(x_ptr + offsets, mask, 0))
    tl.store(out_ptr + offsets, narrow(tl.where(keep, values, 0.0), out_ptr), mask)


def _apply_mask_into(x: Tensor, mask: Tensor, out: Tensor) -> None:
    """Flatten all tensors in the memory order of ``out`` and launch."""
    order, packed = axis_order(out), mask.shape != x.shape
    flat_mask = (mask if packed else mask.permute(order)).contiguous().view(-1).view(torch.uint8)
    flat_x, flat_out = x.permute(order).contiguous().view(-1), out.permute(order).view(-1)
    launch_elements(_apply_mask_kernel, (flat_x, flat_mask, flat_out), x.numel(), PACKED=packed)


@operator("apply_mask", fake=lambda x, mask: torch.empty_like(x))
def apply_mask_op(x: Tensor, mask: Tensor) -> Tensor:
    """Variant of :func:`apply_mask` that returns a new tensor."""
    out = torch.empty_like(x)
    _apply_mask_into(x, mask, out)
    return out


def apply_mask(x: Tensor, mask: Tensor, out: Tensor | None) -> Tensor:
    """See :func:`sparsepretrain.kernels.apply_mask`."""
    if out is None:
        return apply_mask_op(x, mask)
    if not (x.is_contiguous() and out.is_contiguous()):
        return out.copy_(apply_mask_op(x, mask))
    _apply_mask_into(x, mask, out)
    torch.autograd.graph.increment_version(out)
    return out


@triton.jit
def _masked_decay_kernel(
    grad_ptr, weight_ptr, mask_ptr, decay_ptr, n_elements, decay, BLOCK_SIZE: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, HAS_DECAY_PTR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    if HAS_DECAY_PTR:
        decay = tl.load(decay_ptr).to(tl.float32)
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    mask = offsets < n_elements
    g = widen(tl.load(grad_ptr + offsets, mask, 0))
    w = widen(tl.load(weight_ptr + offsets, mask, 0))
    keep = load_mask(mask_ptr, offsets, mask, PACKED)
    g += tl.where(keep, 0.0, w) * decay
    tl.store(grad_ptr + offsets, narrow(g, grad_ptr), mask)


@operator("masked_decay_", fake=lambda *_: None, mutates=["grad"])
def masked_decay_op(
    grad: Tensor, weight: Tensor, mask: Tensor, decay: float, factor: Tensor | None
) -> None:
    """Operator of :func:`masked_decay_`; ``factor`` replaces ``decay`` unless it is None."""
    # flatten in the memory order of the gradient, which is written in place
    order, packed = axis_order(grad), mask.shape != grad.shape
    target = grad.permute(order)
    flat_grad = target.contiguous().view(-1)
    flat_weight = weight.permute(order).contiguous().view(-1)
    flat_mask = (mask if packed else mask.permute(order)).contiguous().view(-1).view(torch.uint8)
    tensors = (flat_grad, flat_weight, flat_mask, flat_grad if factor is None else factor)
    meta = {"HAS_DECAY_PTR": factor is not None, "PACKED": packed}
    launch_elements(_masked_decay_kernel, tensors, flat_grad.numel(), decay, **meta)
    if not target.is_contiguous():
        target.copy_(flat_grad.view(target.shape))
    else:
        torch.autograd.graph.increment_version(grad)


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, decay: float | Tensor) -> None:
    """See :func:`sparsepretrain.kernels.masked_decay_`."""
    number, factor = (0.0, decay) if isinstance(decay, Tensor) else (decay, None)
    masked_decay_op(grad, weight, mask, number, factor)


@triton.jit
def _differing_bits_kernel(
    previous_ptr, current_ptr, total_ptr, n_elements,
    BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr, REPLACE: tl.constexpr,
):  # fmt: skip
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    mask = offsets < n_elements
    new = tl.load(current_ptr + offsets, mask, 0)
    bits = tl.load(previous_ptr + offsets, mask, 0) ^ new
    if REPLACE:
        tl.store(previous_ptr + offsets, new, mask)
    bits = bits.to(tl.uint32, bitcast=bits.dtype.primitive_bitwidth == 32)
    # population count in fields of 2, 4 and 8 bits: the interpreter has no libdevice.popc
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    ones = (bits * 0x01010101) >> 24
    tl.atomic_add(total_ptr, tl.sum(ones.to(tl.int32), 0).to(tl.int64))


@operator(
    "differing_bits",
    fake=lambda previous, current, replace: current.new_empty((), dtype=torch.int64),
    mutates=["previous"],
)
def differing_bits(previous: Tensor, current: Tensor, replace: bool) -> Tensor:
    """Count the bits that differ between two masks or packed masks, as 0-d int64.

    ``replace``: copy ``current`` to ``previous``, which must be contiguous, in the same pass.
    """
    total = torch.zeros((), dtype=torch.int64, device=current.device)
    order = axis_order(current)
    pair = [t.permute(order).contiguous().view(-1).view(torch.uint8) for t in (previous, current)]
    if all(t.numel() % 4 == 0 and t.storage_offset() % 4 == 0 for t in pair):
        pair = [t.view(torch.int32) for t in pair]
    launch_elements(_differing_bits_kernel, (*pair, total), pair[0].numel(), REPLACE=replace)
    if replace:
        torch.autograd.graph.increment_version(previous)
    return total


def flip_count(previous: Tensor, current: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.flip_count`."""
    return differing_bits(previous, current, False)


def packed_flip_count(previous: Tensor, current: Tensor, replace: bool = False) -> Tensor:
    """See :func:`sparsepretrain.kernels.packed_flip_count`."""
    return differing_bits(previous, current, replace)


@triton.jit
def _pack_24_kernel(
    words_ptr, code_ptr, n_elements, BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr
):
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    mask = offsets < n_elements
    word = tl.load(words_ptr + offsets, mask, 0)
    # multiplying by 2²⁴ + 2¹⁷ + 2¹⁰ + 2³ moves byte i of four (0 or 1) to bit 24 + i
    low, high = word.to(tl.uint32) * 0x01020408, (word >> 32).to(tl.uint32) * 0x01020408
    tl.store(code_ptr + offsets, ((low >> 24) | (high >> 20)).to(tl.uint8), mask)


@operator("pack_24", fake=lambda mask: mask.new_empty(-(-mask.numel() // 8), dtype=torch.uint8))
def pack_24(mask: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.pack_24`."""
    flags = mask.contiguous().view(-1).view(torch.uint8)
    if flags.numel() % 8 or flags.data_ptr() % 8:
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).clone()
    words = flags.view(torch.int64)
    code = torch.empty(words.numel(), dtype=torch.uint8, device=mask.device)
    launch_elements(_pack_24_kernel, (words, code), code.numel(), block_size=BLOCK_SIZE // 4)
    return code


@triton.jit
def _unpack_24_kernel(
    code_ptr, mask_ptr, n_elements, BLOCK_SIZE: tl.constexpr, INT64_OFFSETS: tl.constexpr
):
    offsets = block_offsets(BLOCK_SIZE, INT64_OFFSETS)
    mask = offsets < n_elements
    tl.store(mask_ptr + offsets, load_mask(code_ptr, offsets, mask, True).to(tl.uint8), mask)


@operator("unpack_24", fake=lambda code, shape: code.new_empty(shape, dtype=torch.bool))
def unpack_24(code: Tensor, shape: list[int]) -> Tensor:
    """See :func:`sparsepretrain.kernels.unpack_24`."""
    mask = torch.empty(shape, dtype=torch.bool, device=code.device)
    launch_elements(_unpack_24_kernel, (code.contiguous(), mask.view(torch.uint8)), mask.numel())
    return mask
