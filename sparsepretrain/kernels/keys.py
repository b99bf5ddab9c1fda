"""Keys of noise streams, and the counter-based generator that draws under them (Philox4x32-10)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
LOW_32 = 0xFFFFFFFF


class NoiseKey(NamedTuple):
    """Key of one stream; integers or 0-d int64 tensors (under ``torch.compile``)."""

    k0: Any
    k1: Any
    offset: Any = 0
    """Global index of the first token group."""

    @classmethod
    def from_seed(cls, seed: int) -> NoiseKey:
        """Return the stream of a bare seed, 0 ≤ seed < 2⁶⁴."""
        return cls(seed & LOW_32, seed >> 32)


class ClockKey(NamedTuple):
    """The stream of a matmul in a micro-batch as what it follows from, for kernels to derive."""

    clock: Tensor
    """(completed optimizer steps, micro-batch): (2,), int64."""
    seed: int
    layer: Any
    """Index of the layer: an integer, or a 0-d int64 tensor (under ``torch.compile``)."""
    matmul: int
    room: int
    """Token groups that a micro-batch may have: the first of micro-batch i is number i·room."""


AnyKey = NoiseKey | ClockKey


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """One Philox4x32-10 block; the parts are integers or int64 tensors holding 32-bit values."""
    c0, c1, c2, c3 = counter
    for r in range(PHILOX_ROUNDS):
        k0, k1 = (key[0] + r * PHILOX_W0) & LOW_32, (key[1] + r * PHILOX_W1) & LOW_32
        (high0, low0), (high1, low1) = _words(c0, PHILOX_M0), _words(c2, PHILOX_M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _words(a: Any, b: int) -> tuple[Any, Any]:
    """Return the high and the low 32 bits of the product of two 32-bit values.

    By halves of ``a``: the whole product overflows int64, which is undefined in the C++ that graphs
    for the CPU become (torch 2.9 and 2.11 drew other numbers).
    """
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def noise_key(seed: int, step: Any, layer: Any, matmul: int, offset: Any = 0) -> NoiseKey:
    """Return the stream of one matmul (0 fprop, 1 dgrad, 2 wgrad) of one layer in one step.

    ``step`` counts completed optimizer steps. ``step`` and ``layer`` may be 0-d int64 tensors.
    """
    k0, k1, _, _ = philox((step & LOW_32, layer, matmul, step >> 32), (seed & LOW_32, seed >> 32))
    return NoiseKey(k0, k1, offset)


def key_words(key: AnyKey | int) -> NoiseKey:
    """Return the words of any key; an integer is a seed."""
    if isinstance(key, ClockKey):
        step, micro = key.clock.unbind()
        return noise_key(key.seed, step, key.layer, key.matmul, micro * key.room)
    return key if isinstance(key, NoiseKey) else NoiseKey.from_seed(key)
