"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., SC 2011).

A draw is a pure function of (seed, optimiser step, layer, product, global token group, feature),
so resuming, accumulation and world size cannot change it. The arithmetic uses 32-bit values held
in int64 (or Python integers), which every device and compiler has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsepretrain.kernels.groups import array_module, choose_backend

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10


class NoiseKey(NamedTuple):
    """Key of one stream; integers or 0-d int64 tensors (under ``torch.compile``)."""

    k0: Any
    k1: Any
    offset: Any = 0
    """Global index of the first token group."""

    @classmethod
    def from_seed(cls, seed: int) -> NoiseKey:
        """The stream of a bare seed, 0 ≤ seed < 2⁶⁴."""
        return cls(seed & _LOW, seed >> 32)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """One Philox4x32-10 block; the parts are integers or int64 tensors holding 32-bit values."""
    c0, c1, c2, c3 = counter
    for r in range(_ROUNDS):
        k0, k1 = (key[0] + r * _W0) & _LOW, (key[1] + r * _W1) & _LOW
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
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
    if isinstance(step, Tensor) and step.is_cuda and not torch.compiler.is_compiling():
        from sparsepretrain.kernels import noise_triton

        k0, k1 = noise_triton.noise_key(step, seed, layer, product).unbind()
        return NoiseKey(k0, k1, offset)
    # a compiler fuses these into one kernel
    k0, k1, _, _ = philox((step & _LOW, layer, product, step >> 32), (seed & _LOW, seed >> 32))
    return NoiseKey(k0, k1, offset)


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
        backend: None, ``"reference"`` or ``"triton"``.

    Returns:
        ``words`` fp32 tensors of shape (groups, features).
    """
    key = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key)
    device = torch.device(device or "cpu")
    if choose_backend("uniform_noise", backend, torch.empty(0, device=device)) == "triton":
        from sparsepretrain.kernels import noise_triton

        parts = noise_triton.key_parts(key, device)
        return list(noise_triton.uniform_noise(*parts, groups, features, words, device).unbind())
    return [torch.as_tensor(word) for word in draw(key, groups, features, words, device)]


def draw(key: NoiseKey, groups: int, features: int, words: int, device: torch.device) -> list[Any]:
    """:func:`uniform_noise` as arrays of :func:`array_module`."""
    xp = array_module(device)
    if xp is not torch:
        key = NoiseKey(*map(int, key))
    if xp is torch:
        token = (torch.arange(groups, device=device) + key.offset).bitwise_and_(_LOW)
        feature = torch.arange(features, device=device)
    else:
        token = (xp.arange(groups, dtype=xp.uint64) + xp.uint64(key.offset)) & xp.uint64(_LOW)
        feature = xp.arange(features, dtype=xp.uint64)
    keys = [((key.k0 + r * _W0) & _LOW, (key.k1 + r * _W1) & _LOW) for r in range(_ROUNDS)]
    first, second = _two_words(token.reshape(-1, 1), feature.reshape(1, -1), keys)
    return [_to_unit(xp, word) for word in (first, second)[:words]]


def _two_words(token: Any, feature: Any, keys: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The two first words of :func:`philox` for the counters (token, feature, 0, 0).

    Two counter words are constant, so the first three rounds mostly broadcast (groups, 1) against
    (1, features), and of the last two only what the first two words need is computed.
    """
    c0, c1, c2, c3 = token, feature, token[:1] * 0, token[:1] * 0
    for k0, k1 in keys[:3]:
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = _high(p1) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = _high(p0) ^ c3 ^ k1, p0 & _LOW
    for k0, k1 in keys[3:-2]:
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = _high(p1), _high(p0)
        c0 ^= c1
        c0 ^= k0
        c2 ^= c3
        c2 ^= k1
        p0 &= _LOW
        p1 &= _LOW
        c1, c3 = p1, p0
    c1 = c2 * _M1
    c1 &= _LOW
    c2 = _high(c0 * _M0)
    c2 ^= c3
    c2 ^= keys[-2][1]
    last = c2 * _M1
    first = _high(last)
    first ^= c1
    first ^= keys[-1][0]
    last &= _LOW
    return first, last


def _high(product: Any) -> Any:
    if isinstance(product, Tensor):
        # int64: the shift of a negative number carries ones down, the mask removes them
        return torch.bitwise_right_shift(product, 32).bitwise_and_(_LOW)
    return product >> 32  # uint64


def _to_unit(xp: Any, word: Any) -> Any:
    """(word ≫ 8)·2⁻²⁴ as fp32."""
    if xp is torch:
        return torch.bitwise_right_shift(word, 8).float().mul_(2.0**-24)
    word >>= 8
    return word.astype(xp.uint32).astype(xp.float32) * xp.float32(2.0**-24)
