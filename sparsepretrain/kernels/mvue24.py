"""Minimum-variance unbiased 2:4 estimates (Chmiel et al., ICLR 2023, arXiv:2203.10991).

Of every four values two are kept and divided by their inclusion probability p, the rest is zero,
so the expectation is the input. Nothing is ever formed as "total minus own": that is what makes
the published kernel return NaN when one value dominates its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepretrain.kernels.common import NoiseKey, fours_of, from_fours
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.noise import uniform_noise


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

    Returns:
        tensor of the shape and dtype of ``x``; arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: unknown estimator, neither or both of uniforms and key, wrong uniforms shape.
    """
    kernel = kernel_of("mvue", backend, x)
    if estimator not in ("approximate", "exact"):
        raise ValueError(f"mvue: estimator must be 'approximate' or 'exact', got {estimator!r}")
    if (uniforms is None) == (key is None):
        raise ValueError("mvue: give either uniforms or key")
    draws = 2 if estimator == "approximate" else 1
    _check_draws(x, dim, draws, uniforms)
    if kernel:
        return kernel(x.detach(), dim, estimator, uniforms, key)
    fours = fours_of(x, dim)
    groups, _, features = fours.shape
    if uniforms is None:
        stream = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key or 0)
        noise = uniform_noise(stream, groups, features, draws, x.device, backend="reference")
        given = torch.stack(noise)
    else:
        given = uniforms.detach().reshape(features, groups, draws).to(fours.dtype).permute(2, 1, 0)
    method = _approximate if estimator == "approximate" else _exact
    out = torch.stack(method(fours.unbind(1), given, torch.finfo(x.dtype).max), 1)
    return from_fours(out, x, dim)


def _check_draws(x: Tensor, dim: int, draws: int, uniforms: Tensor | None) -> None:
    rest = list(x.shape)
    groups = -(-rest.pop(dim) // 4)
    wanted = (*rest, groups, draws)
    if uniforms is not None and uniforms.shape != wanted:
        got = tuple(uniforms.shape)
        raise ValueError(f"mvue: uniforms must have shape {wanted}, got {got}")


def _normalise(x: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """(magnitudes divided by the group's largest, that largest, second smallest of the former)."""
    a = [v.abs() for v in x]
    low, high = torch.minimum(a[0], a[1]), torch.maximum(a[0], a[1])
    low2, high2 = torch.minimum(a[2], a[3]), torch.maximum(a[2], a[3])
    second = torch.minimum(torch.maximum(low, low2), torch.minimum(high, high2))
    # a subnormal or zero maximum is replaced by the smallest normal number: no 0/0, no overflow
    largest = torch.maximum(high, high2).clamp(min=torch.finfo(high.dtype).tiny)
    return [v / largest for v in a], largest, second / largest


def _finish(
    x: Sequence[Tensor],
    b: list[Tensor],
    selected: list[Tensor],
    value: Sequence[Tensor],
    scale: Tensor,
    second: Tensor,
    saturation: float,
) -> list[Tensor]:
    """sign(x)·scale·max(value, b) where selected; at most two non-zeros stay as they are."""
    # multiplied by 0 or 1, not a selection: a NaN must stay visible
    out = [
        torch.copysign((torch.maximum(v, bi) * scale).clamp(max=saturation), xi) * keep  # p ≤ 1
        for xi, bi, keep, v in zip(x, b, selected, value, strict=True)
    ]
    # below the floor r·S may round up to S; such entries (10⁻²⁹ of the largest) are dropped
    floor = float(torch.finfo(second.dtype).tiny) * 2**30
    sparse = second < floor
    few = (x[0] != 0) * 1 + (x[1] != 0) + (x[2] != 0) + (x[3] != 0) <= 2
    return [
        torch.where(sparse, torch.where(few | ~(bi < floor), xi, 0), v)
        for xi, bi, v in zip(x, b, out, strict=True)
    ]


def _others(b: list[Tensor]) -> list[Tensor]:
    """Sum of the three other entries, for each entry; never a difference."""
    head, tail = b[0] + b[1], b[2] + b[3]
    return [b[1] + tail, b[0] + tail, head + b[3], head + b[2]]


def _one_hot(u: Tensor, first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
    """Which of the intervals ending at the three boundaries (and beyond) holds u, as 0.0 or 1.0."""
    a, b, c = ((u < boundary).to(u.dtype) for boundary in (first, second, third))
    return [a, b - a, c - b, 1 - c]


def _approximate(x: Sequence[Tensor], r: Tensor, saturation: float) -> list[Tensor]:
    b, scale, smallest = _normalise(x)
    # First draw: the smallest i with r0·S < C_i. In floating point too r0·S < S for r0 ≤ 1 - 2⁻²⁴,
    # and an empty interval cannot be hit: a zero is never drawn.
    c1 = b[0] + b[1]
    c2 = c1 + b[2]
    total = c2 + b[3]
    selected = _one_hot(r[0] * total, b[0], c1, c2)
    # Second draw: the same among the other three.
    rest = [v - v * hit for v, hit in zip(b, selected, strict=True)]
    c1 = rest[0] + rest[1]
    c2 = c1 + rest[2]
    again = _one_hot(r[1] * (c2 + rest[3]), rest[0], c1, c2)
    selected = [hit + other for hit, other in zip(selected, again, strict=True)]
    # p_i = b_i/S·(1 + Q_i), Q_i = Σ_{j≠i} b_j/(S - b_j); hence |x_i|/p_i = S/(1 + Q_i)
    odds = [v / others for v, others in zip(b, _others(b), strict=True)]
    value = [total / (q + 1) for q in _others(odds)]
    return _finish(x, b, selected, value, scale, smallest, saturation)


def _exact(x: Sequence[Tensor], r: Tensor, saturation: float) -> list[Tensor]:
    b, scale, smallest = _normalise(x)
    others = _others(b)
    rest = torch.minimum(torch.minimum(others[0], others[1]), torch.minimum(others[2], others[3]))
    half = (b[0] + others[0]) / 2
    # The largest is certain when it outweighs the rest; what remains is shared either way
    share = torch.minimum(rest, half)
    p = [(v / share).clamp(max=1) for v in b]
    # Systematic sampling: intervals of length p_i end to end on [0, 2), hit by u and u + 1.
    c1 = p[0] + p[1]
    c2 = torch.where(b[3] == 0, 2.0, c1 + p[2])  # no room for a zero by rounding
    first = _one_hot(r[0], p[0], c1, c2)
    second = _one_hot(r[0], p[0] - 1, c1 - 1, c2 - 1)  # u + 1 could round up to 2
    selected = [torch.maximum(hit, other) for hit, other in zip(first, second, strict=True)]
    return _finish(x, b, selected, [share] * 4, scale, smallest, saturation)
