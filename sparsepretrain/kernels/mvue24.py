"""Minimum-variance unbiased 2:4 estimates (Chmiel et al., ICLR 2023, arXiv:2203.10991).

Of every four values two are kept and divided by their inclusion probability p, the rest is zero,
so the expectation is the input. Nothing is ever formed as "total minus own": that is what makes
the published kernel return NaN when one value dominates its group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import array_module, choose_backend, in_chunks, signed
from sparsepretrain.kernels.noise import NoiseKey, draw

Array = Any
"""A tensor, or a NumPy array that shares memory with one: see :func:`array_module`."""


def mvue(
    x: Tensor,
    *,
    dim: int = -1,
    estimator: str = "approximate",
    uniforms: Tensor | None = None,
    key: NoiseKey | int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Unbiased 2:4 estimate of ``x`` with groups of four consecutive elements along ``dim``.

    ``approximate`` draws one position with probability |x_i|/S and a second one from the rest
    (what the kernels of arXiv:2404.01847 and arXiv:2409.09099 run); ``exact`` has the smallest
    variance any such estimator can have, drawn by systematic sampling. Groups with at most two
    non-zeros are returned unchanged. A length that is not a multiple of four is padded with zeros.
    Finite inputs give finite outputs, saturated at the largest value of the dtype; a group with
    NaN or infinity does not become finite.

    Args:
        x: floating-point tensor, any shape and strides.
        dim: axis of the groups (for weight gradients: the tokens).
        estimator: ``"approximate"`` or ``"exact"``.
        uniforms: draws in [0, 1) of shape (…, groups, 2) for approximate, (…, groups, 1) for
            exact: the shape of ``x`` with ``dim`` moved last and divided by four.
        key: stream of the counter-based generator (group index along ``dim``, flattened index of
            the other axes), or an integer seed. Used when ``uniforms`` is None.
        backend: None, ``"reference"`` or ``"triton"``.

    Returns:
        tensor of the shape and dtype of ``x``; arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: unknown estimator, neither or both of uniforms and key, wrong uniforms shape.
    """
    triton = choose_backend("mvue", backend, x) == "triton"
    if estimator not in ("approximate", "exact"):
        raise ValueError(f"mvue: estimator must be 'approximate' or 'exact', got {estimator!r}")
    if (uniforms is None) == (key is None):
        raise ValueError("mvue: give either uniforms or key")
    draws = 2 if estimator == "approximate" else 1
    _check_draws(x, dim, draws, uniforms)
    if triton:
        from sparsepretrain.kernels import mvue24_triton

        return mvue24_triton.sample(x.detach(), dim, estimator == "exact", uniforms, key)
    estimate = _approximate if estimator == "approximate" else _exact
    x = x.detach()
    wide = x if x.dtype == torch.float64 else x.float()
    rows = wide.movedim(dim, 0)
    length, rest = rows.shape[0], rows.shape[1:]
    rows = rows.reshape(length, rest.numel())
    if length % 4:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 4 - length % 4))
    groups, features = rows.shape[0] // 4, rows.shape[1]
    four = rows.view(groups, 4, features)
    given = None  # bound in either case: compiled graphs cannot hold an empty cell
    if uniforms is not None:
        given = uniforms.detach().reshape(features, groups, draws).to(wide.dtype).permute(2, 1, 0)
    stream = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key or 0)
    out = torch.empty_like(four, memory_format=torch.contiguous_format)
    xp = array_module(x.device)
    source, target = (four, out) if xp is torch else (four.numpy(), out.numpy())

    def sample(start: int, stop: int) -> None:
        if given is None:
            part = stream._replace(offset=stream.offset + start)
            r = draw(part, stop - start, features, draws, x.device)
        else:
            chosen = given[:, start:stop]
            r = list(chosen if xp is torch else chosen.numpy())
        values = [source[start:stop, k] for k in range(4)]
        parts = estimate(xp, values, r, torch.finfo(x.dtype).max)
        for k, part in enumerate(parts):
            target[start:stop, k] = part

    with contextlib.nullcontext() if xp is torch else xp.errstate(all="ignore"):
        in_chunks(sample, groups, features, x.device)
    pruned = out.view(groups * 4, features)[:length]
    return pruned.view(length, *rest).movedim(0, dim).to(x.dtype)


def _check_draws(x: Tensor, dim: int, draws: int, uniforms: Tensor | None) -> None:
    rest = list(x.shape)
    groups = -(-rest.pop(dim) // 4)
    wanted = (*rest, groups, draws)
    if uniforms is not None and uniforms.shape != wanted:
        got = tuple(uniforms.shape)
        raise ValueError(f"mvue: uniforms must have shape {wanted}, got {got}")


def _normalise(xp: Any, x: Sequence[Array]) -> tuple[list[Array], Array, Array]:
    """(magnitudes divided by the group's largest, that largest, second smallest of the former)."""
    a = [xp.abs(v) for v in x]
    low, high = xp.minimum(a[0], a[1]), xp.maximum(a[0], a[1])
    low2, high2 = xp.minimum(a[2], a[3]), xp.maximum(a[2], a[3])
    largest = xp.maximum(high, high2)
    second = xp.minimum(xp.maximum(low, low2, out=low), xp.minimum(high, high2, out=high))
    # a subnormal or zero maximum is replaced by the smallest normal number: no 0/0, no overflow
    largest = xp.clip(largest, xp.finfo(largest.dtype).tiny, None)
    for v in (*a, second):
        v /= largest
    return a, largest, second


def _finish(
    xp: Any,
    x: Sequence[Array],
    b: list[Array],
    selected: list[Array],
    value: list[Array],
    second: Array,
    saturation: float,
) -> list[Array]:
    """sign(x)·value where selected; groups with at most two non-zeros stay as they are."""
    out = []
    for xi, keep, v in zip(x, selected, value, strict=True):
        capped = torch.clip(v, max=saturation) if xp is torch else xp.minimum(v, saturation)
        estimate = signed(xp, capped, xi)
        estimate *= keep  # by 0 or 1, not a selection: a NaN must stay visible
        out.append(estimate)
    # below the floor r·S may round up to S; such entries (10⁻²⁹ of the largest) are dropped
    floor = float(xp.finfo(second.dtype).tiny) * 2**30
    # where looking costs no synchronisation, it is cheaper than selections that change nothing
    if xp is not torch and second.size and second.min() >= floor:  # false for NaN
        return out
    sparse = second < floor
    few = (x[0] != 0) * 1 + (x[1] != 0) + (x[2] != 0) + (x[3] != 0) <= 2
    zero = x[0] * 0 if xp is torch else xp.float32(0)
    return [
        xp.where(sparse, xp.where(few | ~(bi < floor), xi, zero), v)
        for xi, bi, v in zip(x, b, out, strict=True)
    ]


def _others(b: list[Array]) -> list[Array]:
    """Sum of the three other entries, for each entry; never a difference."""
    head, tail = b[0] + b[1], b[2] + b[3]
    return [b[1] + tail, b[0] + tail, head + b[3], head + b[2]]


def _below(xp: Any, u: Array, boundary: Array) -> Array:
    """1.0 where u < boundary, else 0.0."""
    return (u < boundary).to(u.dtype) if xp is torch else (u < boundary).astype(u.dtype)


def _one_hot(xp: Any, u: Array, first: Array, second: Array, third: Array) -> list[Array]:
    """Which of the intervals ending at the three boundaries (and beyond) holds u, as 0.0 or 1.0."""
    a, b, c = _below(xp, u, first), _below(xp, u, second), _below(xp, u, third)
    return [a, b - a, c - b, 1 - c]


def _approximate(xp: Any, x: Sequence[Array], r: list[Array], saturation: float) -> list[Array]:
    b, scale, smallest = _normalise(xp, x)
    # First draw: the smallest i with r0·S < C_i. In floating point too r0·S < S for r0 ≤ 1 - 2⁻²⁴,
    # and an empty interval cannot be hit: a zero is never drawn.
    c1 = b[0] + b[1]
    c2 = c1 + b[2]
    total = c2 + b[3]
    selected = _one_hot(xp, r[0] * total, b[0], c1, c2)
    # Second draw: the same among the other three.
    rest = [v - v * hit for v, hit in zip(b, selected, strict=True)]
    c1 = rest[0] + rest[1]
    c2 = c1 + rest[2]
    again = _one_hot(xp, r[1] * (c2 + rest[3]), rest[0], c1, c2)
    selected = [hit + other for hit, other in zip(selected, again, strict=True)]
    del rest, c1, c2, again  # all of a chunk's temporaries live in cache
    # p_i = b_i/S·(1 + Q_i), Q_i = Σ_{j≠i} b_j/(S - b_j); hence |x_i|/p_i = S/(1 + Q_i)
    odds = [v / others for v, others in zip(b, _others(b), strict=True)]
    value = [
        xp.maximum(total / (q + 1), v) * scale  # p ≤ 1
        for q, v in zip(_others(odds), b, strict=True)
    ]
    return _finish(xp, x, b, selected, value, smallest, saturation)


def _exact(xp: Any, x: Sequence[Array], r: list[Array], saturation: float) -> list[Array]:
    b, scale, smallest = _normalise(xp, x)
    others = _others(b)
    rest = xp.minimum(xp.minimum(others[0], others[1]), xp.minimum(others[2], others[3]))
    half = (b[0] + others[0]) / 2
    # The largest is certain when it outweighs the rest; what remains is shared either way
    share = xp.minimum(rest, half)
    p = [xp.clip(v / share, None, 1) for v in b]
    # Systematic sampling: intervals of length p_i end to end on [0, 2), hit by u and u + 1.
    c1 = p[0] + p[1]
    c2 = xp.where(b[3] == 0, half * 0 + 2, c1 + p[2])  # no room for a zero by rounding
    first = _one_hot(xp, r[0], p[0], c1, c2)
    second = _one_hot(xp, r[0], p[0] - 1, c1 - 1, c2 - 1)  # u + 1 could round up to 2
    selected = [xp.maximum(hit, other) for hit, other in zip(first, second, strict=True)]
    value = [xp.maximum(share, v) * scale for v in b]
    return _finish(xp, x, b, selected, value, smallest, saturation)
