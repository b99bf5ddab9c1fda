"""Masks at work in loops; see :mod:`sparsepretrain.kernels.masks`."""

from __future__ import annotations

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


def _flat(x: Tensor) -> Array:
    return x.detach().contiguous().view(-1).numpy()


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
