"""Minimum-variance unbiased 2:4 estimates (Chmiel et al., ICLR 2023, arXiv:2203.10991).

Of every four values two are kept and divided by their inclusion probability p, the rest is zero,
so the expectation is the input. Nothing is ever formed as "total minus own": that is what makes
the published kernel return NaN when one value dominates its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import choose_backend, in_chunks
from sparsepretrain.kernels.noise import NoiseKey, uniform_noise

Four = tuple[Tensor, ...]


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
    choose_backend("mvue", backend)
    if estimator not in ("approximate", "exact"):
        raise ValueError(f"mvue: estimator must be 'approximate' or 'exact', got {estimator!r}")
    if (uniforms is None) == (key is None):
        raise ValueError("mvue: give either uniforms or key")
    draws = 2 if estimator == "approximate" else 1
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
    if uniforms is not None:
        if uniforms.shape != (*rest, groups, draws):
            wanted, got = (*rest, groups, draws), tuple(uniforms.shape)
            raise ValueError(f"mvue: uniforms must have shape {wanted}, got {got}")
        given = uniforms.reshape(features, groups, draws).to(wide.dtype).permute(2, 1, 0)
    stream = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key or 0)
    out = torch.empty_like(four, memory_format=torch.contiguous_format)

    def sample(start: int, stop: int) -> None:
        if uniforms is None:
            part = stream._replace(offset=stream.offset + start)
            r = uniform_noise(part, stop - start, features, draws, x.device)
        else:
            r = list(given[:, start:stop])
        parts = estimate(four[start:stop].unbind(1), r, torch.finfo(x.dtype).max)
        torch.stack(parts, 1, out=out[start:stop])

    in_chunks(sample, groups, features, x.device)
    pruned = out.view(groups * 4, features)[:length]
    return pruned.view(length, *rest).movedim(0, dim).to(x.dtype)


def _normalise(x: Four) -> tuple[list[Tensor], Tensor, Tensor]:
    """(magnitudes divided by the group's largest, that largest, second smallest of the former)."""
    a = [v.abs() for v in x]
    low, high = torch.minimum(a[0], a[1]), torch.maximum(a[0], a[1])
    low2, high2 = torch.minimum(a[2], a[3]), torch.maximum(a[2], a[3])
    largest = torch.maximum(high, high2)
    second = torch.minimum(torch.maximum(low, low2, out=low), torch.minimum(high, high2, out=high))
    # a subnormal or zero maximum is replaced by the smallest normal number: no 0/0, no overflow
    largest.clamp_(min=torch.finfo(largest.dtype).tiny)
    return [v.div_(largest) for v in a], largest, second.div_(largest)


def _finish(
    x: Four,
    b: list[Tensor],
    selected: list[Tensor],
    value: list[Tensor],
    second: Tensor,
    saturation: float,
) -> list[Tensor]:
    """sign(x)·value where selected; groups with at most two non-zeros stay as they are."""
    out = [
        # multiplied by 0 or 1, not selected: a NaN must stay visible
        torch.copysign(v.clamp_(max=saturation), xi, out=v).mul_(keep)
        for xi, keep, v in zip(x, selected, value, strict=True)
    ]
    # below the floor r·S may round up to S; such entries (10⁻²⁹ of the largest) are dropped
    floor = torch.finfo(second.dtype).tiny * 2**30
    # in eager mode on the CPU the test is cheaper than selections that change nothing
    eager = second.device.type == "cpu" and not torch.compiler.is_compiling()
    if not eager or (second.numel() and not float(second.amin()) >= floor):  # true for NaN
        sparse = second < floor
        few = torch.stack([xi != 0 for xi in x]).sum(0) <= 2
        out = [
            torch.where(sparse, torch.where(few | ~(bi < floor), xi, 0), v)
            for xi, bi, v in zip(x, b, out, strict=True)
        ]
    return out


def _others(b: list[Tensor]) -> list[Tensor]:
    """Sum of the three other entries, for each entry; never a difference."""
    head, tail = b[0] + b[1], b[2] + b[3]
    return [b[1] + tail, tail.add_(b[0]), head + b[3], head.add_(b[2])]


def _below(u: Tensor, boundary: Tensor) -> Tensor:
    """1.0 where u < boundary, else 0.0; NaN stays NaN.

    Arithmetic on floats, since comparisons and selections are not vectorised by torch on the CPU.
    Any positive difference, subnormal or not, exceeds 1 after two factors of the largest number.
    """
    huge = torch.finfo(u.dtype).max
    return (boundary - u).mul_(huge).mul_(huge).clamp_(0, 1)


def _one_hot(u: Tensor, first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
    """Which of the intervals ending at the three boundaries (and beyond) holds u, as 0.0 or 1.0."""
    a, b, c = _below(u, first), _below(u, second), _below(u, third)
    last = c.neg().add_(1)
    return [a, b - a, c.sub_(b), last]


def _approximate(x: Four, r: list[Tensor], saturation: float) -> list[Tensor]:
    b, scale, smallest = _normalise(x)
    # First draw: the smallest i with r0·S < C_i. In floating point too r0·S < S for r0 ≤ 1 - 2⁻²⁴,
    # and an empty interval cannot be hit: a zero is never drawn.
    c1 = b[0] + b[1]
    c2 = c1 + b[2]
    total = c2 + b[3]
    selected = _one_hot(r[0] * total, b[0], c1, c2)
    # Second draw: the same among the other three.
    rest = [torch.addcmul(v, v, hit, value=-1) for hit, v in zip(selected, b, strict=True)]
    c1 = torch.add(rest[0], rest[1], out=c1)
    c2 = torch.add(c1, rest[2], out=c2)
    u = torch.add(c2, rest[3], out=rest[3]).mul_(r[1])
    for hit, again in zip(selected, _one_hot(u, rest[0], c1, c2), strict=True):
        hit.add_(again)
    del rest, c1, c2, u, again  # all of a chunk's temporaries live in cache
    # p_i = b_i/S·(1 + Q_i), Q_i = Σ_{j≠i} b_j/(S - b_j); hence |x_i|/p_i = S/(1 + Q_i)
    odds = [torch.div(v, o, out=o) for v, o in zip(b, _others(b), strict=True)]
    value = [
        torch.maximum(torch.div(total, q.add_(1), out=q), v, out=q).mul_(scale)  # p ≤ 1
        for q, v in zip(_others(odds), b, strict=True)
    ]
    return _finish(x, b, selected, value, smallest, saturation)


def _exact(x: Four, r: list[Tensor], saturation: float) -> list[Tensor]:
    b, scale, smallest = _normalise(x)
    others = _others(b)
    rest = torch.minimum(
        torch.minimum(others[0], others[1]), torch.minimum(others[2], others[3])
    )  # all but the largest
    half = (b[0] + others[0]) / 2
    # The largest is certain when it outweighs the rest; what remains is shared either way
    share = torch.minimum(rest, half)
    p = [(v / share).clamp_(max=1) for v in b]
    # Systematic sampling: intervals of length p_i end to end on [0, 2), hit by u and u + 1.
    c1 = p[0] + p[1]
    c2 = torch.where(b[3] == 0, torch.inf, c1 + p[2])  # u + 1 may round up to 2
    selected = _one_hot(r[0], p[0], c1, c2)
    for hit, again in zip(selected, _one_hot(r[0] + 1, p[0], c1, c2), strict=True):
        hit.add_(again).clamp_(max=1)
    value = [torch.maximum(share, v).mul_(scale) for v in b]
    return _finish(x, b, selected, value, smallest, saturation)
