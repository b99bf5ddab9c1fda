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
    """Return the bits of fp32 |x| as int32, which sort like |x|; NaN sorts above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _majority(a, b, c):
    return (a & b) | (c & (a | b))


@triton.jit
def top_2_of_4(k0, k1, k2, k3, LOW: tl.constexpr):
    """Mark the two largest of four keys; ties go to the higher position, to the lower if LOW."""
    if LOW:
        b01, b02, b03 = k0 >= k1, k0 >= k2, k0 >= k3
        b12, b13, b23 = k1 >= k2, k1 >= k3, k2 >= k3
    else:
        b01, b02, b03 = k0 > k1, k0 > k2, k0 > k3
        b12, b13, b23 = k1 > k2, k1 > k3, k2 > k3
    # a key is kept if it beats at least two of the other three
    keep0 = _majority(b01, b02, b03)
    keep1 = _majority(~b01, b12, b13)
    keep2 = _majority(~b02, ~b12, b23)
    keep3 = _majority(~b03, ~b13, ~b23)
    return keep0, keep1, keep2, keep3


@triton.jit
def top_n_mask(
    keys, x, row, group, group_mask, N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """Mark the N largest keys of each group in a tile of :func:`group_indices`.

    An element is kept if fewer than N others beat it. The others are loaded again, one position at
    a time: they hit the L1 cache, and M² comparisons need no registers.
    """
    pos = tl.arange(0, keys.shape[2])[None, None, :]
    losses = tl.zeros(keys.shape, tl.int32)
    for j in tl.range(0, M):
        offsets = element_offsets(x, row, group * M + j)
        other = magnitude_bits(widen(tl.load(x.ptr + offsets, group_mask, 0)))[:, :, None]
        wins_tie = (pos > j) if LOW else (pos < j)
        losses += ((other > keys) | ((other == keys) & wins_tie)).to(tl.int32)
    return (losses < N) & (pos < M)


@triton.jit
def _mask_24_kernel(
    x, out, n_rows, n_groups, pruned, code_ptr, TILE: tl.constexpr,
    LOW: tl.constexpr, STORE_PRUNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store the mask to ``out`` or packed to ``code_ptr``, and kept values to ``pruned``."""
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
    x, out, n_rows, n_groups, pruned, TILE: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, STORE_PRUNED: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    group, group_mask, _, element, mask = group_indices(row, start, n_rows, n_groups, TILE, M)
    values = load_groups(x, row, element, mask)
    keep = top_n_mask(magnitude_bits(values), x, row, group, group_mask, N, M, LOW)
    store_groups(out, row, element, mask, keep)
    if STORE_PRUNED:
        store_groups(pruned, row, element, mask, tl.where(keep, values, 0.0))


def _launch_mask(
    x: Tensor, n: int, m: int, dim: int, low: bool, mask: Tensor, pruned: Tensor | None
) -> None:
    """Write the mask, and kept values to ``pruned`` unless it is None; strides must be equal."""
    values = mask if pruned is None else pruned
    out, meta = mask.view(torch.int8), {"LOW": low, "STORE_PRUNED": pruned is not None}
    if (n, m) == (2, 4):
        # the mask is an unused pointer in place of the packed mask
        launch_groups(_mask_24_kernel, m, dim, x, out, mask, out2=values, PACKED=False, **meta)
    else:
        launch_groups(_mask_nm_kernel, m, dim, x, out, out2=values, N=n, M=m, **meta)


def _launch_packed_mask(x: Tensor, dim: int, low: bool, pruned: Tensor | None) -> Tensor:
    """Return the packed 2:4 mask; write kept values to ``pruned`` unless it is None."""
    code, aligned = empty_packed_mask(x), x.shape[1] % 8 == 0
    out = x if pruned is None else pruned
    meta = {"LOW": low, "STORE_PRUNED": pruned is not None, "PACKED": True}
    launch_groups(_mask_24_kernel, 4, dim, x, out, code, out2=out, indexed=not aligned, **meta)
    return code


@operator("nm_code", fake=lambda x, dim, low: empty_packed_mask(x))
def nm_code_op(x: Tensor, dim: int, low: bool) -> Tensor:
    """Return the packed 2:4 mask of a contiguous matrix."""
    return _launch_packed_mask(x, dim, low, None)


@operator("nm_mask", fake=lambda x, n, m, dim, low: empty_out(x, dim, torch.bool))
def nm_mask_op(x: Tensor, n: int, m: int, dim: int, low: bool) -> Tensor:
    """Return a new bool mask."""
    mask = empty_out(x, dim, torch.bool)
    _launch_mask(x, n, m, dim, low, mask, None)
    return mask


def nm_mask(x: Tensor, n: int, m: int, dim: int, low: bool, packed: bool = False) -> Tensor:
    """See :func:`sparsepretrain.kernels.nm_mask`; ``low``: the smaller index wins ties.

    ``packed`` is a wish: the mask is bool where one pass cannot pack it.
    """
    if packed and (n, m) == (2, 4) and can_pack_mask(x, x):
        return nm_code_op(x, dim, low)
    return nm_mask_op(x, n, m, dim, low)


@operator(
    "nm_prune",
    fake=lambda x, n, m, dim, low: (empty_out(x, dim, x.dtype), empty_out(x, dim, torch.bool)),
)
def nm_prune_op(x: Tensor, n: int, m: int, dim: int, low: bool) -> tuple[Tensor, Tensor]:
    """Variant of :func:`nm_prune` that returns new tensors."""
    pruned, mask = empty_out(x, dim, x.dtype), empty_out(x, dim, torch.bool)
    _launch_mask(x, n, m, dim, low, mask, pruned)
    return pruned, mask


def nm_prune(
    x: Tensor, n: int, m: int, dim: int, low: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`sparsepretrain.kernels.nm_prune`; with ``out`` the mask may be packed."""
    if out is None or (n, m) != (2, 4) or not can_pack_mask(x, out):
        pruned, mask = nm_prune_op(x, n, m, dim, low)
        return pruned if out is None else out.copy_(pruned), mask
    code = _launch_packed_mask(x, dim, low, out)
    torch.autograd.graph.increment_version(out)
    return out, code
