"""Triton kernels of :mod:`sparsepretrain.kernels.sdgp`: select and prune in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.keys import AnyKey
from sparsepretrain.kernels.triton.launch import empty_out, launch_groups, operator
from sparsepretrain.kernels.triton.nm import magnitude_bits, top_2_of_4, top_n_mask
from sparsepretrain.kernels.triton.noise import (
    KEY_ARGUMENTS,
    draw_bits,
    key_arguments,
    key_parts,
    key_words,
)
from sparsepretrain.kernels.triton.tiles import (
    group_indices,
    load_groups,
    load_groups4,
    program_tile,
    row_offsets,
    store_groups,
    store_groups4,
)


@triton.jit
def _random_keys(row, element, words):
    """Return random keys that sort like the uniforms of the elements; counter (row, element)."""
    first, _ = draw_bits(row, element, words)
    return (first >> 8).to(tl.int32)


@triton.jit
def _random_top_n_mask(keys, row, group, words, N: tl.constexpr, M: tl.constexpr):
    """Variant of :func:`top_n_mask` for random keys, which are drawn again instead of loaded."""
    pos = tl.arange(0, keys.shape[2])[None, None, :]
    losses = tl.zeros(keys.shape, tl.int32)
    for j in tl.range(0, M):
        other = _random_keys(row[:, None], (group * M + j)[None, :], words)[:, :, None]
        losses += ((other > keys) | ((other == keys) & (pos < j))).to(tl.int32)
    return (losses < N) & (pos < M)


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _prune_24_kernel(
    x, out, n_rows, n_groups, clock_ptr, k0, k1, layer, matmul, offset, scale,
    TILE: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    x0, x1, x2, x3 = load_groups4(x, row_offsets(x, row), start, row < n_rows, n_groups, TILE)
    if RANDOM:
        token, element = row[:, None], ((start + tl.arange(0, TILE.GROUPS)) * 4)[None, :]
        words = key_words(clock_ptr, k0, k1, layer, matmul, offset)
        keep0, keep1, keep2, keep3 = top_2_of_4(
            _random_keys(token, element, words), _random_keys(token, element + 1, words),
            _random_keys(token, element + 2, words), _random_keys(token, element + 3, words),
            False,
        )  # fmt: skip
        x0, x1, x2, x3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    else:
        keep0, keep1, keep2, keep3 = top_2_of_4(
            magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3), True
        )
    y0, y1 = tl.where(keep0, x0, 0.0), tl.where(keep1, x1, 0.0)
    y2, y3 = tl.where(keep2, x2, 0.0), tl.where(keep3, x3, 0.0)
    store_groups4(out, row_offsets(out, row), start, row < n_rows, n_groups, y0, y1, y2, y3, TILE)


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _prune_nm_kernel(
    x, out, n_rows, n_groups, clock_ptr, k0, k1, layer, matmul, offset, scale,
    TILE: tl.constexpr, N: tl.constexpr, M: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    row, start = program_tile(n_rows, n_groups, TILE)
    group, group_mask, _, element, mask = group_indices(row, start, n_rows, n_groups, TILE, M)
    values = load_groups(x, row, element, mask)
    if RANDOM:
        words = key_words(clock_ptr, k0, k1, layer, matmul, offset)
        keys = _random_keys(row[:, None, None], element, words)
        keep = _random_top_n_mask(keys, row, group, words, N, M)
        values = values * scale
    else:
        keys = magnitude_bits(values)
        keep = top_n_mask(keys, x, row, group, group_mask, N, M, True)
    store_groups(out, row, element, mask, tl.where(keep, values, 0.0))


@operator("prune_gradient", fake=lambda g, n, m, dim, *_: empty_out(g, dim, g.dtype))
def prune_gradient_op(
    g: Tensor,
    n: int,
    m: int,
    dim: int,
    random: bool,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
) -> Tensor:
    """Operator of :func:`prune_gradient`; ``tensors``, ``numbers``: see :func:`key_parts`."""
    out = empty_out(g, dim, g.dtype)
    kernel = _prune_24_kernel if (n, m) == (2, 4) else _prune_nm_kernel
    pattern: Any = {} if (n, m) == (2, 4) else {"N": n, "M": m}
    args = (*key_arguments(tensors, numbers), scale)
    launch_groups(kernel, m, dim, g, out, *args, indexed=random, RANDOM=random, **pattern)
    return out


def prune_gradient(
    g: Tensor, n: int, m: int, dim: int, key: AnyKey | int | None = None, scale: float = 1.0
) -> Tensor:
    """Prune ``g`` by magnitude (low index wins ties), or at random and scaled if there is a key."""
    return prune_gradient_op(g, n, m, dim, key is not None, *key_parts(key, g.device), scale)
