"""Structured pruning of the data gradient (McDanel et al., ICPR 2022, arXiv:2202.00774)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.kernels.common import check_draws, check_pattern
from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.keys import AnyKey
from sparsepretrain.kernels.masks import apply_mask
from sparsepretrain.kernels.nm import nm_mask, nm_prune
from sparsepretrain.kernels.noise import uniform_like


@torch.no_grad()
def prune_gradient(
    g: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    variant: str = "magnitude",
    scope: str = "channel",
    rescale: bool = False,
    epsilon: float = 1e-4,
    dim: int = -1,
    uniforms: Tensor | None = None,
    key: AnyKey | int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Keep N of every M consecutive output gradients along ``dim``.

    Args:
        g: output gradient, any floating dtype and strides.
        n: elements kept of every m.
        m: group size.
        variant: ``magnitude`` (the paper's max; the lower index wins ties), ``random`` (rnd; a
            uniformly chosen subset), ``rescaled`` (maxnorm; magnitude, then each part of
            ``scope`` is multiplied by Σ|g| / (Σ|kept| + epsilon); 0/0 is 1).
        scope: of ``rescaled``: ``channel`` (for two axes: sums over axis 0; otherwise per item of
            axis 0 and channel over the rest), ``group`` or ``tensor``.
        rescale: ``random`` only: multiply by m/n, which makes it unbiased.
        epsilon: of ``rescaled``. The authors' 1e-4 (sdgp.py, prune_wrapper) shrinks gradients whose
            sums are near it, by an amount that depends on the loss scale; 0 restores the norm.
        dim: the channel axis (out_features; 1 for NCHW); its size is a multiple of ``m``.
        uniforms: draws of ``random`` in [0, 1), shape of ``g``; else drawn under ``key`` with
            counter (flattened index of the other axes, index along ``dim``).
        key: stream of the counter-based generator, or an integer seed.

    Returns:
        tensor of the shape and dtype of ``g``; arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: unknown option, impossible pattern, ``random`` without draws.
    """
    kernel = kernel_of("prune_gradient", backend, g, composed=True)
    check_pattern("prune_gradient", g, n, m, dim)
    if variant == "random":
        check_draws("prune_gradient", g.shape, uniforms, key)
        if kernel and key is not None:
            return kernel(g, n, m, dim, key, m / n if rescale else 1.0)
        draws = uniform_like(g, key or 0, dim, backend=backend) if uniforms is None else uniforms
        kept = apply_mask(g, nm_mask(draws, n, m, dim=dim, backend=backend))
        return kept * (m / n) if rescale else kept
    if variant not in ("magnitude", "rescaled"):
        raise ValueError(
            f"prune_gradient: variant must be magnitude, random or rescaled, got {variant!r}"
        )
    if variant == "rescaled":
        return _rescaled(g, n, m, scope, dim, epsilon, backend)
    return _largest(g, n, m, dim, backend)


def _largest(g: Tensor, n: int, m: int, dim: int, backend: str | None) -> Tensor:
    if kernel := kernel_of("prune_gradient", backend, g, composed=True):
        return kernel(g, n, m, dim)
    return nm_prune(g, n, m, dim=dim, ties="low", backend=backend)[0]


def _rescaled(
    g: Tensor, n: int, m: int, scope: str, dim: int, epsilon: float, backend: str | None
) -> Tensor:
    """Keep the largest, with the L1 norm of ``g`` in every part of ``scope``."""
    dim %= g.dim()
    shape = g.shape
    if scope == "channel":
        axes = [0] if g.dim() == 2 and dim == 1 else [a for a in range(1, g.dim()) if a != dim]
    elif scope == "group":
        g, dim, axes = g.unflatten(dim, (-1, m)), dim + 1, [dim + 1]
    elif scope == "tensor":
        axes = list(range(g.dim()))
    else:
        raise ValueError(f"prune_gradient: scope must be channel, group or tensor, got {scope!r}")

    kept = _largest(g, n, m, dim, backend)
    before, after = _l1(g, axes), _l1(kept, axes)
    # nothing kept means nothing to rescale: the factor is 1, not 0/0
    return kept.mul_(torch.where(after == 0, 1.0, before / (after + epsilon))).view(shape)


def _l1(x: Tensor, axes: list[int]) -> Tensor:
    """Σ|x| over ``axes``, which stay with size 1; without axes |x|."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.abs().sum(axes, keepdim=True, dtype=wide) if axes else x.abs().to(wide)
