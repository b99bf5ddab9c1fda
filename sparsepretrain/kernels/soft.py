"""The continuous pruning function of S-STE and its scale (arXiv:2409.09099)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepretrain.kernels.common import check_out, check_pattern, widen
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.masks import pack_rows


def soft_threshold(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    gamma: float = 0.0,
    dim: int = -1,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """S(x) = sign(x)·max(|x| - t, 0) per group of M, with at most N non-zeros.

    t = (1 - γ)·|dropped| + γ·|kept|, where dropped is the largest magnitude that a hard N:M mask
    drops and kept the smallest it keeps (S-STE section 4; γ = 0 in the authors' code). S is
    continuous in x for every γ; at ties fewer than N are non-zero. A dropped element is +0.0; a
    NaN makes its group NaN; infinities are kept.

    Args:
        x: floating-point tensor, any shape and strides.
        n: elements kept of every m, 1 ≤ n ≤ m (n = m returns x).
        m: group size.
        gamma: position of the threshold, 0 ≤ gamma ≤ 1.
        dim: axis of the groups; its size must be a multiple of ``m``.
        scale: β, a 0-d fp32 tensor that S(x) is multiplied by; None: 1.
        dtype: dtype of the result, rounded once at the end; None: dtype of ``x``.

    Returns:
        β·S(x), a tensor of the shape of ``x``; arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: impossible pattern, axis not a multiple of M, gamma outside [0, 1].
    """
    kernel = kernel_of("soft_threshold", backend, x)
    _check("soft_threshold", x, n, m, gamma, dim)
    x = x.detach()
    dtype = dtype or x.dtype
    if n == m:
        return (x.clone() if scale is None else widen(x) * scale).to(dtype)
    result: Tensor | None = kernel(x, n, m, gamma, dim, scale, dtype) if kernel else None
    if result is not None:
        return result
    # no kernel, or the CPU kernel declined: it supports M = 4 only
    if backend == "cpu":
        raise ValueError(f"soft_threshold: backend='cpu' has no {n}:{m} kernel; use 'reference'")
    result = _shrink(x, n, m, gamma, dim)
    return (result if scale is None else result.mul_(scale)).to(dtype)


@torch.no_grad()
def soft_prune(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    gamma: float = 0.0,
    dim: int = -1,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (β·S(x), the mask of its non-zeros); in one pass for 2:4 with ``out`` on a GPU.

    Arguments are those of :func:`soft_threshold`. With ``out``, of the shape of ``x``, the values
    are written there, rounded once to its dtype, and the mask, of the unrounded values, is packed
    (:func:`pack_rows`).
    """
    kernel = None if out is None else kernel_of("soft_prune", backend, x, composed=True)
    _check("soft_prune", x, n, m, gamma, dim)
    check_out("soft_prune", x, out)
    fused = kernel(x.detach(), n, m, gamma, dim, scale, out) if kernel and n < m else None
    if fused is not None:  # CPU kernels decline some layouts
        pruned, mask = fused
    else:
        wide = widen(x.detach())
        soft = soft_threshold(wide, n, m, gamma=gamma, dim=dim, scale=scale, backend=backend)
        pruned, mask = soft.to(x.dtype) if out is None else out.copy_(soft), soft != 0
    return pruned, mask if out is None or mask.dtype == torch.uint8 else pack_rows(mask)


def _check(name: str, x: Tensor, n: int, m: int, gamma: float, dim: int) -> None:
    check_pattern(name, x, n, m, dim)
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"{name}: gamma must lie in [0, 1], got {gamma}")


def _shrink(x: Tensor, n: int, m: int, gamma: float, dim: int) -> Tensor:
    """S(x) in fp32, or fp64 for fp64."""
    x, dim = widen(x), dim % x.dim()
    magnitude = x.abs()
    dropped, kept = _boundary(_positions(magnitude, m, dim), n)
    t = _threshold(dropped, kept, gamma).repeat_interleave(m, dim)
    # sign(x)·(|x| - t) where |x| > t, else +0.0; NaN stays. Not clamp(min=0): inf - inf must be 0
    # and NaN must not.
    return torch.where(magnitude <= t, 0, x - t.copysign(x))


def _threshold(dropped: Tensor, kept: Tensor, gamma: float) -> Tensor:
    """(1 - γ)·dropped + γ·kept."""
    if gamma == 0.0:
        return dropped
    # Finite unless N + 1 are infinite, so that a kept infinity exceeds its threshold. At ties the
    # rounded t may fall below |dropped|, which would keep more than N.
    limit = torch.finfo(kept.dtype).max
    t = (1.0 - gamma) * dropped.clamp(max=limit) + gamma * kept.clamp(max=limit)
    return torch.maximum(t, dropped)


def boundary_magnitudes(
    x: Tensor, n: int = 2, m: int = 4, *, dim: int = -1
) -> tuple[Tensor, Tensor]:
    """(largest dropped, smallest kept) magnitude of each group, fp32: |t2| and |t3| for 2:4."""
    check_pattern("boundary_magnitudes", x, n, m, dim)
    return _boundary(_positions(widen(x.detach()).abs(), m, dim), n)


def optimal_scale(w: Tensor, s: Tensor) -> Tensor:
    """β = argmin_b ‖w - b·s‖² = ⟨w, s⟩ / ⟨s, s⟩, or 1 when s = 0 (S-STE section 4.2).

    Args:
        w: weight.
        s: pruned weight, same shape.

    Returns:
        0-d fp32 tensor on the device of ``w``.
    """
    w, s = w.detach().double(), s.detach().double()
    return _ratio((w * s).sum(), (s * s).sum())


def l1_scale(w: Tensor, s: Tensor) -> Tensor:
    """β = ‖w‖₁ / ‖s‖₁, or 1 when s = 0 (S-STE Table 2, "same L1 norm"). 0-d fp32."""
    return _ratio(w.detach().double().abs().sum(), s.detach().double().abs().sum())


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    one = torch.ones_like(numerator)
    return torch.where(denominator == 0, one, numerator / denominator).float()


def _boundary(a: Sequence[Tensor], n: int) -> tuple[Tensor, Tensor]:
    """Order statistics M-N and M-N+1 (from below) of the m magnitudes; NaN spreads."""
    m = len(a)
    if m == 4 and n == 2:
        # a 4-element sorting network without its outer comparators
        low, high = torch.minimum(a[0], a[1]), torch.maximum(a[0], a[1])
        low2, high2 = torch.minimum(a[2], a[3]), torch.maximum(a[2], a[3])
        inner, outer = torch.maximum(low, low2), torch.minimum(high, high2)
        return torch.minimum(inner, outer), torch.maximum(inner, outer)
    ordered = torch.stack([*a]).sort(dim=0).values
    poison = ordered[-1] * 0  # NaN sorts last; inf * 0 is NaN too: undo that next
    poison = torch.where(ordered[-1].isinf(), torch.zeros_like(poison), poison)
    dropped = ordered[m - n - 1] if n < m else torch.zeros_like(poison)
    return dropped + poison, ordered[m - n] + poison


def _positions(x: Tensor, m: int, dim: int) -> Sequence[Tensor]:
    """Return the m positions of every group as m views, ``dim`` divided by m."""
    dim %= x.dim()
    return x.unflatten(dim, (x.shape[dim] // m, m)).unbind(dim + 1)
