"""The rescaled pruning of :mod:`sparsepretrain.kernels.sdgp` with NumPy, for the CPU.

What choosing the largest computes anyway, the magnitudes and the choice as bits, is used while it
is at hand. Sums are torch's, so they are those of the reference, and so is what torch does on all
its threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import INTEGER_OF_SIZE, in_chunks
from sparsepretrain.kernels.nm_numpy import CHUNK, Choice


def rescaled(
    xp: Any,
    g: Tensor,
    n: int,
    m: int,
    dim: int,
    axes: list[int],
    factor: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The n largest of every m along ``dim``, each item of axis 0 times its ``factor``.

    Args:
        xp: numpy.
        g: contiguous.
        n, m: the pattern, m ≤ 127; the lower of two equals is kept.
        dim: axis of the groups, not negative.
        axes: that the sums run over; axis 0 is not among them.
        factor: of Σ|g| and Σ|kept|, both fp32 (fp64 for fp64), ``axes`` of size 1.
    """
    kept = torch.empty_like(g)
    integer = INTEGER_OF_SIZE[g.itemsize]
    bits = g.view(integer)
    wide = torch.promote_types(g.dtype, torch.float32)
    items, width = len(g), math.prod(g.shape[1:])
    inner = math.prod(g.shape[dim + 1 :])

    def prepare(rows: int) -> Callable[[int, int], None]:
        choice = Choice(xp, (rows, width), bits[:0].numpy().dtype, n, m, inner, "low")

        def work(start: int, stop: int) -> None:
            out, source = kept[start:stop], bits[start:stop]
            choice.among(source.view(stop - start, width).numpy())
            keys = torch.from_numpy(choice.keys).view(out.shape)
            magnitudes = keys.view(g.dtype)
            before = magnitudes.sum(axes, keepdim=True, dtype=wide)
            ones = out.view(integer).copy_(torch.from_numpy(choice.ones()).view(out.shape))
            keys &= ones
            after = magnitudes.sum(axes, keepdim=True, dtype=wide)
            torch.bitwise_and(source, ones, out=ones)
            out *= factor(before, after)

        return work

    in_chunks(prepare, items, width, CHUNK)
    return kept
