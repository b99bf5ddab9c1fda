"""The pull of pruned weights towards zero (SR-STE, arXiv:2102.04010 eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import choose_backend


@torch.no_grad()
def masked_decay_(
    grad: Tensor,
    weight: Tensor,
    mask: Tensor,
    decay: float | Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Grad += decay·(1 - mask)·weight, in place; the sum is formed in fp32 and rounded once.

    Args:
        grad: gradient of the weight, any floating dtype and strides.
        weight: the dense master weight, same shape.
        mask: kept positions (bool or 0/1), same shape.
        decay: λ, a number or 0-d tensor (so that a loss scale can be folded in without a sync).
        backend: None, ``"reference"``, ``"cpu"`` or ``"triton"``.

    Returns:
        ``grad``.

    Raises:
        ValueError: shapes differ.
    """
    chosen = choose_backend("masked_decay_", backend, grad)
    if not grad.shape == weight.shape == mask.shape:
        shapes = tuple(grad.shape), tuple(weight.shape), tuple(mask.shape)
        raise ValueError(f"masked_decay_: shapes of grad, weight and mask differ: {shapes}")
    if chosen == "triton":
        from sparsepretrain.kernels.triton import decay as decay_triton

        given = decay if isinstance(decay, Tensor) else None
        number = 0.0 if isinstance(decay, Tensor) else decay
        decay_triton.masked_decay_(grad, weight.detach(), mask.bool(), number, given)
        return grad
    if chosen == "cpu":
        from sparsepretrain.kernels.cpu import masks

        masks.masked_decay_(grad, weight, mask, float(decay))
        return grad
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    pull = wide.masked_fill(mask.bool(), 0) * decay
    if grad.dtype in (torch.float16, torch.bfloat16):
        return grad.copy_(grad.float() + pull)
    return grad.add_(pull)
