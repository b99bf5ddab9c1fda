"""Minimum-variance unbiased N:M estimates (Chmiel et al., ICLR 2023, arXiv:2203.10991).

Of every M values N are kept and divided by their inclusion probability p, the rest is zero, so the
expectation is the input. 2:4 is here; other patterns: :mod:`sparsepretrain.kernels.mvue_nm`.
Nothing is ever formed as "total minus own": that is what makes the published kernel return NaN
when one value dominates its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepretrain.kernels.common import check_draws, from_groups, to_groups
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.keys import AnyKey
from sparsepretrain.kernels.mvue_nm import kept_value, power_of_two, signed, water_filled
from sparsepretrain.kernels.noise import uniform_noise


def mvue(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    dim: int = -1,
    estimator: str = "approximate",
    uniforms: Tensor | None = None,
    key: AnyKey | int | None = None,
    order: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Unbiased N:M estimate of ``x`` with groups of M consecutive elements along ``dim``.

    ``exact`` has the smallest variance any such estimator can have, drawn by systematic sampling:
    p_i = min(1, |x_i|/c) with Σp = N. ``approximate`` is a sampler of 2:4 alone, which draws one
    position with probability |x_i|/S and a second one from the rest (what the kernels of
    arXiv:2404.01847 and arXiv:2409.09099 run); other patterns have the exact one only, under either
    name. Groups with at most N non-zeros are returned unchanged. A length that is not a multiple of
    M is padded with zeros.
    Finite inputs give finite outputs, saturated at the largest value of the dtype; a group with
    NaN or infinity does not become finite.

    Args:
        x: floating-point tensor, any shape and strides.
        n: elements kept of every m, 1 ≤ n ≤ m.
        m: group size.
        dim: axis of the groups (for weight gradients: the tokens).
        estimator: ``"approximate"`` or ``"exact"``, of 2:4.
        uniforms: draws in [0, 1) of shape (…, groups, 2) for approximate 2:4, else (…, groups, 1):
            the shape of ``x`` with ``dim`` moved last and divided by M.
        key: stream of the counter-based generator (group index along ``dim``, flattened index of
            the other axes), or an integer seed. Used when ``uniforms`` is None.
        order: ``"tokens_last"``: ``dim`` lies along memory in the result, which is contiguous with
            ``dim`` moved last; None: the other axes do as they do in ``x``.

    Returns:
        tensor of the shape and dtype of ``x``; arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: impossible pattern, unknown estimator or order, neither or both of uniforms and
            key, wrong uniforms shape.
    """
    is_24 = (n, m) == (2, 4)
    kernel = kernel_of("mvue" if is_24 else "mvue_nm", backend, x, composed=not is_24)
    if kernel is None and backend not in (None, "reference"):
        raise ValueError(f"mvue: backend={backend!r} has no {n}:{m} kernel; use 'reference'")
    if not 1 <= n <= m:
        raise ValueError(f"mvue: N:M needs 1 ≤ N ≤ M, got {n}:{m}")
    if estimator not in ("approximate", "exact"):
        raise ValueError(f"mvue: estimator must be 'approximate' or 'exact', got {estimator!r}")
    if order not in (None, "tokens_last"):
        raise ValueError(f"mvue: order must be None or 'tokens_last', got {order!r}")
    draws = 2 if is_24 and estimator == "approximate" else 1
    shape = list(x.shape)
    groups = -(-shape.pop(dim) // m)
    check_draws("mvue", (*shape, groups, draws), uniforms, key)
    if kernel and is_24:
        return kernel(x.detach(), dim, estimator, uniforms, key, order)
    if kernel:
        return kernel(x.detach(), n, m, dim, uniforms, key, order)
    grouped = to_groups(x, dim, m)
    groups, _, features = grouped.shape
    if uniforms is None:
        noise = uniform_noise(key or 0, groups, features, draws, x.device, backend="reference")
        r = torch.stack(noise)
    else:
        r = uniforms.detach().reshape(features, groups, draws).to(grouped.dtype).permute(2, 1, 0)
    values, max_value = grouped.unbind(1), torch.finfo(x.dtype).max
    if is_24:
        method = _approximate if estimator == "approximate" else _exact
        found = method(values, r, max_value)
    else:
        found = water_filled(values, n, r[0], max_value)
    return from_groups(torch.stack(found, 1), x, dim, order)


def _normalize(x: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return magnitudes over a power of two, that power, the cutoff of unchanged entries.

    The largest magnitude comes to lie in [2, 4). Entries stay as they are, and the others are
    dropped, in groups with at most two that are not tiny relative to the largest; elsewhere that
    magnitude is infinite.
    """
    a = [v.abs() for v in x]
    low, high = torch.minimum(a[0], a[1]), torch.maximum(a[0], a[1])
    low2, high2 = torch.minimum(a[2], a[3]), torch.maximum(a[2], a[3])
    second = torch.minimum(torch.maximum(low, low2), torch.minimum(high, high2))
    largest, info = torch.maximum(high, high2), torch.finfo(high.dtype)
    # below the floor r·S may round up to S; such entries (10⁻²⁹ of the largest) are dropped
    floor = (largest * (info.tiny * 2.0**30)).clamp(min=info.tiny * info.eps)
    few = torch.where(second == 0, 0.0, floor)
    cutoff = torch.where(second < floor, few, torch.inf)
    power, inverse = power_of_two(largest)
    return [v * inverse for v in a], power, cutoff


def _approximate(x: Sequence[Tensor], r: Tensor, max_value: float) -> list[Tensor]:
    b, scale, cutoff = _normalize(x)
    # First draw: the smallest i with r0·S < C_i. In floating point too r0·S < S for r0 ≤ 1 - 2⁻²⁴,
    # and an empty interval cannot be hit: a zero is never drawn.
    c1 = b[0] + b[1]
    c2 = c1 + b[2]
    total = c2 + b[3]
    u = r[0] * total
    at0, to1, to2 = u < b[0], u < c1, u < c2
    first = torch.where(at0, b[0], torch.where(to1, b[1], torch.where(to2, b[2], b[3])))
    # Second draw: the same among the other three, in order.
    e0, e1 = torch.where(at0, b[1], b[0]), torch.where(to1, b[2], b[1])
    e2 = torch.where(to2, b[3], b[2])
    d1 = e0 + e1
    others = d1 + e2
    u = r[1] * others
    near, nearer = u < d1, u < e0
    second = torch.where(nearer, e0, torch.where(near, e1, e2))
    k, m = torch.where(nearer, e1, e0), torch.where(near, e2, e1)
    # With Q_j = b_j/(S - b_j): p_i = b_i/S·(1 + Σ_{j≠i} Q_j). For i and j drawn and k, m not,
    # 1 + Q_j = S/(S - b_j) and Q_k + Q_m = n/d, hence |x_i|/p_i = S·d·o/(S·d + n·o), o = S - b_j.
    # Only n has a difference, of which a half remains at least.
    remaining, product = k + m, k * m
    d = (first + second) * total + product
    n = remaining * total - product - product
    whole, without_second = total * d, first + remaining
    value = without_second * (whole / (n * without_second + whole))
    value2 = others * (whole / (n * others + whole))
    y = kept_value(value, first, scale, cutoff, max_value)
    y2 = kept_value(value2, second, scale, cutoff, max_value)
    zero = total * 0  # propagates NaN
    h0 = torch.where(nearer, y2, zero)
    h1 = torch.where(nearer, zero, torch.where(near, y2, zero))
    h2 = torch.where(near, zero, y2)
    magnitudes = (
        torch.where(at0, y, h0),
        torch.where(at0, h0, torch.where(to1, y, h1)),
        torch.where(to1, h1, torch.where(to2, y, h2)),
        torch.where(to2, h2, y),
    )
    return signed(x, magnitudes, cutoff)


def _exact(x: Sequence[Tensor], r: Tensor, max_value: float) -> list[Tensor]:
    b, scale, cutoff = _normalize(x)
    head, tail = b[0] + b[1], b[2] + b[3]
    o0, o1, o2, o3 = b[1] + tail, b[0] + tail, head + b[3], head + b[2]  # never a difference
    others = torch.minimum(torch.minimum(o0, o1), torch.minimum(o2, o3))
    # The largest is certain when it outweighs the rest; what remains is shared either way
    step = torch.minimum(others, (b[0] + o0) * 0.5)
    # Systematic sampling: intervals of length q_i = p_i·step end to end on [0, 2·step), hit by
    # u and u + step. Rounded too, q0 + q1 + q2 ≥ step > u: two different entries are hit.
    q0, q1, q2 = (torch.minimum(v, step) for v in b[:3])
    c1 = q0 + q1
    c2 = torch.where(b[3] == 0, torch.inf, c1 + q2)  # no room for a zero by rounding
    u = r[0] * step
    again = u + step
    at0, to1, again1, again2 = u < q0, u < c1, again < c1, again < c2
    kept = at0, (to1 & ~at0) | again1, ~to1 | (again2 & ~again1), ~again2
    zero = step * 0  # propagates NaN
    magnitudes = [
        torch.where(keep, kept_value(step, v, scale, cutoff, max_value), zero)
        for keep, v in zip(kept, b, strict=True)
    ]
    return signed(x, magnitudes, cutoff)
