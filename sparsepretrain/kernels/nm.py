"""Hard N:M masks: the N largest magnitudes of every M consecutive elements."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sparsepretrain.kernels.common import INTEGER_OF_SIZE, check_out, check_pattern
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.masks import apply_mask, pack_rows


def nm_mask(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    dim: int = -1,
    ties: str = "high",
    packed: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Mask of the N elements of largest magnitude in every M consecutive ones along ``dim``.

    Of equal magnitudes the larger index is kept (``ties="high"``, as in the 2:4 kernels and
    SR-STE, arXiv:2102.04010) or the smaller (``"low"``, as in SDGP). Exactly N of M are kept for
    every input: -0.0 equals +0.0, and NaN counts as larger than infinity.

    Args:
        x: floating-point tensor, any shape and strides.
        n: elements kept of every m, 1 ≤ n ≤ m.
        m: group size.
        dim: axis of the groups; its size must be a multiple of ``m``.
        ties: ``"high"`` or ``"low"``.
        packed: return bits in the layout of :func:`pack_rows`; ``x`` must be at least 2-D.

    Returns:
        bool tensor of the shape of ``x``, true = kept; or uint8 of :func:`packed_shape`.

    Raises:
        ValueError: impossible pattern, axis not a multiple of M, unknown option.
    """
    kernel = kernel_of("nm_mask", backend, x)
    _check("nm_mask", x, n, m, dim, ties)
    mask: Tensor | None = None
    if n == m:
        mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    elif kernel:
        mask = kernel(x.detach(), n, m, dim, ties == "low", packed)
    if mask is None:  # no kernel, or the CPU kernel declined: it supports M = 4 only
        if backend == "cpu":
            raise ValueError(f"nm_mask: backend='cpu' has no {n}:{m} kernel; use 'reference'")
        mask = _by_comparing(_magnitude_bits(x), n, m, dim % x.dim(), ties)
    return pack_rows(mask) if packed and mask.dtype == torch.bool else mask


def nonzeros_per_group(x: Tensor, m: int, *, dim: int = -1) -> Tensor:
    """Count the non-zeros of every M consecutive elements along ``dim``.

    Args:
        x: any dtype and shape; NaN counts.
        m: size of a group.
        dim: axis of the groups; its size must be a multiple of ``m``.

    Returns:
        int64, of the shape of ``x`` with ``size / m`` entries along ``dim``.
    """
    check_pattern("nonzeros_per_group", x, 1, m, dim)
    dim %= x.dim()
    return (x != 0).unflatten(dim, (-1, m)).sum(dim + 1)


def _by_comparing(keys: Tensor, n: int, m: int, dim: int, ties: str) -> Tensor:
    """Keep each element that beats at least M - N others; faster than sorting up to M = 32."""
    parts = keys.unflatten(dim, (-1, m)).movedim(dim + 1, 0).contiguous().unbind(0)
    count = torch.uint8 if m <= 256 else torch.int32
    wins = [torch.zeros_like(part, dtype=count) for part in parts]
    for i, j in itertools.combinations(range(m), 2):
        later = parts[j] >= parts[i] if ties == "high" else parts[j] > parts[i]
        wins[j] += later
        wins[i] += ~later
    return torch.stack([count >= m - n for count in wins], dim + 1).flatten(dim, dim + 1)


def nm_prune(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    dim: int = -1,
    ties: str = "high",
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (``x`` where :func:`nm_mask` keeps it and +0.0 elsewhere, that mask), in one pass.

    Arguments are those of :func:`nm_mask`. With ``out``, of the shape of ``x``, the values are
    written there, rounded once to its dtype, and the mask is packed (:func:`pack_rows`).
    """
    kernel = kernel_of("nm_prune", backend, x, composed=True)
    _check("nm_prune", x, n, m, dim, ties)
    check_out("nm_prune", x, out)
    fused = kernel(x.detach(), n, m, dim, ties == "low", out) if kernel and n < m else None
    if fused is not None:  # CPU kernels decline some layouts
        pruned, mask = fused
    else:
        mask = nm_mask(x, n, m, dim=dim, ties=ties, backend=backend)
        pruned = apply_mask(x, mask, out=out, backend=None if backend == "triton" else backend)
    return pruned, mask if out is None or mask.dtype == torch.uint8 else pack_rows(mask)


def _check(name: str, x: Tensor, n: int, m: int, dim: int, ties: str) -> None:
    check_pattern(name, x, n, m, dim)
    if ties not in ("high", "low"):
        raise ValueError(f"{name}: ties must be 'high' or 'low', got {ties!r}")


def _magnitude_bits(x: Tensor) -> Tensor:
    """|x| as integers in the same order, NaN above infinity: floats of one sign sort like bits."""
    bits = x.detach().view(INTEGER_OF_SIZE[x.itemsize])
    return bits & torch.iinfo(bits.dtype).max  # not abs(), which may change a NaN's bits
