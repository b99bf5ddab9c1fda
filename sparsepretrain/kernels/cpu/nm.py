"""Hard N:4 masks in loops; see :mod:`sparsepretrain.kernels.nm`."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels.common import INTEGER_OF_SIZE, packed_shape
from sparsepretrain.kernels.cpu.launch import (
    compiled,
    groups_of,
    inlined,
    packed_flags,
    packs_groups4,
)


def nm_mask(x: Tensor, n: int, m: int, dim: int, low: bool, packed: bool) -> Tensor | None:
    """Bool mask of the n < m largest, None for m ≠ 4; ``low``: the smaller index wins ties."""
    if m != 4:
        return None
    bits = x.contiguous().view(INTEGER_OF_SIZE[x.itemsize])
    mask = torch.empty(x.shape, dtype=torch.bool)
    keys, flags = groups_of(bits, m, dim), groups_of(mask.view(torch.uint8), m, dim)
    word = keys.dtype.type
    numbers = word(n), not low, word(numpy.iinfo(word).max)
    if keys.shape[2] == 1:
        _contiguous_groups4(keys.reshape(-1), flags.reshape(-1).view(numpy.uint32), *numbers)
    else:
        _strided_groups4(keys, flags, *numbers)
    return mask


def nm_prune(
    x: Tensor, n: int, m: int, dim: int, low: bool, out: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Write pruned ``x`` to ``out`` and return it with its packed mask; None for other layouts."""
    if out is None or not packs_groups4(x, m, dim, out):
        return None
    bits, pruned = (t.detach().view(INTEGER_OF_SIZE[x.itemsize]).view(-1) for t in (x, out))
    code = torch.empty(packed_shape(x.shape), dtype=torch.uint8)
    word = bits.numpy().dtype.type
    arrays = bits.numpy(), pruned.numpy(), code.view(-1).numpy()
    _prune_contiguous_groups4(*arrays, word(n), not low, word(numpy.iinfo(word).max))
    torch.autograd.graph.increment_version(out)  # see apply_mask
    return out, code


@inlined
def _kept(x, n, high, magnitude, zero, one):
    """Mark the elements that fewer than n others beat; all pairs are compared.

    The bits of |x| sort like |x|, NaN above infinity. Ties go to the later element if ``high``.
    """
    k0, k1, k2, k3 = x[0] & magnitude, x[1] & magnitude, x[2] & magnitude, x[3] & magnitude
    l10 = one if (k1 > k0) | (high & (k1 == k0)) else zero
    l20 = one if (k2 > k0) | (high & (k2 == k0)) else zero
    l30 = one if (k3 > k0) | (high & (k3 == k0)) else zero
    l21 = one if (k2 > k1) | (high & (k2 == k1)) else zero
    l31 = one if (k3 > k1) | (high & (k3 == k1)) else zero
    l32 = one if (k3 > k2) | (high & (k3 == k2)) else zero
    lost0, lost1 = l10 + l20 + l30, one - l10 + l21 + l31
    lost2, lost3 = one - l20 + one - l21 + l32, one - l30 + one - l31 + one - l32
    return lost0 < n, lost1 < n, lost2 < n, lost3 < n


@compiled
def _contiguous_groups4(x, mask, n, high, magnitude):
    """Contiguous groups: x (4·groups), mask (groups) with four flags in a word."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    none, byte = numpy.uint32(0), numpy.uint32(1)
    for r in range(len(mask)):
        group = x[4 * r], x[4 * r + 1], x[4 * r + 2], x[4 * r + 3]
        a, b, c, d = _kept(group, n, high, magnitude, zero, one)
        head = (byte if a else none) | (byte << 8 if b else none)
        mask[r] = head | (byte << 16 if c else none) | (byte << 24 if d else none)


@compiled
def _strided_groups4(x, mask, n, high, magnitude):
    """Strided groups: both (groups, 4, inner)."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for r in range(len(x)):
        for i in range(x.shape[2]):
            group = x[r, 0, i], x[r, 1, i], x[r, 2, i], x[r, 3, i]
            a, b, c, d = _kept(group, n, high, magnitude, zero, one)
            mask[r, 0, i], mask[r, 1, i], mask[r, 2, i], mask[r, 3, i] = a, b, c, d


@compiled
def _prune_contiguous_groups4(x, pruned, code, n, high, magnitude):
    """Two contiguous groups per byte: x and pruned (8·bytes), code (bytes)."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for b in range(len(code)):
        k = 8 * b
        v = x[k], x[k + 1], x[k + 2], x[k + 3]
        w = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        f = _kept(v, n, high, magnitude, zero, one)
        g = _kept(w, n, high, magnitude, zero, one)
        pruned[k], pruned[k + 1] = v[0] if f[0] else zero, v[1] if f[1] else zero
        pruned[k + 2], pruned[k + 3] = v[2] if f[2] else zero, v[3] if f[3] else zero
        pruned[k + 4], pruned[k + 5] = w[0] if g[0] else zero, w[1] if g[1] else zero
        pruned[k + 6], pruned[k + 7] = w[2] if g[2] else zero, w[3] if g[3] else zero
        code[b] = packed_flags(f, g)
