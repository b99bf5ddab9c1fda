"""The order of training: which window, bucket, record or image a sample of a step is.

The answer is a pure function of (seed, step, position), so there is no loader state to save, and
neither resuming nor the number of processes can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

MULTIPLE = 4
"""Lengths are padded to it, so that groups of four tokens (MVUE) lie within a sentence."""


def epoch_words(seed: int, epoch: int, count: int) -> np.ndarray:
    """``count`` random uint64 that belong to an epoch: whatever is random in its order.

    Raw Philox words, whose stream NumPy keeps across versions, which it does not promise for
    ``Generator.permutation``. Their stable argsort is a permutation.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """0 … count - 1 in an order that (seed, epoch) decides."""
    return np.argsort(epoch_words(seed, epoch, count), kind="stable")


class Windows:
    """Non-overlapping windows of ``length + 1`` tokens (inputs, and targets shifted by one).

    Neighbours share one token: the last target of one is the first input of the next. Every place
    is visited once per epoch, in a new permutation and from a new offset in [0, length), so that
    windows of different epochs start at different tokens.
    """

    def __init__(
        self, tokens: np.ndarray, length: int, seed: int, *, replacement: bool, complete: bool
    ) -> None:
        """Take windows of ``tokens``, at least ``length + 1``; the rest as in :func:`windows`."""
        self._tokens, self._length, self._seed = tokens, length, seed
        self._replacement = replacement
        # one place fewer leaves room for any offset; a text of one window has to do without
        self._full = max(1, (len(tokens) - length) // length)
        self._offsets = min(length, len(tokens) - self._full * length)
        self._epoch = lru_cache(2)(self._draw)  # a batch touches no more at most times
        self._rest = self._left_out() if complete else None
        self.count = self._full + len(self._rest or ())
        """Windows per epoch."""

    def batch(self, step: int, positions: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Samples ``positions``, each in [0, size), of the global batch of ``step``.

        Returns:
            int64 of shape (len(positions), length + 1); -1 after the end of a shorter window.
        """
        samples = np.asarray(positions, dtype=np.int64) + step * size
        if self._rest is None:
            return self._windows(samples)
        samples %= self.count
        rows = np.full((len(samples), self._length + 1), -1, dtype=np.int64)
        whole = samples < self._full
        rows[whole] = self._windows(samples[whole])
        for row in np.flatnonzero(~whole):
            start, stop = self._rest[samples[row] - self._full]
            rows[row, : stop - start] = self._tokens[start:stop]
        return rows

    def _windows(self, samples: np.ndarray) -> np.ndarray:
        epochs, starts = np.divmod(samples, self._full)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            starts[mine] = self._epoch(int(epoch))[starts[mine]]
        return self._tokens[starts[:, None] + np.arange(self._length + 1)].astype(np.int64)

    def _left_out(self) -> list[tuple[int, int]]:
        """(start, stop) of the windows before and after those of the first epoch."""
        begin, last = int(self._epoch(0).min()), len(self._tokens) - 1
        end = begin + self._full * self._length
        starts = [*([0] if begin else []), *range(end, last, self._length)]
        return [(s, min(s + self._length, begin if s < begin else last) + 1) for s in starts]

    def _draw(self, epoch: int) -> np.ndarray:
        words = epoch_words(self._seed, epoch, self._full + 1)
        if self._replacement:
            places = np.uint64(len(self._tokens) - self._length)
            return (words[1:] % places).astype(np.int64)
        offset = int(words[0] % np.uint64(self._offsets))
        return offset + np.argsort(words[1:], kind="stable") * self._length


def windows(
    data: TokenData,
    split: str,
    length: int,
    seed: int,
    *,
    replacement: bool = False,
    complete: bool = False,
) -> Windows:
    """Windows of one split.

    Args:
        data: prepared data.
        split: of ``data``.
        length: of the inputs, in tokens.
        seed: of the order, in [0, 2^64).
        replacement: draw every window for itself, from anywhere, as nanoGPT does.
        complete: every pass is the first epoch, followed by shorter windows of what that
            leaves out, so that each token but the first is the target of one window.

    Raises:
        DataError: the split has no window of ``length + 1`` tokens.
    """
    if split not in data.tokens:
        raise DataError(f"{data.name} has no {split} split (it has {', '.join(data.tokens)})")
    tokens = data.tokens[split]
    if len(tokens) <= length:
        raise DataError(
            f"{data.directory / split}.bin has {len(tokens)} tokens, but a sequence of "
            f"{length} needs {length + 1}: choose a smaller task.sequence_length, more text, "
            "or another data.validation"
        )
    return Windows(tokens, length, seed, replacement=replacement, complete=complete)


class Buckets:
    """Pairs of about the same length, packed so that a bucket has at most ``max_tokens`` tokens.

    A bucket of r pairs counts as r · max(source length, target length), padding included, as in
    fairseq. Pairs are sorted by (longer side, target, source), each rounded up to a multiple of
    four, and cut into buckets. Every epoch shuffles pairs of equal lengths and then the buckets: so
    shapes and number of the buckets are the same in every epoch, and every pair comes once.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int, seed: int) -> None:
        """Cut pairs into buckets.

        Args:
            lengths: (pairs, 2) of the pairs that take part, at least one, in tokens.
            max_tokens: most tokens of a bucket; a single longer pair is a bucket too.
            seed: of the order, in [0, 2^64).
        """
        padded = -(-lengths // MULTIPLE) * MULTIPLE
        longest = padded.max(axis=1)
        self._seed = seed
        self._keys = (padded[:, 0], padded[:, 1], longest)
        self._longest = int(longest.max())
        self.starts = _cut(np.sort(longest), max_tokens)
        """(buckets + 1,) places in the sorted order where buckets begin, and its end."""
        self._epoch = lru_cache(2)(self._draw)

    @property
    def count(self) -> int:
        """Buckets per epoch."""
        return len(self.starts) - 1

    @property
    def capacity(self) -> int:
        """Most tokens of a bucket, whatever other bucket it is padded to."""
        return int(np.diff(self.starts).max()) * self._longest

    def pairs(self, sample: int) -> np.ndarray:
        """Indices of the pairs of the bucket that is ``sample`` of the whole order, from 0."""
        epoch, place = divmod(sample, self.count)
        order, permutation = self._epoch(epoch)
        bucket = permutation[place]
        return order[self.starts[bucket] : self.starts[bucket + 1]]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        size = len(self._keys[0])
        words = epoch_words(self._seed, epoch, size + self.count)
        order = np.lexsort((words[:size], *self._keys))
        return order, np.argsort(words[size:], kind="stable")


def pad(rows: Sequence[np.ndarray], value: int) -> np.ndarray:
    """(rows, length) int64, the length rounded up to a multiple of four, filled with ``value``."""
    longest = max(map(len, rows))
    padded = np.full((len(rows), -(-longest // MULTIPLE) * MULTIPLE), value, dtype=np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded


def _cut(longest: np.ndarray, max_tokens: int) -> np.ndarray:
    """Greedy cuts of ascending lengths: rows · last length ≤ ``max_tokens``."""
    starts, begin, total = [0], 0, len(longest)
    while begin < total:
        # rows · length grows with every row, so those that fit come first
        rows = np.arange(1, total - begin + 1)[: max(1, max_tokens // int(longest[begin]))]
        fits = rows * longest[begin : begin + len(rows)] <= max_tokens
        begin += max(1, int(np.count_nonzero(fits)))
        starts.append(begin)
    return np.array(starts)


class Place(NamedTuple):
    """Where a sample stands in the order of training: with the seed, the key of what is random."""

    epoch: int
    position: int
    """In the epoch."""
    item: int
    """Of the record or image."""


class Shuffle:
    """Every epoch is ``count`` samples in an order of its own, a function of (seed, epoch).

    With ``copies`` > 1 a sample is followed by itself, differently augmented, and an epoch visits
    only ``count / copies`` of them (repeated augmentation of Hoffer et al., arXiv:1901.09335, in
    the form of DeiT's sampler).
    """

    def __init__(self, count: int, seed: int, copies: int = 1) -> None:
        self._count, self._copies = count, copies
        self._epoch = lru_cache(2)(lambda epoch: permutation(seed, epoch, count))

    def places(self, step: int, positions: Sequence[int], size: int) -> list[Place]:
        """What is at ``positions`` of the global batch of ``step``, which has ``size`` samples."""
        found = []
        for position in positions:
            epoch, place = divmod(step * size + position, self._count)
            found.append(Place(epoch, place, int(self._epoch(epoch)[place // self._copies])))
        return found
