"""Triton kernels of :mod:`sparsepretrain.kernels.noise`: the same bits, drawn where they are used.

Keys may be in device memory, so that a replayed CUDA graph draws fresh noise when the step
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.keys import LOW_32, AnyKey, ClockKey, NoiseKey
from sparsepretrain.kernels.triton.launch import launch_groups, operator
from sparsepretrain.kernels.triton.tiles import element_offsets, program_tile

KEY_ARGUMENTS = ("clock_ptr", "k0", "k1", "layer", "matmul", "offset")
"""Arguments of :func:`key_words` in kernels: a new value must not compile a new variant."""


def key_parts(
    key: AnyKey | int | None, device: torch.device
) -> tuple[list[Tensor | None], list[int]]:
    """Split a key into tensors and numbers for an operator's schema; see :data:`KEY_ARGUMENTS`.

    Numbers omit the clock and are 0 where there is a tensor. Without a key nothing is drawn.
    """
    if key is None:
        return [], [0] * 5
    if isinstance(key, ClockKey):
        clock, seed, *others = key
        values = clock, seed & LOW_32, seed >> 32, *others
    else:
        k0, k1, offset = key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key)
        values = None, k0, k1, 0, 0, offset
    tensors = [value.to(device) if isinstance(value, Tensor) else None for value in values]
    return tensors, [0 if isinstance(value, Tensor) else value for value in values[1:]]


def key_arguments(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> list[Any]:
    """Return :data:`KEY_ARGUMENTS`: pointers or int32 numbers, and None for a missing clock."""
    arguments: list[Any] = [None, *[(number + 2**31) % 2**32 - 2**31 for number in numbers]]
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            arguments[index] = tensor
    return arguments


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return a Philox4x32-10 block; uint32 inputs broadcast, so scalars are computed once."""
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _load_uint32(x):
    """Cast a number, or load a pointer, to uint32."""
    if x.dtype.is_ptr():
        x = tl.load(x)
    return x.to(tl.uint32)


@triton.jit
def key_words(clock_ptr, k0, k1, layer, matmul, offset):
    """Return (k0, k1, offset) as uint32.

    With a clock, (completed steps, micro-batch), the key is derived here: k0 and k1 are then the
    words of the seed, and ``offset`` is the room of a micro-batch.
    """
    k0, k1, offset = _load_uint32(k0), _load_uint32(k1), _load_uint32(offset)
    if clock_ptr is not None:
        step, micro = tl.load(clock_ptr), tl.load(clock_ptr + 1)
        low, high = step.to(tl.uint32), (step >> 32).to(tl.uint32)
        k0, k1, _, _ = philox(low, _load_uint32(layer), _load_uint32(matmul), high, k0, k1)
        # Triton 3.5 has no tl.mul
        offset = tl.core.mul(micro.to(tl.uint32), offset, sanitize_overflow=False)
    return k0, k1, offset


@triton.jit
def draw_bits(token, feature, words):
    """Return the first two words of the counters (offset + token, feature, 0, 0)."""
    k0, k1, offset = words
    zero = tl.full([], 0, tl.uint32)
    token = tl.add(token.to(tl.uint32), offset, sanitize_overflow=False)
    first, second, _, _ = philox(token, feature.to(tl.uint32), zero, zero, k0, k1)
    return first, second


@triton.jit
def to_uniform(word):
    """Map 32 random bits to [0, 1): (word >> 8)·2⁻²⁴ as fp32."""
    return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=KEY_ARGUMENTS)
def _noise_kernel(
    out, out2, n_features, n_groups, clock_ptr, k0, k1, layer, matmul, offset,
    TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    feature, start = program_tile(n_features, n_groups, TILE)
    group = start + tl.arange(0, TILE.GROUPS)
    mask = (feature < n_features)[:, None] & (group < n_groups)[None, :]
    words = key_words(clock_ptr, k0, k1, layer, matmul, offset)
    first, second = draw_bits(group[None, :], feature[:, None], words)
    offsets = element_offsets(out, feature, group)
    tl.store(out.ptr + offsets, to_uniform(first), mask)
    if WORDS == 2:
        tl.store(out2.ptr + offsets, to_uniform(second), mask)


@operator(
    "uniform_noise",
    fake=lambda tensors, numbers, groups, features, words, device: torch.empty(
        words, groups, features, device=device, dtype=torch.float32
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
    """Variant of :func:`uniform_noise` that returns one tensor (words, groups, features)."""
    out = torch.empty(words, groups, features, device=device, dtype=torch.float32)
    key = key_arguments(tensors, numbers)
    if out.numel():
        launch_groups(_noise_kernel, 1, 0, out[0], out[-1], *key, indexed=True, WORDS=words)
    return out


def uniform_noise(
    key: AnyKey | int, groups: int, features: int, words: int, device: torch.device
) -> list[Tensor]:
    """See :func:`sparsepretrain.kernels.uniform_noise`."""
    return list(uniform_noise_op(*key_parts(key, device), groups, features, words, device).unbind())
