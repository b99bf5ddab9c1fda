"""Layout of sampling: groups of four along one axis, zero-padded."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.kernels.common import widen


def to_groups4(x: Tensor, dim: int) -> Tensor:
    """Return groups of 4 along ``dim``: (groups, 4, other axes), fp32 or fp64; zero-padded."""
    rows = widen(x.detach()).movedim(dim, 0)
    rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    if rows.shape[0] % 4:  # pad copies even where it adds nothing
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % 4))
    return rows.view(rows.shape[0] // 4, 4, rows.shape[1])


def from_groups4(x4: Tensor, x: Tensor, dim: int, order: str | None = None) -> Tensor:
    """Inverse of :func:`to_groups4`: shape and dtype of ``x``; ``order``: see :func:`mvue`."""
    rows = x4.flatten(0, 1)[: x.shape[dim]]
    out = rows.view(x.movedim(dim, 0).shape).movedim(0, dim).to(x.dtype)
    return out if order is None else out.movedim(dim, -1).contiguous().movedim(-1, dim)
