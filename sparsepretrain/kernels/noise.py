"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., SC 2011).

A draw is a pure function of (seed, optimiser step, layer, product, global token group, feature),
so resuming, accumulation and world size cannot change it. The arithmetic uses 32-bit values held
in int64 (or Python integers), which every device and compiler has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsepretrain.kernels.common import (
    LOW_32,
    PHILOX_M0,
    PHILOX_M1,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
    NoiseKey,
)
from sparsepretrain.kernels.dispatch import find, kernel_of, prefers_triton


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """One Philox4x32-10 block; the parts are integers or int64 tensors holding 32-bit values."""
    c0, c1, c2, c3 = counter
    for r in range(PHILOX_ROUNDS):
        k0, k1 = (key[0] + r * PHILOX_W0) & LOW_32, (key[1] + r * PHILOX_W1) & LOW_32
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1 = ((p1 >> 32) & LOW_32) ^ c1 ^ k0, p1 & LOW_32
        c2, c3 = ((p0 >> 32) & LOW_32) ^ c3 ^ k1, p0 & LOW_32
    return c0, c1, c2, c3


def noise_key(seed: int, step: Any, layer: int, product: int, offset: Any = 0) -> NoiseKey:
    """The stream of one product of one layer in one optimiser step.

    Args:
        seed: seed of the run, 0 ≤ seed < 2⁶³.
        step: completed optimiser steps, an integer or 0-d int64 tensor.
        layer: index of the layer among the sparse layers of the model.
        product: 0 fprop, 1 dgrad, 2 wgrad.
        offset: global index of this micro-batch's first token group.
    """
    on_device = isinstance(step, Tensor) and step.is_cuda and prefers_triton(step.device)
    if on_device and not torch.compiler.is_compiling() and (kernel := find("noise_key", "triton")):
        k0, k1 = kernel(step, seed, layer, product).unbind()
        return NoiseKey(k0, k1, offset)
    # a compiler fuses these into one kernel
    k0, k1, _, _ = philox((step & LOW_32, layer, product, step >> 32), (seed & LOW_32, seed >> 32))
    return NoiseKey(k0, k1, offset)


def uniform_like(x: Tensor, key: NoiseKey | int, dim: int, *, backend: str | None = None) -> Tensor:
    """One uniform in [0, 1) per element of ``x``: fp32, same shape and device.

    Args:
        x: only its shape and device matter.
        key: the stream; the counter is (flattened index of the other axes, index along ``dim``).
        dim: axis of the features.
    """
    last = x.movedim(dim, -1)
    rows = last.numel() // max(last.shape[-1], 1)
    (draws,) = uniform_noise(key, rows, last.shape[-1], 1, x.device, backend=backend)
    return draws.view(last.shape).movedim(-1, dim)


def uniform_noise(
    key: NoiseKey | int,
    groups: int,
    features: int,
    words: int,
    device: torch.device | None = None,
    *,
    backend: str | None = None,
) -> list[Tensor]:
    """Uniforms in [0, 1) on the 2⁻²⁴ grid, one block per (token group, feature).

    Args:
        key: the stream; an integer is a seed.
        groups, features: size of the grid; the counter is (offset + group, feature, 0, 0).
        words: how many of the two first words of each block are wanted, 1 or 2.
        device: where to compute.

    Returns:
        ``words`` fp32 tensors of shape (groups, features).
    """
    key = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key)
    device = torch.device(device or "cpu")
    if kernel := kernel_of("uniform_noise", backend, torch.empty(0, device=device)):
        return kernel(key, groups, features, words, device)
    token = (torch.arange(groups, device=device) + key.offset).bitwise_and_(LOW_32)[:, None]
    feature = torch.arange(features, device=device)[None]
    zero = torch.zeros_like(feature[:, :1])
    block = philox((token, feature, zero, zero), (key.k0, key.k1))
    return [(word >> 8).float().mul_(2.0**-24) for word in block[:words]]
