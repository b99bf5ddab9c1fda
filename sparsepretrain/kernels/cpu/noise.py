"""Philox4x32-10 in loops; see :mod:`sparsepretrain.kernels.noise`."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from sparsepretrain.kernels import keys
from sparsepretrain.kernels.cpu.launch import compiled, inlined
from sparsepretrain.kernels.keys import LOW_32, AnyKey, key_words

_M0, _M1 = numpy.uint64(keys.PHILOX_M0), numpy.uint64(keys.PHILOX_M1)
_W0, _W1 = numpy.uint64(keys.PHILOX_W0), numpy.uint64(keys.PHILOX_W1)
_ROUNDS = keys.PHILOX_ROUNDS
_LOW, _HALF, _SPARE = numpy.uint64(LOW_32), numpy.uint64(32), numpy.uint64(8)
_UNIT = numpy.float32(2.0**-24)


def uniform_noise(
    key: AnyKey | int, groups: int, features: int, words: int, device: torch.device
) -> list[Tensor]:
    """``words`` fp32 tensors (groups, features)."""
    out = torch.empty(groups, words, features, dtype=torch.float32)
    _uniforms(out.numpy(), *stream(key))
    return list(out.unbind(1))


def stream(key: AnyKey | int) -> tuple[numpy.uint64, numpy.uint64, numpy.uint64]:
    """Return (number of the first group, k0, k1) as the loops take them."""
    k0, k1, first = map(int, key_words(key))
    return numpy.uint64(first & LOW_32), numpy.uint64(k0), numpy.uint64(k1)


@inlined
def _philox(c0, c1, k0, k1):
    """Return the first two words of the block of counter (c0, c1, 0, 0)."""
    c2 = c3 = c0 ^ c0
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1


@inlined
def _to_unit(word):
    """Return the upper 24 of 32 bits as a number in [0, 1)."""
    return numpy.float32(word >> _SPARE) * _UNIT


@inlined
def fill(u, group, k0, k1):
    """Draw one or two uniforms for each feature of a group of tokens: u (words, features)."""
    group &= _LOW  # the counter is a 32-bit word
    if len(u) == 1:
        for f in range(u.shape[1]):
            u[0, f] = _to_unit(_philox(group, numpy.uint64(f), k0, k1)[0])
    else:
        for f in range(u.shape[1]):
            first, second = _philox(group, numpy.uint64(f), k0, k1)
            u[0, f], u[1, f] = _to_unit(first), _to_unit(second)


@compiled
def _uniforms(out, first, k0, k1):
    for g in range(len(out)):
        fill(out[g], first + numpy.uint64(g), k0, k1)
