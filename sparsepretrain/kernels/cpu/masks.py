"""Masks in bytes and bits, in loops; see :mod:`sparsepretrain.kernels.masks`."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import INTEGER_OF_SIZE
from sparsepretrain.kernels.cpu.launch import Array, compiled


def apply_mask(x: Tensor, mask: Tensor, out: Tensor | None) -> Tensor:
    """``x`` where the mask is true, +0.0 elsewhere, as integers."""
    integer = INTEGER_OF_SIZE[x.itemsize]
    x, kernel = x.contiguous(), _select if mask.shape == x.shape else _select_bits
    straight = out is not None and out.dtype == x.dtype and out.is_contiguous()
    pruned = out if out is not None and straight else torch.empty_like(x)
    if straight and pruned.data_ptr() == x.data_ptr():  # loops take no arrays that overlap
        x = x.clone()
    kernel(_flat(x.view(integer)), _flat(mask), _flat(pruned.view(integer)))
    if straight:  # written through NumPy, which torch does not see: a saved tensor may have changed
        torch.autograd.graph.increment_version(pruned)
    return pruned if out is None or straight else out.copy_(pruned)


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, decay: float | Tensor) -> None:
    """Add decay·(1 - mask)·weight to ``grad``."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if wide.data_ptr() == grad.data_ptr():  # decay on weights; loops take no arrays that overlap
        wide = wide.clone()
    total = grad.detach().to(torch.promote_types(grad.dtype, wide.dtype)).contiguous()
    kernel = _decay if mask.shape == grad.shape else _decay_bits
    weights = _flat(wide)
    kernel(_flat(total), weights, _flat(mask), weights.dtype.type(float(decay)))
    if total.data_ptr() != grad.data_ptr():
        grad.copy_(total)
    else:  # see apply_mask
        torch.autograd.graph.increment_version(grad)


def packed_flip_count(previous: Tensor, current: Tensor, replace: bool = False) -> Tensor:
    """Return the number of bits in which two uint8 or bool tensors differ; 0-d int64."""
    count = torch.zeros((), dtype=torch.int64)
    _count_differing_bits(_words(previous), _words(current), count.view(1).numpy())
    if replace:
        previous.copy_(current)
    return count


flip_count = packed_flip_count


def pack_24(mask: Tensor) -> Tensor:
    """Return the code in which bit k % 8 of byte k // 8 is element k."""
    words = _words(mask)
    code = torch.empty(len(words), dtype=torch.uint8)
    _pack(words, code.numpy())
    return code


def _flat(x: Tensor) -> Array:
    return x.detach().contiguous().view(-1).numpy()


def _words(x: Tensor) -> Array:
    """Return the bytes of a uint8 or bool tensor as uint64; zeros fill up the last word."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    count = flat.numel()
    if count % 8 or flat.data_ptr() % 8:  # new memory is aligned
        filled = flat.new_zeros(count + -count % 8)
        filled[:count] = flat
        flat = filled
    return flat.numpy().view(numpy.uint64)


@compiled
def _select(x, mask, pruned):
    zero = x.dtype.type(0)
    for k in range(len(x)):
        pruned[k] = x[k] if mask[k] else zero


@compiled
def _select_bits(x, code, pruned):
    zero = x.dtype.type(0)
    for b in range(len(code)):
        for i in range(8):
            pruned[8 * b + i] = x[8 * b + i] if code[b] & (1 << i) else zero


@compiled
def _decay(grad, weight, mask, decay):
    zero = weight.dtype.type(0)
    for k in range(len(grad)):
        w = weight[k]
        grad[k] = grad[k] + (zero if mask[k] else w) * decay


@compiled
def _decay_bits(grad, weight, code, decay):
    zero = weight.dtype.type(0)
    for b in range(len(code)):
        for i in range(8):
            w = weight[8 * b + i]
            grad[8 * b + i] = grad[8 * b + i] + (zero if code[b] & (1 << i) else w) * decay


_1, _2, _4, _56 = numpy.uint64(1), numpy.uint64(2), numpy.uint64(4), numpy.uint64(56)
_PAIRS, _NIBBLES = numpy.uint64(0x5555555555555555), numpy.uint64(0x3333333333333333)
_BYTES, _ONES = numpy.uint64(0x0F0F0F0F0F0F0F0F), numpy.uint64(0x0101010101010101)
_TO_HIGHEST_BYTE = numpy.uint64(0x0102040810204080)


@compiled
def _count_differing_bits(a, b, count):
    # bits of a word in parallel (Warren, Hacker's Delight, section 5-1): sums of two bits, then of
    # four, then of eight; the multiplication adds up the bytes
    total = numpy.uint64(0)
    for k in range(len(a)):
        word = a[k] ^ b[k]
        word -= (word >> _1) & _PAIRS
        word = ((word >> _2) & _NIBBLES) + (word & _NIBBLES)
        word = ((word >> _4) + word) & _BYTES
        total += (word * _ONES) >> _56
    count[0] = total


@compiled
def _pack(words, code):
    # the multiplication moves byte i of a word, 0 or 1, to bit 56 + i
    for k in range(len(words)):
        code[k] = (words[k] * _TO_HIGHEST_BYTE) >> _56
