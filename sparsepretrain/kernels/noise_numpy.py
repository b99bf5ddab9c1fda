"""The grid of uniforms of :mod:`sparsepretrain.kernels.noise` in NumPy, for the CPU.

One Philox round maps (c0, c1, c2, c3) to
(hi(c2·M1) ^ c1 ^ k0, lo(c2·M1), hi(c0·M0) ^ c3 ^ k1, lo(c0·M0)). With each of the pairs
(c0, c1) and (c2, c3) in one 64-bit word, the first of the pair in its upper half, that is

    head' = (tail >> 32)·M1 ^ (head ^ k0) << 32
    tail' = (head >> 32)·M0 ^ (tail ^ k1) << 32

which takes no masks and runs in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsepretrain.kernels.groups import buffers, in_chunks
from sparsepretrain.kernels.noise import LOW, M0, M1, NoiseKey, round_keys

Array = Any
CHUNK = 48_000
"""(Token group, feature) pairs per part."""
BUFFERS = 4
"""64-bit words of scratch per (token group, feature)."""


def uniforms(xp: Any, key: NoiseKey, groups: int, features: int, words: int) -> list[Array]:
    """See :func:`sparsepretrain.kernels.noise.uniform_noise`; arrays (groups, features) of fp32."""
    out = xp.empty((words, groups, features), xp.float32)

    def prepare(rows: int) -> Callable[[int, int], None]:
        (scratch,) = buffers(xp, ((BUFFERS, rows * features), xp.uint64))

        def work(start: int, stop: int) -> None:
            fill(xp, key, start, out[:, start:stop], scratch)

        return work

    in_chunks(prepare, groups, features, CHUNK)
    return list(out)


def fill(xp: Any, key: NoiseKey, start: int, out: Array, scratch: Array) -> None:
    """Write the rows of the grid that begin at group ``start``.

    Args:
        xp: numpy.
        key: the stream.
        start: first group, counted from the offset of ``key``.
        out: (1 or 2 words, groups, features) fp32.
        scratch: (BUFFERS, ≥ groups·features) uint64.
    """
    _, groups, features = out.shape
    head, tail, upper, lower = (
        part[: groups * features].reshape(groups, features) for part in scratch
    )

    def word(value: int) -> Array:  # 0-d arrays are the cheapest operands to pass
        return xp.array(value, xp.uint64)

    m0, m1, half = word(M0), word(M1), word(32)
    keys = [(word(k0 << 32), word(k1 << 32)) for k0, k1 in round_keys(int(key.k0), int(key.k1))]

    # The counter (token, feature, 0, 0) is a column beside a row, and so is all of two rounds
    row = xp.arange(features, dtype=xp.uint64)[None] << half ^ keys[0][0]
    token = xp.arange(groups, dtype=xp.uint64)[:, None] + word((int(key.offset) + start) & LOW)
    column = (token & word(LOW)) * m0 ^ keys[0][1]
    row = (row >> half) * m0
    xp.bitwise_xor((row ^ keys[1][1]) >> half, column & word(LOW), out=upper)
    column = (column >> half) * m1 ^ keys[1][0]
    xp.bitwise_xor(row << half ^ keys[2][1], (column >> half) * m0, out=tail)
    xp.multiply(upper, m1, out=head)
    head ^= column << half ^ keys[2][0]

    for k0, k1 in keys[3:-2]:
        xp.right_shift(head, half, out=upper)
        xp.right_shift(tail, half, out=lower)
        head <<= half
        tail <<= half
        upper *= m0
        lower *= m1
        head ^= k0
        tail ^= k1
        head ^= lower
        tail ^= upper

    # Of the last round only ``head`` is wanted, so of the one before only what it needs
    xp.right_shift(tail, half, out=lower)
    head >>= half
    tail <<= half
    lower *= m1
    head *= m0
    tail ^= keys[-2][1]
    tail ^= head
    tail >>= half
    lower <<= half
    tail *= m1
    tail ^= lower
    tail ^= keys[-1][0]
    _to_unit(xp, tail, out, upper)


def _to_unit(xp: Any, pairs: Array, out: Array, spare: Array) -> None:
    """(c ≫ 8)·2⁻²⁴ for the upper words, then for the lower ones."""
    narrow = spare.reshape(-1).view(xp.uint32)[: pairs.size].reshape(pairs.shape)
    scale = xp.array(2.0**-24, xp.float32)
    for shift, target in zip((40, 8), out, strict=False):
        if shift == 8:
            xp.copyto(narrow, pairs, casting="unsafe")  # the lower half
            narrow >>= xp.array(8, xp.uint32)
        else:
            xp.copyto(narrow, pairs >> xp.array(40, xp.uint64), casting="unsafe")
        xp.copyto(target, narrow.view(xp.int32), casting="same_kind")
        target *= scale
