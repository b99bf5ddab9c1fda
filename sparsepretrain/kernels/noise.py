"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., SC 2011).

A draw is a pure function of (seed, optimizer step, layer, matmul, global token group, feature),
so resuming, accumulation and world size cannot change it. The arithmetic uses 32-bit values held
in int64 (or Python integers), which every device and compiler has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.kernels.dispatch import kernel_of
from sparsepretrain.kernels.keys import LOW_32, AnyKey, key_words, philox


def uniform_like(x: Tensor, key: AnyKey | int, dim: int, *, backend: str | None = None) -> Tensor:
    """One uniform in [0, 1) per element of ``x``: fp32, same shape and device.

    The counter is (flattened index of the other axes, index along ``dim``).
    """
    last = x.movedim(dim, -1)
    rows = last.numel() // max(last.shape[-1], 1)
    (draws,) = uniform_noise(key, rows, last.shape[-1], 1, x.device, backend=backend)
    return draws.view(last.shape).movedim(-1, dim)


def gumbel_like(x: Tensor, key: AnyKey | int, dim: int) -> Tensor:
    """One standard Gumbel number -log(-log u) per element of ``x``: fp64, same shape and device.

    u is that of :func:`uniform_like`, moved by half a step of its grid, which begins at 0.
    """
    return -torch.log(-torch.log(uniform_like(x, key, dim).double() + 2.0**-25))


def normal_like(x: Tensor, key: AnyKey | int, dim: int) -> Tensor:
    """One standard normal number per element of ``x``: fp64, same shape and device.

    The quantile function of u, which is moved as that of :func:`gumbel_like`.
    """
    return torch.special.ndtri(uniform_like(x, key, dim).double() + 2.0**-25)


def uniform_noise(
    key: AnyKey | int,
    groups: int,
    features: int,
    words: int,
    device: torch.device | None = None,
    *,
    backend: str | None = None,
) -> list[Tensor]:
    """``words`` (1 or 2) fp32 tensors (groups, features), uniform in [0, 1) on the 2⁻²⁴ grid.

    They are the first words of one block per (token group, feature), whose counter is
    (offset + group, feature, 0, 0).
    """
    device = torch.device(device or "cpu")
    if kernel := kernel_of("uniform_noise", backend, torch.empty(0, device=device)):
        return kernel(key, groups, features, words, device)
    key = key_words(key)
    token = (torch.arange(groups, device=device) + key.offset).bitwise_and_(LOW_32)[:, None]
    feature = torch.arange(features, device=device)[None]
    zero = torch.zeros_like(feature[:, :1])
    block = philox((token, feature, zero, zero), (key.k0, key.k1))
    return [(word >> 8).float().mul_(2.0**-24) for word in block[:words]]
