"""Masks as bytes and bits, and masked decay, in loops."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import INTEGER_OF_SIZE
from sparsepretrain.kernels.cpu.launch import Array, compiled, run


def apply_mask(x: Tensor, mask: Tensor, out: Tensor | None) -> Tensor:
    """``x`` where the mask is true, +0.0 elsewhere, as integers."""
    integer = INTEGER_OF_SIZE[x.itemsize]
    x, kernel = x.contiguous(), _select if mask.shape == x.shape else _select_bits
    straight = out is not None and out.dtype == x.dtype and out.is_contiguous()
    pruned = out if out is not None and straight else torch.empty_like(x)
    if straight and pruned.data_ptr() == x.data_ptr():  # loops take no arrays that overlap
        x = x.clone()
    arrays = [_flat(t) for t in (x.view(integer), mask, pruned.view(integer))]
    run(kernel, mask.numel(), tuple(arrays))
    if straight:
        torch.autograd.graph.increment_version(pruned)
    return pruned if out is None or straight else out.copy_(pruned)


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, decay: float | Tensor) -> None:
    """Grad += decay·(1 - mask)·weight."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if wide.data_ptr() == grad.data_ptr():
        wide = wide.clone()
    total = grad.detach().to(torch.promote_types(grad.dtype, wide.dtype)).contiguous()
    pull = _flat(wide)
    kernel = _decay if mask.shape == grad.shape else _decay_bits
    arrays = _flat(total), pull, _flat(mask)
    run(kernel, mask.numel(), arrays, pull.dtype.type(float(decay)))
    if total.data_ptr() != grad.data_ptr():
        grad.copy_(total)


def packed_flip_count(previous: Tensor, current: Tensor, replace: bool = False) -> Tensor:
    """Return the number of bits in which two uint8 or bool tensors differ; 0-d int64."""
    if not (previous.is_cpu and current.is_cpu):
        where = f"masks on {previous.device} and on {current.device}"
        raise ValueError(f"packed_flip_count: {where}: move one of them")
    found = torch.zeros(1, dtype=torch.int64)
    old, new = _words(previous), _words(current)
    if len(new):
        _differing_bits(old, new, found.numpy())
    if replace:
        previous.copy_(current)
    return found[0]


flip_count = packed_flip_count


def pack_24(mask: Tensor) -> Tensor:
    """Bit k % 8 of byte k // 8 is element k."""
    words = _words(mask)
    code = torch.empty(len(words), dtype=torch.uint8)
    run(_pack, len(words), (words, code.numpy()))
    return code


def bimask_ones(forward: Tensor, orders: Tensor) -> Tensor:
    """For each order of the rows how many ones the backward mask has, at most two of every four."""
    found = torch.zeros(len(orders), dtype=torch.int64)
    arrays = orders.contiguous().numpy(), found.numpy()
    flags = forward.contiguous().view(torch.uint8).flatten(1).numpy()
    run(_ones, len(orders), arrays, flags)
    return found


def _flat(x: Tensor) -> Array:
    return x.detach().contiguous().view(-1).numpy()


def _filled(x: Tensor) -> Tensor:
    """A uint8 or bool tensor, or a copy that can be read as uint64, filled with zeros."""
    if x.is_contiguous() and x.numel() % 8 == x.data_ptr() % 8 == 0:
        return x
    flat = x.contiguous().view(torch.uint8).view(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).clone()


def _words(x: Tensor) -> Array:
    """The bytes of a uint8 or bool tensor as uint64, the last one filled with zeros."""
    return _filled(x).view(torch.uint8).view(-1).numpy().view(numpy.uint64)


_PLACES, _UP = numpy.uint64(0x0102040810204080), numpy.uint64(56)
_PAIRS, _FOURS = numpy.uint64(0x5555555555555555), numpy.uint64(0x3333333333333333)
_EIGHTS, _BYTES = numpy.uint64(0x0F0F0F0F0F0F0F0F), numpy.uint64(0x0101010101010101)
_WORDS = numpy.empty(0, numpy.uint64)
_1, _2, _4 = numpy.uint64(1), numpy.uint64(2), numpy.uint64(4)


@compiled
def _select(x, mask, pruned):
    zero = x.dtype.type(0)
    for k in range(len(x)):
        pruned[k] = x[k] if mask[k] else zero


@compiled
def _decay(grad, weight, mask, decay):
    zero = weight.dtype.type(0)
    for k in range(len(grad)):
        w = weight[k]
        grad[k] = grad[k] + (zero if mask[k] else w) * decay


@compiled
def _select_bits(x, code, pruned):
    zero = x.dtype.type(0)
    for b in range(len(code)):
        for i in range(8):
            pruned[8 * b + i] = x[8 * b + i] if code[b] & (1 << i) else zero


@compiled
def _decay_bits(grad, weight, code, decay):
    zero = weight.dtype.type(0)
    for b in range(len(code)):
        for i in range(8):
            w = weight[8 * b + i]
            grad[8 * b + i] = grad[8 * b + i] + (zero if code[b] & (1 << i) else w) * decay


@compiled
def _differing_bits(a, b, found):
    """Sums of neighbouring bits, then pairs, then nibbles; the multiplication adds up the bytes."""
    total = numpy.uint64(0)
    for k in range(len(a)):
        word = a[k] ^ b[k]
        word -= (word >> _1) & _PAIRS
        word = ((word >> _2) & _FOURS) + (word & _FOURS)
        word = ((word >> _4) + word) & _EIGHTS
        total += (word * _BYTES) >> _UP
    found[0] = total


@compiled
def _pack(words, code):
    """The multiplication moves byte i, 0 or 1, to bit 56 + i."""
    for k in range(len(words)):
        code[k] = (words[k] * _PLACES) >> _UP


@compiled
def _ones(orders, found, flags):
    two = numpy.uint8(2)
    columns = flags.shape[1]
    for c in range(len(orders)):
        total = 0
        for k in range(0, orders.shape[1], 4):
            i0, i1, i2, i3 = orders[c, k], orders[c, k + 1], orders[c, k + 2], orders[c, k + 3]
            for j in range(columns):
                ones = flags[i0, j] + flags[i1, j] + flags[i2, j] + flags[i3, j]
                total += min(ones, two)
        found[c] = total
