"""Counts of zeros in a weight: per group of M along both axes of its matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsepretrain.export.weight_files import Weights

SIZES = (4, 8, 16)
"""Sizes M of groups that are counted in every weight."""
TINY = 1e-6
"""Values below this share of the largest are almost zero: decay left them, no mask was applied."""
FEW = 0.01
"""Share of values that may be almost zero by chance."""
FITTING = 0.99
"""Share of groups that have at most N non-zeros where a weight is meant to be N:M."""


@dataclass
class ZeroCounts:
    """Counts over a weight."""

    shape: tuple[int, ...]
    dtype: str
    entries: int = 0
    zeros: int = 0
    negative_zeros: int = 0
    not_finite: int = 0
    groups: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(axis, M) -> number of groups with 0, 1, … M non-zeros, M + 1 numbers.

    Only for M that divide the size of the axis.
    """
    large: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """The same, where values that are almost zero count as zero."""

    @property
    def density(self) -> float:
        """Share of non-zeros."""
        return 1 - self.zeros / max(1, self.entries)

    def above(self, axis: int, n: int, m: int) -> int:
        """Return the number of groups with more than ``n`` non-zeros."""
        return sum(self.groups[axis, m][n + 1 :])

    def below(self, axis: int, n: int, m: int) -> int:
        """Return the number of groups with fewer than ``n`` non-zeros."""
        return sum(self.groups[axis, m][:n])

    def divides(self, axis: int, m: int) -> bool:
        """Return True if groups of M fill the axis."""
        return (axis, m) in self.groups

    def holds(self, axis: int, n: int, m: int) -> bool:
        """Return True if every group along ``axis`` has at most ``n`` non-zeros."""
        return self.divides(axis, m) and not self.above(axis, n, m)

    def almost(self, axis: int, n: int, m: int) -> bool:
        """Return True if the groups fit when values that are almost zero count as zero."""
        return not self.holds(axis, n, m) and not sum(self.large[axis, m][n + 1 :])

    def pattern(self, axis: int) -> tuple[int, int] | None:
        """Return the pattern that almost all groups along ``axis`` have, or None.

        Groups with fewer than N non-zeros are few in a weight that was pruned to N:M: scattered
        zeros are not taken for a pattern.
        """
        found = []
        for (along, m), counts in self.large.items():
            if along != axis:
                continue
            groups = sum(counts)
            density = sum(k * count for k, count in enumerate(counts)) / max(1, groups * m)
            for n in range(1, m):
                if sum(counts[: n + 1]) >= FITTING * groups and density >= 0.8 * n / m:
                    found.append((n / m, m, n))
        if not found:
            return None
        _, m, n = min(found)
        return n, m


@torch.no_grad()
def count_zeros(
    weights: Weights, name: str, axes: Sequence[int], sizes: Iterable[int] = ()
) -> ZeroCounts:
    """Count the zeros of a weight.

    Args:
        weights: where it is.
        name: of a weight with plain values.
        axes: axes whose groups are counted.
        sizes: M of the groups, besides 4, 8 and 16.
    """
    shape, dtype = weights.stored[name]
    counts = ZeroCounts(shape, dtype)
    fitting = {a: [m for m in sorted({*SIZES, *sizes}) if shape[a] % m == 0] for a in axes}
    for axis, found in fitting.items():
        for m in found:
            counts.groups[axis, m] = [0] * (m + 1)
            counts.large[axis, m] = [0] * (m + 1)
    for part in weights.parts(name, math.lcm(*fitting.get(0, []), 1)):
        if not part.numel():
            continue
        # fp8 has no arithmetic; fp64 stays, as its smallest values are zeros in fp32
        values = part if part.dtype == torch.float64 else part.float()
        nonzero = values != 0
        zeros = values.numel() - int(nonzero.count_nonzero())
        counts.entries += values.numel()
        counts.zeros += zeros
        if zeros:
            counts.negative_zeros += int((~nonzero & values.signbit()).count_nonzero())
        large = _large(values, nonzero, counts)
        for axis, found in fitting.items():
            by_nonzeros = _by_nonzeros(nonzero, axis, found, full=not zeros)
            same = large is nonzero
            by_large = by_nonzeros if same else _by_nonzeros(large, axis, found)
            for m in found:
                for k in range(m + 1):
                    counts.groups[axis, m][k] += by_nonzeros[m][k]
                    counts.large[axis, m][k] += by_large[m][k]
    return counts


def _large(values: Tensor, nonzero: Tensor, counts: ZeroCounts) -> Tensor:
    """Return the non-zeros that are not almost zero; ``nonzero`` itself if nearly all are large."""
    size = values.abs()
    largest = size.amax()
    if not largest.isfinite():
        finite = size.isfinite()
        counts.not_finite += values.numel() - int(finite.count_nonzero())
        largest = size.where(finite, 0.0).amax()
    large = nonzero & ~(size < TINY * largest)  # NaN is large
    tiny = int(nonzero.count_nonzero()) - int(large.count_nonzero())
    return large if tiny > FEW * values.numel() else nonzero


def _by_nonzeros(
    kept: Tensor, axis: int, sizes: Sequence[int], *, full: bool = False
) -> dict[int, list[int]]:
    """Return M -> number of groups along ``axis`` with 0 … M entries that are kept.

    Args:
        kept: bool.
        axis: of the groups.
        sizes: M, ascending; each divides the size of the axis.
        full: all entries are kept, so nothing needs to be counted.
    """
    found = {}
    per_group = kept.view(torch.uint8)
    size = 1
    for m in sizes:
        if full:
            found[m] = [0] * m + [kept.numel() // m]
            continue
        if m % size or m > 255:  # bytes do not count further
            per_group, size = kept.to(torch.int32 if m > 255 else torch.uint8), 1
        # adding slices is ten times as fast as summing a short axis
        slices = per_group.unflatten(axis, (-1, m // size)).unbind(axis + 1)
        total = slices[0].clone()
        for each in slices[1:]:
            total += each
        per_group, size = total, m
        # numbers, not a tensor: small tensors that stay between large ones keep their memory
        found[m] = total.flatten().bincount(minlength=m + 1).tolist()
    return found
