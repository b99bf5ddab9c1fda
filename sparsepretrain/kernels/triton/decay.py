"""Triton kernel of :mod:`sparsepretrain.kernels.decay`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import memory_order, narrow, over_elements, part_of, widen


@torch.library.custom_op("sparsepretrain::masked_decay_", mutates_args=("grad",))
def masked_decay_(
    grad: Tensor, weight: Tensor, mask: Tensor, decay: float, factor: Tensor | None
) -> None:
    """``grad += decay · (1 - mask) · weight``; ``factor``, if given, stands for ``decay``."""
    # in the memory order of the gradient, which is written in place
    order = memory_order(grad)
    target = grad.permute(order)
    dense = target.contiguous().view(-1)
    others = [t.permute(order).contiguous().view(-1) for t in (weight, mask)]
    pointers = (dense, others[0], others[1].view(torch.int8), dense if factor is None else factor)
    over_elements(_masked_decay, pointers, dense.numel(), decay, GIVEN=factor is not None)
    if not target.is_contiguous():
        target.copy_(dense.view(target.shape))


@triton.jit
def _masked_decay(
    grad, weight, mask, factor, count, decay,
    TILE: tl.constexpr, WIDE: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    if GIVEN:
        decay = tl.load(factor).to(tl.float32)
    i = part_of(TILE, WIDE)
    inside = i < count
    g = widen(tl.load(grad + i, inside, 0))
    w = widen(tl.load(weight + i, inside, 0))
    kept = tl.load(mask + i, inside, 1)
    g += tl.where(kept != 0, 0.0, w) * decay
    tl.store(grad + i, narrow(g, grad), inside)
