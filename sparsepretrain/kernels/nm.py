"""Hard N:M masks: the N largest magnitudes of every M consecutive elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import (
    INTEGER_OF_SIZE,
    apply_mask,
    check_pattern,
    choose_backend,
    join_groups,
    numpy_for,
    split_groups,
)

_PAIRWISE_LIMIT = 8
LARGEST_M_OF_NUMPY = 127


def nm_mask(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    dim: int = -1,
    ties: str = "high",
    backend: str | None = None,
) -> Tensor:
    """Mask of the N elements of largest magnitude in every M consecutive ones along ``dim``.

    Equal magnitudes: the larger index is kept (``ties="high"``, what the 2:4 kernels and SR-STE
    do; SR-STE, arXiv:2102.04010) or the smaller (``"low"``, SDGP). Exactly N of M are kept for
    every input: -0.0 equals +0.0, NaN counts as larger than infinity.

    Args:
        x: floating-point tensor, any shape and strides.
        n, m: the pattern, 1 ≤ n ≤ m.
        dim: axis of the groups; its size must be a multiple of ``m``.
        ties: ``"high"`` or ``"low"``.
        backend: None, ``"reference"`` or ``"triton"``.

    Returns:
        bool tensor of the shape of ``x``, true = kept.

    Raises:
        ValueError: impossible pattern, axis not a multiple of M, unknown option.
    """
    triton = choose_backend("nm_mask", backend, x) == "triton"
    _check("nm_mask", x, n, m, dim, ties)
    if n == m:
        return torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if triton:
        from sparsepretrain.kernels import nm_triton

        return nm_triton.nm_mask(x.detach(), n, m, dim, ties == "low")
    if m <= LARGEST_M_OF_NUMPY and (numpy := numpy_for(x)):
        return _in_numpy(numpy, x, n, m, dim, ties)
    keys = split_groups(_magnitude_bits(x), m, dim)
    if ties == "low":
        keys.reverse()
    kept = _top_by_pairs(keys, n) if m <= _PAIRWISE_LIMIT else _top_by_sort(keys, n)
    if ties == "low":
        kept.reverse()
    return join_groups(kept, dim)


def nm_prune(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    dim: int = -1,
    ties: str = "high",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(``x`` where :func:`nm_mask` keeps it and +0.0 elsewhere, that mask), in one pass.

    Arguments and errors are those of :func:`nm_mask`.
    """
    triton = choose_backend("nm_prune", backend, x) == "triton"
    _check("nm_prune", x, n, m, dim, ties)
    if triton and n < m:
        from sparsepretrain.kernels import nm_triton

        return nm_triton.nm_prune(x.detach(), n, m, dim, ties == "low")
    if n < m <= LARGEST_M_OF_NUMPY and (numpy := numpy_for(x)):
        pruned = torch.empty(x.shape, dtype=x.dtype)
        return pruned, _in_numpy(numpy, x, n, m, dim, ties, pruned)
    mask = nm_mask(x, n, m, dim=dim, ties=ties, backend=backend)
    return apply_mask(x, mask), mask


def _check(name: str, x: Tensor, n: int, m: int, dim: int, ties: str) -> None:
    check_pattern(name, x, n, m, dim)
    if ties not in ("high", "low"):
        raise ValueError(f"{name}: ties must be 'high' or 'low', got {ties!r}")


def _in_numpy(
    numpy: Any, x: Tensor, n: int, m: int, dim: int, ties: str, pruned: Tensor | None = None
) -> Tensor:
    """The mask; also fills ``pruned``, which is contiguous."""
    from sparsepretrain.kernels import nm_numpy

    integer = INTEGER_OF_SIZE[x.itemsize]
    bits = x.detach().contiguous().view(integer).numpy()
    values = None if pruned is None else pruned.view(integer).numpy()
    inner = math.prod(x.shape[dim % x.dim() + 1 :])
    return torch.from_numpy(nm_numpy.largest(numpy, bits, n, m, inner, ties, values))


def _magnitude_bits(x: Tensor) -> Tensor:
    """|x| as integers in the same order, NaN above infinity: floats of one sign sort like bits."""
    return x.detach().abs().view(INTEGER_OF_SIZE[x.itemsize])


def _top_by_pairs(keys: list[Tensor], n: int) -> list[Tensor]:
    """Compare all pairs; position i is kept when it beats at least M - N others."""
    m = len(keys)
    wins = [torch.zeros_like(key, dtype=torch.int8) for key in keys]
    for i in range(m):
        wins[i] += m - 1 - i  # as if it beat all later ones, corrected below
        for j in range(i + 1, m):
            # strict: on equality the later position wins
            later = (keys[j] >= keys[i]).view(torch.int8)
            wins[i] -= later
            wins[j] += later
    return [w >= m - n for w in wins]


def _top_by_sort(keys: list[Tensor], n: int) -> list[Tensor]:
    # stable ascending: among equals the later position ranks higher
    order = torch.stack(keys).argsort(dim=0, stable=True)
    kept = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
    return list(kept.scatter_(0, order[-n:], True).unbind(0))
