"""Triton kernels of :mod:`sparsepretrain.kernels.nm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import (
    empty_rows,
    operator,
    over_groups,
    packed_rows,
    packs,
)
from sparsepretrain.kernels.triton.tiles import (
    any_groups,
    element_offsets,
    load_fours,
    load_groups,
    starts_of,
    store_code,
    store_fours,
    store_groups,
    tile_of,
    widen,
)


def nm_mask(x: Tensor, n: int, m: int, dim: int, low: bool, packed: bool = False) -> Tensor:
    """:func:`sparsepretrain.kernels.nm_mask`; ``low``: the smaller index wins ties.

    ``packed``: in bits where one pass can write them.
    """
    if packed and (n, m) == (2, 4) and packs(x, x):
        return nm_code_op(x, dim, low)
    return nm_mask_op(x, n, m, dim, low)


@operator("nm_code", fake=lambda x, dim, low: packed_rows(x))
def nm_code_op(x: Tensor, dim: int, low: bool) -> Tensor:
    """The 2:4 mask of a contiguous matrix in bits."""
    code, whole = packed_rows(x), x.shape[1] % 8 == 0
    over_groups(_code_24, 4, dim, x, x, code, numbered=not whole, LOW=low)
    return code


@operator("nm_mask", fake=lambda x, n, m, dim, low: empty_rows(x, dim, torch.bool))
def nm_mask_op(x: Tensor, n: int, m: int, dim: int, low: bool) -> Tensor:
    """A new mask, a bool for each element."""
    mask = empty_rows(x, dim, torch.bool)
    _launch(x, n, m, dim, low, mask, None)
    return mask


def nm_prune(
    x: Tensor, n: int, m: int, dim: int, low: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`sparsepretrain.kernels.nm_prune`; into ``out`` the mask is packed where it can be."""
    if out is None or (n, m) != (2, 4) or not packs(x, out):
        pruned, mask = nm_prune_op(x, n, m, dim, low)
        return pruned if out is None else out.copy_(pruned), mask
    code, whole = packed_rows(x), x.shape[1] % 8 == 0
    over_groups(_prune_24, m, dim, x, out, code, numbered=not whole, LOW=low)
    torch.autograd.graph.increment_version(out)
    return out, code


@operator(
    "nm_prune",
    fake=lambda x, n, m, dim, low: (empty_rows(x, dim, x.dtype), empty_rows(x, dim, torch.bool)),
)
def nm_prune_op(x: Tensor, n: int, m: int, dim: int, low: bool) -> tuple[Tensor, Tensor]:
    """:func:`nm_prune` into new tensors."""
    pruned, mask = empty_rows(x, dim, x.dtype), empty_rows(x, dim, torch.bool)
    _launch(x, n, m, dim, low, mask, pruned)
    return pruned, mask


def _launch(
    x: Tensor, n: int, m: int, dim: int, low: bool, mask: Tensor, pruned: Tensor | None
) -> None:
    """Both results have the same strides, so they share one geometry."""
    values = mask if pruned is None else pruned
    out, constants = mask.view(torch.int8), {"LOW": low, "PRUNED": pruned is not None}
    if (n, m) == (2, 4):
        over_groups(_mask_24, m, dim, x, out, beside=values, **constants)
    else:
        over_groups(_mask_nm, m, dim, x, out, beside=values, N=n, M=m, **constants)


@triton.jit
def magnitude_bits(x):
    """|x| of fp32 as integers in the same order, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _majority(a, b, c):
    return (a & b) | (c & (a | b))


@triton.jit
def top_two(k0, k1, k2, k3, LOW: tl.constexpr):
    """The two largest of four keys; of equal ones the later position wins, the earlier if LOW."""
    if LOW:
        b01, b02, b03 = k0 >= k1, k0 >= k2, k0 >= k3
        b12, b13, b23 = k1 >= k2, k1 >= k3, k2 >= k3
    else:
        b01, b02, b03 = k0 > k1, k0 > k2, k0 > k3
        b12, b13, b23 = k1 > k2, k1 > k3, k2 > k3
    # kept is what beats at least two of the other three
    keep0 = _majority(b01, b02, b03)
    keep1 = _majority(~b01, b12, b13)
    keep2 = _majority(~b02, ~b12, b23)
    keep3 = _majority(~b03, ~b13, ~b23)
    return keep0, keep1, keep2, keep3


@triton.jit
def _mask_24(
    x, out, count, groups, pruned,
    TILE: tl.constexpr,
    LOW: tl.constexpr, PRUNED: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(count, groups, TILE)
    x0, x1, x2, x3 = load_fours(x, starts_of(x, row), first, row < count, groups, TILE)
    keep0, keep1, keep2, keep3 = top_two(
        magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3), LOW
    )
    starts, mask = starts_of(out, row), row < count
    store_fours(out, starts, first, mask, groups, keep0, keep1, keep2, keep3, TILE)
    if PRUNED:
        y0, y1 = tl.where(keep0, x0, 0.0), tl.where(keep1, x1, 0.0)
        y2, y3 = tl.where(keep2, x2, 0.0), tl.where(keep3, x3, 0.0)
        store_fours(pruned, starts, first, mask, groups, y0, y1, y2, y3, TILE)


@triton.jit
def _code_24(x, like, count, groups, code, TILE: tl.constexpr, LOW: tl.constexpr):
    row, first = tile_of(count, groups, TILE)
    x0, x1, x2, x3 = load_fours(x, starts_of(x, row), first, row < count, groups, TILE)
    keep0, keep1, keep2, keep3 = top_two(
        magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3), LOW
    )
    store_code(code, row, first, count, groups, keep0, keep1, keep2, keep3, TILE)


@triton.jit
def _prune_24(x, out, count, groups, code, TILE: tl.constexpr, LOW: tl.constexpr):
    row, first = tile_of(count, groups, TILE)
    x0, x1, x2, x3 = load_fours(x, starts_of(x, row), first, row < count, groups, TILE)
    keep0, keep1, keep2, keep3 = top_two(
        magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3), LOW
    )
    store_code(code, row, first, count, groups, keep0, keep1, keep2, keep3, TILE)
    y0, y1 = tl.where(keep0, x0, 0.0), tl.where(keep1, x1, 0.0)
    y2, y3 = tl.where(keep2, x2, 0.0), tl.where(keep3, x3, 0.0)
    store_fours(out, starts_of(out, row), first, row < count, groups, y0, y1, y2, y3, TILE)


@triton.jit
def kept_by_rank(
    keys, x, row, group, mask, N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """Find the N largest keys of each group; (rows, groups, M rounded up to a power of two).

    An element is kept when fewer than N others beat it. Up to M = 8 a thread holds a group in
    registers. Beyond, the others are read again, one position at a time: they are in the
    first-level cache, and M² comparisons need no registers of their own.
    """
    position = tl.arange(0, keys.shape[2])[None, None, :]
    if keys.shape[2] == 8:
        return (_losses_8(tl.where(position < M, keys, -1), LOW) < N) & (position < M)
    elif keys.shape[2] == 4:
        return (_losses_4(tl.where(position < M, keys, -1), LOW) < N) & (position < M)
    losses = tl.zeros(keys.shape, tl.int32)
    for j in tl.range(0, M):
        offsets = element_offsets(x, row, group * M + j)
        other = magnitude_bits(widen(tl.load(x.data + offsets, mask, 0)))[:, :, None]
        wins_ties = (position > j) if LOW else (position < j)
        losses += ((other > keys) | ((other == keys) & wins_ties)).to(tl.int32)
    return (losses < N) & (position < M)


@triton.jit
def _losses(keys, AT: tl.constexpr, COUNT: tl.constexpr, LOW: tl.constexpr):
    """Count the keys that beat the one at AT; of equal keys the later wins unless LOW.

    Counted in fp32: of sums of comparisons LLVM makes vectors of bits, which lie in local memory,
    and integers are added at half the rate.
    """
    losses = tl.full(keys[0].shape, AT, tl.float32)
    for j in tl.static_range(COUNT):  # each comparison decides for both of its keys
        if j > AT:
            losses += _beats(keys[j], keys[AT], LOW)
        elif j < AT:
            losses -= _beats(keys[AT], keys[j], LOW)
    return losses


@triton.jit
def _beats(later, earlier, LOW: tl.constexpr):
    return tl.where((later > earlier) if LOW else (later >= earlier), 1.0, 0.0)


@triton.jit
def _losses_4(keys, LOW: tl.constexpr):
    """:func:`_losses` of every key of (rows, groups, 4)."""
    even, odd = tl.split(tl.reshape(keys, (keys.shape[0], keys.shape[1], 2, 2)))
    k0, k2 = tl.split(even)
    k1, k3 = tl.split(odd)
    k = k0, k1, k2, k3
    even = tl.join(_losses(k, 0, 4, LOW), _losses(k, 2, 4, LOW))
    odd = tl.join(_losses(k, 1, 4, LOW), _losses(k, 3, 4, LOW))
    return tl.reshape(tl.join(even, odd), keys.shape)


@triton.jit
def _losses_8(keys, LOW: tl.constexpr):
    """:func:`_losses` of every key of (rows, groups, 8)."""
    even, odd = tl.split(tl.reshape(keys, (keys.shape[0], keys.shape[1], 2, 2, 2)))
    k04, k26 = tl.split(even)
    k15, k37 = tl.split(odd)
    k0, k4 = tl.split(k04)
    k1, k5 = tl.split(k15)
    k2, k6 = tl.split(k26)
    k3, k7 = tl.split(k37)
    k = k0, k1, k2, k3, k4, k5, k6, k7
    l04 = tl.join(_losses(k, 0, 8, LOW), _losses(k, 4, 8, LOW))
    l15 = tl.join(_losses(k, 1, 8, LOW), _losses(k, 5, 8, LOW))
    l26 = tl.join(_losses(k, 2, 8, LOW), _losses(k, 6, 8, LOW))
    l37 = tl.join(_losses(k, 3, 8, LOW), _losses(k, 7, 8, LOW))
    return tl.reshape(tl.join(tl.join(l04, l26), tl.join(l15, l37)), keys.shape)


@triton.jit
def _mask_nm(
    x, out, count, groups, pruned,
    TILE: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, PRUNED: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(count, groups, TILE)
    group, mask, _, element, filled = any_groups(row, first, count, groups, TILE, M)
    values = load_groups(x, row, element, filled)
    keep = kept_by_rank(magnitude_bits(values), x, row, group, mask, N, M, LOW)
    store_groups(out, row, element, filled, keep)
    if PRUNED:
        store_groups(pruned, row, element, filled, tl.where(keep, values, 0.0))
