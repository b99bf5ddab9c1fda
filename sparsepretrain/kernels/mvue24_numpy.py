"""The estimators of :mod:`sparsepretrain.kernels.mvue24` in NumPy, for the CPU.

The same operations on the same numbers in the same order, so the same bits; what differs is how
they are executed: in place in buffers that stay in cache, with selections as bit masks, and with
groups of at most two non-zeros patched afterwards where there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsepretrain.kernels import noise_numpy
from sparsepretrain.kernels.groups import buffers, in_chunks
from sparsepretrain.kernels.noise import NoiseKey

Array = Any
CHUNK = 48_000
"""Groups of four per part."""


def estimate(
    xp: Any,
    source: Array,
    target: Array,
    estimator: str,
    draws: NoiseKey | Array,
    saturation: float,
) -> None:
    """Fill ``target`` with the estimate of ``source``.

    Args:
        xp: numpy.
        source, target: (groups, 4, features) of fp32 or fp64, any strides.
        estimator: ``approximate`` or ``exact``.
        draws: the stream, or uniforms of the type of ``source``: (2 or 1, groups, features).
        saturation: largest magnitude of a result.
    """
    groups, _, features = source.shape

    def prepare(rows: int) -> Callable[[int, int], None]:
        chunk = _Chunk(xp, rows * features, source.dtype, saturation)
        run = chunk.approximate if estimator == "approximate" else chunk.exact

        def work(start: int, stop: int) -> None:
            x, out = (a[start:stop].swapaxes(0, 1) for a in (source, target))
            chunk.begin(x.shape)
            if isinstance(draws, NoiseKey):
                chunk.draw(draws, start, 2 if estimator == "approximate" else 1)
            else:
                chunk.uniforms[: len(draws)] = draws[:, start:stop]
            run(x, out)

        return work

    in_chunks(prepare, groups, features, CHUNK)


class _Chunk:
    """Buffers for one part of the work; arrays are (4, groups, features) or (groups, features)."""

    def __init__(self, xp: Any, size: int, dtype: Any, saturation: float) -> None:
        self.xp = xp
        self.saturation = saturation
        self.floor = float(xp.finfo(dtype).tiny) * 2**30
        self.tiny = xp.finfo(dtype).tiny
        self.integer = xp.dtype(f"i{dtype.itemsize}")
        self.sign = xp.array(-(2 ** (8 * dtype.itemsize - 1)), self.integer)
        self._four, self._one, self._flags = buffers(
            xp, ((3, 4, size), dtype), ((7, size), dtype), ((2, 4, size), xp.bool_)
        )
        # the generator is done before the rest begins, so it borrows the space of the latter
        self._words = self._four.reshape(-1).view(xp.uint64)[: noise_numpy.BUFFERS * size]

    def begin(self, shape: tuple[int, ...]) -> None:
        """Views of the buffers for a part of ``shape`` (4, groups, features)."""
        size = shape[1] * shape[2]
        self.b, self.value, self.spare = (f[:, :size].reshape(shape) for f in self._four)
        self.selected, self.again = (f[:, :size].reshape(shape) for f in self._flags)
        ones = [f[:size].reshape(shape[1:]) for f in self._one]
        self.scale, self.second, self.total, self.head, self.tail = ones[:5]
        self.uniforms = self._one[5:, :size].reshape(2, *shape[1:])

    def draw(self, key: NoiseKey, start: int, count: int) -> None:
        """Uniforms of the groups from ``start`` on."""
        scratch = self._words.reshape(noise_numpy.BUFFERS, -1)
        if self.uniforms.itemsize == 4:
            noise_numpy.fill(self.xp, key, start, self.uniforms[:count], scratch)
        else:  # fp64: the same numbers, widened
            _, groups, features = self.uniforms.shape
            narrow = self.xp.empty((count, groups, features), self.xp.float32)
            noise_numpy.fill(self.xp, key, start, narrow, scratch)
            self.uniforms[:count] = narrow

    def approximate(self, x: Array, out: Array) -> None:
        """See ``_approximate`` of the reference."""
        xp, b, rest = self.xp, self.b, self.spare
        self._normalise(x)
        first, second = self.uniforms
        first *= self._sums(b, self.total)
        self._one_hot(self.selected, first, b[0], self.head, self.tail)
        self._copy_bits(rest, b, self.selected, keep=False)
        second *= self._sums(rest, first)
        self._one_hot(self.again, second, rest[0], self.head, self.tail)
        self.selected |= self.again

        odds, others = self.spare, self.value
        self._others(b, others)
        xp.divide(b, others, out=odds)
        self._others(odds, others)
        others += 1
        xp.divide(self.total, others, out=others)
        xp.maximum(others, b, out=others)
        others *= self.scale
        self._finish(x, out)

    def exact(self, x: Array, out: Array) -> None:
        """See ``_exact`` of the reference."""
        xp, b, others, p = self.xp, self.b, self.value, self.spare
        self._normalise(x)
        self._others(b, others)
        share, half, third = self.total, self.head, self.tail
        xp.minimum(xp.minimum(others[0], others[1], out=share), others[2], out=share)
        xp.minimum(share, others[3], out=share)
        xp.add(b[0], others[0], out=half)
        half *= 0.5
        xp.minimum(share, half, out=share)
        xp.divide(b, share, out=p)
        xp.minimum(p, 1, out=p)
        u, second = self.uniforms[0], self.head
        xp.add(p[0], p[1], out=second)
        xp.add(second, p[2], out=third)
        xp.copyto(third, 2, where=b[3] == 0)
        self._one_hot(self.selected, u, p[0], second, third)
        for boundary in (p[0], second, third):
            boundary -= 1
        self._one_hot(self.again, u, p[0], second, third)
        self.selected |= self.again
        xp.maximum(share, b, out=self.value)
        self.value *= self.scale
        self._finish(x, out)

    def _normalise(self, x: Array) -> None:
        """Magnitudes over the group's largest, that largest, the second smallest of the former."""
        xp, b, largest, second = self.xp, self.b, self.scale, self.second
        low, high = self.value[:2], self.value[2:]
        xp.abs(x, out=b)
        xp.minimum(b[::2], b[1::2], out=low)
        xp.maximum(b[::2], b[1::2], out=high)
        xp.maximum(high[0], high[1], out=largest)
        xp.maximum(low[0], low[1], out=second)
        xp.minimum(second, xp.minimum(high[0], high[1], out=low[0]), out=second)
        xp.maximum(largest, self.tiny, out=largest)
        b /= largest
        second /= largest

    def _sums(self, b: Array, total: Array) -> Array:
        """Sums of the first two, three and four entries: ``head``, ``tail`` and the result."""
        self.xp.add(b[0], b[1], out=self.head)
        self.xp.add(self.head, b[2], out=self.tail)
        return self.xp.add(self.tail, b[3], out=total)

    def _others(self, b: Array, out: Array) -> None:
        """Sum of the three other entries, for each entry; never a difference."""
        xp, head, tail = self.xp, self.head, self.tail
        xp.add(b[0], b[1], out=head)
        xp.add(b[2], b[3], out=tail)
        xp.add(b[1::-1], tail, out=out[:2])
        xp.add(b[:1:-1], head, out=out[2:])

    def _one_hot(self, out: Array, u: Array, first: Array, second: Array, third: Array) -> None:
        """Which of the intervals ending at the three boundaries (and beyond) holds u."""
        xp = self.xp
        for flags, boundary in zip(out, (first, second, third), strict=False):
            xp.less(u, boundary, out=flags)
        xp.logical_not(out[2], out=out[3])
        out[2] ^= out[1]
        out[1] ^= out[0]

    def _copy_bits(self, out: Array, values: Array, flags: Array, *, keep: bool) -> None:
        """``values`` where ``flags`` are as ``keep`` says, else +0.0."""
        xp, bits = self.xp, out.view(self.integer)
        bytes_ = flags.view(xp.int8)
        if keep:
            xp.negative(bytes_, out=bytes_)
        else:
            xp.subtract(bytes_, 1, out=self.again.view(xp.int8))
            bytes_ = self.again.view(xp.int8)
        xp.copyto(bits, bytes_)  # 0 or -1, all ones
        bits &= values.view(self.integer)

    def _finish(self, x: Array, out: Array) -> None:
        """sign(x)·value where selected; groups with at most two non-zeros stay as they are."""
        xp, value = self.xp, self.value
        if not 4 * float(self.scale.max(initial=0)) <= self.saturation:  # value ≤ 4·scale
            xp.minimum(value, self.saturation, out=value)
        bits, result = self.spare.view(self.integer), out.view(self.integer)
        self._copy_bits(self.spare, value, self.selected, keep=True)
        signs = value.view(self.integer)
        xp.bitwise_and(x.view(self.integer), self.sign, out=signs)
        xp.bitwise_or(bits, signs, out=result)
        if self.second.size and not self.second.min() >= self.floor:  # true for NaN
            self._patch(x, out)

    def _patch(self, x: Array, out: Array) -> None:
        """What the arithmetic above cannot do: groups of few non-zeros, and NaN."""
        xp = self.xp
        xp.copyto(out, xp.nan, where=self.second != self.second)
        sparse = self.second < self.floor
        few = xp.add.reduce(x != 0, axis=0, dtype=xp.int8) <= 2
        for b, entry, target in zip(self.b, x, out, strict=True):
            stays = few | ~(b < self.floor)
            xp.copyto(target, xp.where(stays, entry, self.tiny * 0), where=sparse)
