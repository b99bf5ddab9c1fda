"""Triton kernel of :mod:`sparsepretrain.kernels.mvue24`: the same operations in the same order.

Division is exact (``div_rn``) and products are not fused with sums, so fp32 results are the bits of
the reference. Where the reference computes with 0.0 and 1.0, decisions are booleans here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import NoiseKey
from sparsepretrain.kernels.triton.launch import (
    empty_rows,
    load_fours,
    maximum,
    minimum,
    operator,
    over_groups,
    starts_of,
    store_fours,
    tile_of,
)
from sparsepretrain.kernels.triton.noise import (
    KEY_ARGUMENTS,
    draw_bits,
    key_arguments,
    key_parts,
    to_unit,
)

_TINY: tl.constexpr = tl.constexpr(2.0**-126)
_FLOOR: tl.constexpr = tl.constexpr(2.0**-96)
"""Entries below this part of the largest are dropped; see ``mvue24._finish``."""


def mvue(
    x: Tensor, dim: int, estimator: str, uniforms: Tensor | None, key: NoiseKey | int | None
) -> Tensor:
    """:func:`sparsepretrain.kernels.mvue` for checked arguments."""
    return mvue_op(x, dim, estimator == "exact", uniforms, *key_parts(key or 0, x.device))


@operator("mvue", fake=lambda x, dim, *_: empty_rows(x, dim, x.dtype))
def mvue_op(
    x: Tensor,
    dim: int,
    exact: bool,
    uniforms: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
) -> Tensor:
    """:func:`mvue`; the key as :func:`key_parts` splits it."""
    out = empty_rows(x, dim, x.dtype)
    given = None
    if uniforms is not None:  # (rows, groups, draws)
        given = uniforms.reshape(uniforms.shape[:-2].numel(), *uniforms.shape[-2:])
        given = given.float().contiguous()
    key, most = key_arguments(tensors, numbers), torch.finfo(x.dtype).max
    options: Any = {"EXACT": exact, "GIVEN": given is not None}

    def launch(x: Tensor, out: Tensor, dim: int, first: int) -> None:
        """Sample the whole groups of ``x``, of which the first has the number ``first``."""
        noise = x if given is None else given  # any pointer, where none is read
        numbers = first, -(-x.shape[dim] // 4) + first, most
        over_groups(_sample, 4, dim, x, out, noise, *key, *numbers, numbered=True, **options)

    launch(x, out, dim, 0)
    length = x.shape[dim]
    tail = length % 4
    if tail:  # at most three positions per row: padded in a copy of their own
        last = x.narrow(dim, length - tail, tail).movedim(dim, -1)
        padded = torch.nn.functional.pad(last, (0, 4 - tail))
        pruned = empty_rows(padded, -1, x.dtype)
        launch(padded, pruned, -1, length // 4)
        out.narrow(dim, length - tail, tail).copy_(pruned[..., :tail].movedim(-1, dim))
    return out


@triton.jit(do_not_specialize=(*KEY_ARGUMENTS, "first_group"))
def _sample(
    x, out, count, groups, uniforms, k0, k1, offset, first_group, all_groups, saturation,
    TILE: tl.constexpr, EXACT: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row, start = tile_of(count, groups, TILE)
    number = first_group + start + tl.arange(0, TILE.GROUPS)
    x0, x1, x2, x3 = load_fours(x, starts_of(x, row), start, row < count, groups, TILE)
    if GIVEN:
        DRAWS: tl.constexpr = 1 if EXACT else 2
        pointers = uniforms + (row[:, None] * all_groups + number[None, :]) * DRAWS
        mask = (row < count)[:, None] & (number < all_groups)[None, :]
        r0 = tl.load(pointers, mask, 0)
        r1 = tl.load(pointers + (DRAWS - 1), mask, 0)
    else:
        first, second = draw_bits(number[None, :], row[:, None], k0, k1, offset)
        r0, r1 = to_unit(first), to_unit(second)
    y0, y1, y2, y3 = _estimate(x0, x1, x2, x3, r0, r1, saturation, EXACT)
    store_fours(out, starts_of(out, row), start, row < count, groups, y0, y1, y2, y3, TILE)


@triton.jit
def _estimate(x0, x1, x2, x3, r0, r1, saturation, EXACT: tl.constexpr):
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    # a subnormal or zero maximum is replaced by the smallest normal number: no 0/0, no overflow
    scale = maximum(maximum(maximum(a0, a1), maximum(a2, a3)), _TINY)
    b0, b1 = tl.div_rn(a0, scale), tl.div_rn(a1, scale)
    b2, b3 = tl.div_rn(a2, scale), tl.div_rn(a3, scale)
    if EXACT:
        y0, y1, y2, y3 = _exact(b0, b1, b2, b3, r0, scale, saturation)
    else:
        y0, y1, y2, y3 = _approximate(b0, b1, b2, b3, r0, r1, scale, saturation)
    # the second smallest below the floor: r·S could round up to S, so such entries are dropped
    low0, low1, low2, low3 = b0 < _FLOOR, b1 < _FLOOR, b2 < _FLOOR, b3 < _FLOOR
    sparse = _at_least_two(low0, low1, low2, low3)
    few = _at_least_two(x0 == 0, x1 == 0, x2 == 0, x3 == 0)
    y0, y1 = _signed(y0, x0, sparse, few | ~low0), _signed(y1, x1, sparse, few | ~low1)
    y2, y3 = _signed(y2, x2, sparse, few | ~low2), _signed(y3, x3, sparse, few | ~low3)
    return y0, y1, y2, y3


@triton.jit
def _approximate(b0, b1, b2, b3, r0, r1, scale, saturation):
    """Magnitudes of the estimates by two draws."""
    c1 = b0 + b1
    c2 = c1 + b2
    total = c2 + b3
    o0, o1, o2, o3 = _others(b0, b1, b2, b3)
    q0, q1, q2, q3 = _others(
        tl.div_rn(b0, o0), tl.div_rn(b1, o1), tl.div_rn(b2, o2), tl.div_rn(b3, o3)
    )
    v0, v1 = tl.div_rn(total, q0 + 1), tl.div_rn(total, q1 + 1)
    v2, v3 = tl.div_rn(total, q2 + 1), tl.div_rn(total, q3 + 1)
    i0, i1, i2, i3 = _one_hot(r0 * total, b0, c1, c2)
    rest0, rest1 = tl.where(i0, 0.0, b0), tl.where(i1, 0.0, b1)
    rest2, rest3 = tl.where(i2, 0.0, b2), tl.where(i3, 0.0, b3)
    d1 = rest0 + rest1
    d2 = d1 + rest2
    j0, j1, j2, j3 = _one_hot(r1 * (d2 + rest3), rest0, d1, d2)
    zero = total * 0  # a NaN must stay visible
    y0 = tl.where(i0 | j0, minimum(maximum(v0, b0) * scale, saturation), zero)
    y1 = tl.where(i1 | j1, minimum(maximum(v1, b1) * scale, saturation), zero)
    y2 = tl.where(i2 | j2, minimum(maximum(v2, b2) * scale, saturation), zero)
    y3 = tl.where(i3 | j3, minimum(maximum(v3, b3) * scale, saturation), zero)
    return y0, y1, y2, y3


@triton.jit
def _exact(b0, b1, b2, b3, u, scale, saturation):
    """Magnitudes of the estimates by systematic sampling."""
    o0, o1, o2, o3 = _others(b0, b1, b2, b3)
    half = (b0 + o0) * 0.5
    share = minimum(minimum(minimum(o0, o1), minimum(o2, o3)), half)
    p0, p1 = minimum(tl.div_rn(b0, share), 1.0), minimum(tl.div_rn(b1, share), 1.0)
    p2 = minimum(tl.div_rn(b2, share), 1.0)
    c1 = p0 + p1
    c2 = tl.where(b3 == 0, 2.0, c1 + p2)
    i0, i1, i2, i3 = _one_hot(u, p0, c1, c2)
    j0, j1, j2, j3 = _one_hot(u, p0 - 1, c1 - 1, c2 - 1)
    zero = share * 0  # a NaN must stay visible
    y0 = tl.where(i0 | j0, minimum(maximum(share, b0) * scale, saturation), zero)
    y1 = tl.where(i1 | j1, minimum(maximum(share, b1) * scale, saturation), zero)
    y2 = tl.where(i2 | j2, minimum(maximum(share, b2) * scale, saturation), zero)
    y3 = tl.where(i3 | j3, minimum(maximum(share, b3) * scale, saturation), zero)
    return y0, y1, y2, y3


@triton.jit
def _signed(magnitude, x, sparse, stays):
    """The magnitude with the sign of x; in ``sparse`` groups x where it ``stays``, else zero."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    y = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(sparse, tl.where(stays, x, 0.0), y)


@triton.jit
def _one_hot(u, first, second, third):
    """Which of the intervals ending at the three boundaries (and beyond) holds u."""
    a, b, c = u < first, u < second, u < third
    return a, b & ~a, c & ~b, ~c


@triton.jit
def _others(b0, b1, b2, b3):
    """Sum of the three other entries, for each entry; never a difference."""
    head, tail = b0 + b1, b2 + b3
    return b1 + tail, b0 + tail, head + b3, head + b2


@triton.jit
def _at_least_two(a, b, c, d):
    return (a & b) | (c & d) | ((a | b) & (c | d))
