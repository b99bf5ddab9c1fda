"""Triton kernels of :mod:`sparsepretrain.kernels.noise`: the same bits, drawn where they are used.

A key may live in device memory: a replayed CUDA graph then draws fresh noise when the step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import LOW_32, NoiseKey
from sparsepretrain.kernels.triton.launch import element_offsets, operator, over_groups, tile_of

KEY_ARGUMENTS = ("k0", "k1", "offset")
"""Kernel arguments that differ from step to step and must not compile a variant per value."""


def key_parts(key: NoiseKey | int, device: torch.device) -> tuple[list[Tensor | None], list[int]]:
    """The parts of ``key`` for an operator's schema: tensors, and numbers where there is none."""
    parts = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key)
    tensors = [p.to(device) if isinstance(p, Tensor) else None for p in parts]
    return tensors, [0 if isinstance(p, Tensor) else p for p in parts]


def key_arguments(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> list[Any]:
    """What a kernel takes for k0, k1, offset: pointers, or numbers of one type, int32."""
    return [
        (number + 2**31) % 2**32 - 2**31 if tensor is None else tensor
        for tensor, number in zip(tensors, numbers, strict=True)
    ]


def uniform_noise(
    key: NoiseKey, groups: int, features: int, words: int, device: torch.device
) -> list[Tensor]:
    """See :func:`sparsepretrain.kernels.uniform_noise`."""
    return list(uniform_noise_op(*key_parts(key, device), groups, features, words, device).unbind())


@operator(
    "uniform_noise",
    fake=lambda tensors, numbers, groups, features, words, device: torch.empty(
        words, groups, features, device=device
    ),
)
def uniform_noise_op(
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    groups: int,
    features: int,
    words: int,
    device: torch.device,
) -> Tensor:
    """:func:`uniform_noise` as one tensor (words, groups, features)."""
    out = torch.empty(words, groups, features, device=device)
    key = key_arguments(tensors, numbers)
    if out.numel():
        over_groups(_uniforms, 1, 0, out[0], out[-1], *key, numbered=True, WORDS=words)
    return out


@operator("noise_key", fake=lambda step, *_: torch.empty(2, dtype=torch.int64, device=step.device))
def noise_key(step: Tensor, seed: int, layer: int, product: int) -> Tensor:
    """(k0, k1) of :func:`sparsepretrain.kernels.noise_key` for a 0-d step tensor, in one launch."""
    out = torch.empty(2, dtype=torch.int64, device=step.device)
    words = [seed & LOW_32, seed >> 32, layer, product]
    with torch.cuda.device_of(step):
        _derive_key[(1,)](out, step, *key_arguments([None] * 4, words))
    return out


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """One Philox4x32-10 block of uint32 tensors; they broadcast, so what is shared is done once."""
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def key_word(part):
    """A part of a key as 32 bits: a number, or read from where it points to."""
    if part.dtype.is_ptr():
        part = tl.load(part)
    return part.to(tl.uint32)


@triton.jit
def draw_bits(token, feature, k0, k1, offset):
    """The two first words for the counters (offset + token, feature, 0, 0)."""
    zero = tl.full([], 0, tl.uint32)
    token = tl.add(token.to(tl.uint32), key_word(offset), sanitize_overflow=False)
    first, second, _, _ = philox(
        token, feature.to(tl.uint32), zero, zero, key_word(k0), key_word(k1)
    )
    return first, second


@triton.jit
def to_unit(word):
    """(word >> 8)·2⁻²⁴ as fp32."""
    return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _uniforms(
    out, last, features, groups, k0, k1, offset, TILE: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    feature, start = tile_of(features, groups, TILE)
    group = start + tl.arange(0, TILE.GROUPS)
    mask = (feature < features)[:, None] & (group < groups)[None, :]
    first, second = draw_bits(group[None, :], feature[:, None], k0, k1, offset)
    offsets = element_offsets(out, feature, group)
    tl.store(out.data + offsets, to_unit(first), mask)
    if WORDS == 2:
        tl.store(last.data + offsets, to_unit(second), mask)


@triton.jit(do_not_specialize=("seed_low", "seed_high", "layer", "product"))
def _derive_key(out, step, seed_low, seed_high, layer, product):
    count = tl.load(step).to(tl.int64)
    low, high = count.to(tl.uint32), (count >> 32).to(tl.uint32)
    k0, k1, _, _ = philox(
        low, layer.to(tl.uint32), product.to(tl.uint32), high,
        seed_low.to(tl.uint32), seed_high.to(tl.uint32),
    )  # fmt: skip
    tl.store(out, k0.to(tl.int64))
    tl.store(out + 1, k1.to(tl.int64))
