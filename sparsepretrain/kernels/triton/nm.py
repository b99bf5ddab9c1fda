"""Triton kernels of :mod:`sparsepretrain.kernels.nm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import (
    can_pack_mask,
    empty_out,
    empty_packed_mask,
    launch_groups,
    operator,
)
from sparsepretrain.kernels.triton.tiles import (
    element_offsets,
    group_indices,
    load_groups,
    load_groups4,
    program_tile,
    row_offsets,
    store_groups,
    store_groups4,
    store_packed_mask,
    widen,
)


@triton.jit
def magnitude_bits(x):
    """|x| of fp32 as integers in the same order, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _majority(a, b, c):
    return (a & b) | (c & (a | b))


@triton.jit
def top_2_of_4(k0, k1, k2, k3, LOW: tl.constexpr):
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
def top_n_mask(
    keys, x, row, group, group_mask, N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """Find the N largest keys of each group; (rows, groups, M rounded up to a power of two).

    An element is kept when fewer than N others beat it. The others are read again, one position
    at a time: they are in the first-level cache, and M² comparisons need no registers of their own.
    """
    pos = tl.arange(0, keys.shape[2])[None, None, :]
    losses = tl.zeros(keys.shape, tl.int32)
    for j in tl.range(0, M):
        offsets = element_offsets(x, row, group * M + j)
        other = magnitude_bits(widen(tl.load(x.ptr + offsets, group_mask, 0)))[:, :, None]
        wins_ties = (pos > j) if LOW else (pos < j)
        losses += ((other > keys) | ((other == keys) & wins_ties)).to(tl.int32)
    return (losses < N) & (pos < M)


@triton.jit
def _mask_24_kernel(
    x, out, n_rows, n_groups, pruned, code_ptr,
    TILE: tl.constexpr,
    LOW: tl.constexpr, STORE_PRUNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write the mask to ``out``, or packed to ``code_ptr``; and kept values to ``pruned``."""
    row, start = program_tile(n_rows, n_groups, TILE)
    x0, x1, x2, x3 = load_groups4(x, row_offsets(x, row), start, row < n_rows, n_groups, TILE)
    keep0, keep1, keep2, keep3 = top_2_of_4(
        magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3), LOW
    )
    row_start, row_mask = row_offsets(out, row), row < n_rows
    if PACKED:
        store_packed_mask(code_ptr, row, start, n_rows, n_groups, keep0, keep1, keep2, keep3, TILE)
    else:
        store_groups4(out, row_start, start, row_mask, n_groups, keep0, keep1, keep2, keep3, TILE)
    if STORE_PRUNED:
        y0, y1 = tl.where(keep0, x0, 0.0), tl.where(keep1, x1, 0.0)
        y2, y3 = tl.where(keep2, x2, 0.0), tl.where(keep3, x3, 0.0)
        store_groups4(pruned, row_start, start, row_mask, n_groups, y0, y1, y2, y3, TILE)


@triton.jit
def _mask_nm_kernel(
    x, out, n_rows, n_groups, pruned,
    TILE: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, STORE_PRUNED: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    group, group_mask, _, element, mask = group_indices(row, start, n_rows, n_groups, TILE, M)
    values = load_groups(x, row, element, mask)
    keep = top_n_mask(magnitude_bits(values), x, row, group, group_mask, N, M, LOW)
    store_groups(out, row, element, mask, keep)
    if STORE_PRUNED:
        store_groups(pruned, row, element, mask, tl.where(keep, values, 0.0))


def _launch(
    x: Tensor, n: int, m: int, dim: int, low: bool, mask: Tensor, pruned: Tensor | None
) -> None:
    """Both results have the same strides, so they share one geometry."""
    values = mask if pruned is None else pruned
    out, meta = mask.view(torch.int8), {"LOW": low, "STORE_PRUNED": pruned is not None}
    if (n, m) == (2, 4):
        # any pointer for the code, where none is written
        launch_groups(_mask_24_kernel, m, dim, x, out, mask, out2=values, PACKED=False, **meta)
    else:
        launch_groups(_mask_nm_kernel, m, dim, x, out, out2=values, N=n, M=m, **meta)


def _launch_packed(x: Tensor, dim: int, low: bool, pruned: Tensor | None) -> Tensor:
    """Return the 2:4 mask in bits; values are written to ``pruned`` if there is one."""
    code, whole = empty_packed_mask(x), x.shape[1] % 8 == 0
    out = x if pruned is None else pruned
    meta = {"LOW": low, "STORE_PRUNED": pruned is not None, "PACKED": True}
    launch_groups(_mask_24_kernel, 4, dim, x, out, code, out2=out, indexed=not whole, **meta)
    return code


@operator("nm_code", fake=lambda x, dim, low: empty_packed_mask(x))
def nm_code_op(x: Tensor, dim: int, low: bool) -> Tensor:
    """The 2:4 mask of a contiguous matrix in bits."""
    return _launch_packed(x, dim, low, None)


@operator("nm_mask", fake=lambda x, n, m, dim, low: empty_out(x, dim, torch.bool))
def nm_mask_op(x: Tensor, n: int, m: int, dim: int, low: bool) -> Tensor:
    """A new mask, a bool for each element."""
    mask = empty_out(x, dim, torch.bool)
    _launch(x, n, m, dim, low, mask, None)
    return mask


def nm_mask(x: Tensor, n: int, m: int, dim: int, low: bool, packed: bool = False) -> Tensor:
    """:func:`sparsepretrain.kernels.nm_mask`; ``low``: the smaller index wins ties.

    ``packed``: in bits where one pass can write them.
    """
    if packed and (n, m) == (2, 4) and can_pack_mask(x, x):
        return nm_code_op(x, dim, low)
    return nm_mask_op(x, n, m, dim, low)


@operator(
    "nm_prune",
    fake=lambda x, n, m, dim, low: (empty_out(x, dim, x.dtype), empty_out(x, dim, torch.bool)),
)
def nm_prune_op(x: Tensor, n: int, m: int, dim: int, low: bool) -> tuple[Tensor, Tensor]:
    """:func:`nm_prune` into new tensors."""
    pruned, mask = empty_out(x, dim, x.dtype), empty_out(x, dim, torch.bool)
    _launch(x, n, m, dim, low, mask, pruned)
    return pruned, mask


def nm_prune(
    x: Tensor, n: int, m: int, dim: int, low: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`sparsepretrain.kernels.nm_prune`; into ``out`` the mask is packed where it can be."""
    if out is None or (n, m) != (2, 4) or not can_pack_mask(x, out):
        pruned, mask = nm_prune_op(x, n, m, dim, low)
        return pruned if out is None else out.copy_(pruned), mask
    code = _launch_packed(x, dim, low, out)
    torch.autograd.graph.increment_version(out)
    return out, code
