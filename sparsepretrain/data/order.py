"""Training order: maps (seed, step, position) to a window, bucket, record or image.

The order is a pure function, so there is no loader state to save, and neither resuming nor the
world size changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

MULTIPLE = 4
"""Padded lengths are multiples of this: groups of four tokens (MVUE) stay within a sentence."""
CHUNK = 1 << 20
"""Documents whose lengths are read at a time."""


def epoch_words(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return ``count`` random uint64, the only randomness in an epoch's order.

    NumPy guarantees the stream of raw Philox words across versions, unlike that of
    ``Generator.permutation``. Their stable argsort is a permutation.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return 0 … count - 1 in an order determined by (seed, epoch)."""
    return np.argsort(epoch_words(seed, epoch, count), kind="stable")


class Windows:
    """Non-overlapping windows of ``length + 1`` tokens (inputs, and targets shifted by one).

    The last target of a window is the first input of the next. Each epoch visits every window once,
    in a new permutation and from a new offset in [0, length). With ``replacement`` windows start
    anywhere and may repeat. With ``complete`` the shorter windows at both ends are samples too.
    """

    def __init__(
        self, tokens: np.ndarray, length: int, seed: int, *, replacement: bool, complete: bool
    ) -> None:
        """Take windows of at least ``length + 1`` ``tokens``; see :func:`windows`."""
        self._tokens = tokens
        self._length = length
        self._seed = seed
        self._replacement = replacement
        # one window fewer leaves room for any offset, unless there is only one
        self._full = max(1, (len(tokens) - length) // length)
        self._offsets = min(length, len(tokens) - self._full * length)
        self._epoch = lru_cache(2)(self._draw)  # a batch rarely spans more epochs
        self._shorter = self._left_out() if complete else None
        self.count = self._full + len(self._shorter or ())
        """Windows per epoch."""

    def batch(self, step: int, positions: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Return the samples ``positions``, each in [0, size), of the global batch of ``step``.

        Returns:
            int64 of shape (len(positions), length + 1); -1 after the end of a shorter window.
        """
        samples = np.asarray(positions, dtype=np.int64) + step * size
        if self._shorter is None:
            return self._windows(samples)
        samples %= self.count
        rows = np.full((len(samples), self._length + 1), -1, dtype=np.int64)
        whole = samples < self._full
        rows[whole] = self._windows(samples[whole])
        for row in np.flatnonzero(~whole):
            start, stop = self._shorter[samples[row] - self._full]
            rows[row, : stop - start] = self._tokens[start:stop]
        return rows

    def _windows(self, samples: np.ndarray) -> np.ndarray:
        epochs, starts = np.divmod(samples, self._full)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            starts[rows] = self._epoch(int(epoch))[starts[rows]]
        return self._tokens[starts[:, None] + np.arange(self._length + 1)].astype(np.int64)

    def _left_out(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the windows before and after those of the first epoch."""
        begin = int(self._epoch(0).min())
        last = len(self._tokens) - 1
        end = begin + self._full * self._length
        starts = [*([0] if begin else []), *range(end, last, self._length)]
        return [(s, min(s + self._length, begin if s < begin else last) + 1) for s in starts]

    def _draw(self, epoch: int) -> np.ndarray:
        words = epoch_words(self._seed, epoch, self._full + 1)
        if self._replacement:
            n_starts = np.uint64(len(self._tokens) - self._length)
            return (words[1:] % n_starts).astype(np.int64)
        offset = int(words[0] % np.uint64(self._offsets))
        return offset + np.argsort(words[1:], kind="stable") * self._length


class Documents:
    """Documents, each cut or padded to ``length`` tokens; an epoch visits each one once.

    A document ends with its end-of-text token; those with fewer than two tokens are left out.
    """

    def __init__(self, tokens: np.ndarray, bounds: np.ndarray, length: int, seed: int) -> None:
        """Take the documents between ``bounds`` of ``tokens``; see :func:`windows`."""
        self._tokens = tokens
        self._bounds = bounds
        self._length = length
        # in pieces: the bounds of a large corpus are gigabytes of a memory map
        pieces = range(0, len(bounds) - 1, CHUNK)
        short = [np.flatnonzero(np.diff(bounds[i : i + CHUNK + 1]) < 2) + i for i in pieces]
        left_out = np.concatenate([np.zeros(0, dtype=np.int64), *short])
        self._before = left_out - np.arange(len(left_out))
        """Number of samples before each document that is left out."""
        self.count = len(bounds) - 1 - len(left_out)
        """Documents per epoch."""
        self._order = Shuffle(self.count, seed)

    def batch(self, step: int, positions: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Return the samples ``positions``, each in [0, size), of the global batch of ``step``.

        Returns:
            int64 of shape (len(positions), length + 1); -1 after a document and in the last column,
            since the last token of a cut document has no target.
        """
        rows = np.full((len(positions), self._length + 1), -1, dtype=np.int64)
        for row, sample in zip(rows, self._order.samples(step, list(positions), size), strict=True):
            document = sample.item + np.searchsorted(self._before, sample.item, side="right")
            start = self._bounds[document]
            stop = min(self._bounds[document + 1], start + self._length)
            row[: stop - start] = self._tokens[start:stop]
        return rows


def windows(
    data: TokenData,
    split: str,
    length: int,
    seed: int,
    *,
    replacement: bool = False,
    complete: bool = False,
    documents: bool = False,
) -> Windows | Documents:
    """Return the windows, or the documents, of one split.

    Args:
        data: prepared data.
        split: name of the split.
        length: input length in tokens.
        seed: seed of the order, in [0, 2^64).
        replacement: draw each window independently and from any start, as nanoGPT does.
        complete: repeat the first epoch, followed by shorter windows of the remaining tokens: each
            token except the first is the target of one window.
        documents: return :class:`Documents` instead.
    """
    if split not in data.tokens:
        raise DataError(f"{data.name} has no {split} split (it has {', '.join(data.tokens)})")
    tokens = data.tokens[split]
    if documents:
        if data.end_of_text is None:
            raise DataError(
                f"task.documents: the tokenizer of {data.name} has no end-of-text token, which "
                "separates documents; choose another data.tokenizer, or task.documents=false"
            )
        windows_of_documents = Documents(tokens, data.bounds[split], length, seed)
        if not windows_of_documents.count:
            raise DataError(f"task.documents: the {split} split of {data.name} has no documents")
        return windows_of_documents
    if not len(tokens) and split == "validation":
        raise DataError(
            f"{data.name} has no validation split: give data.validation, or train without "
            "evaluations (eval.batches=0)"
        )
    if len(tokens) <= length:
        raise DataError(
            f"{data.directory / split}.bin has {len(tokens)} tokens, but a sequence of "
            f"{length} needs {length + 1}: choose a smaller task.sequence_length, more text, "
            "or another data.validation"
        )
    return Windows(tokens, length, seed, replacement=replacement, complete=complete)


class Buckets:
    """Batches of sentence pairs with similar lengths, at most ``max_tokens`` tokens each.

    A bucket of r pairs counts as r · max(source length, target length), padding included, as in
    fairseq. Pairs are sorted by (longer side, target, source), each rounded up to a multiple of
    four, and cut into buckets. Each epoch shuffles pairs of equal lengths, then the buckets: every
    pair comes once, and all epochs have the same bucket shapes.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int, seed: int) -> None:
        """Cut pairs into buckets.

        Args:
            lengths: (pairs, 2) source and target lengths in tokens, at least one pair.
            max_tokens: maximum tokens of a bucket; a single longer pair is its own bucket.
            seed: seed of the order, in [0, 2^64).
        """
        padded = -(-lengths // MULTIPLE) * MULTIPLE
        longest = padded.max(axis=1)
        self._seed = seed
        self._keys = (padded[:, 0], padded[:, 1], longest)
        self.starts = _cut(np.sort(longest), max_tokens)
        """(buckets + 1,) boundaries of the buckets in the sorted order."""
        self.count = len(self.starts) - 1
        """Buckets per epoch."""
        self.capacity = int(np.diff(self.starts).max()) * int(longest.max())
        """Maximum tokens of a bucket, even if padded to the longest one."""
        self._epoch = lru_cache(2)(self._draw)

    def pairs(self, sample: int) -> np.ndarray:
        """Return the pair indices of bucket number ``sample`` in the whole order."""
        epoch, place = divmod(sample, self.count)
        order, permutation = self._epoch(epoch)
        bucket = permutation[place]
        return order[self.starts[bucket] : self.starts[bucket + 1]]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        size = len(self._keys[0])
        words = epoch_words(self._seed, epoch, size + self.count)
        order = np.lexsort((words[:size], *self._keys))
        return order, np.argsort(words[size:], kind="stable")


def padded_length(length: int) -> int:
    """Return ``length`` rounded up to a multiple of four, as :func:`pad` does."""
    return -(-length // MULTIPLE) * MULTIPLE


def pad(rows: Sequence[np.ndarray], value: int) -> np.ndarray:
    """Stack rows into (rows, length) int64; pad with ``value`` to a multiple of four."""
    padded = np.full((len(rows), padded_length(max(map(len, rows)))), value, dtype=np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded


def _cut(longest: np.ndarray, max_tokens: int) -> np.ndarray:
    """Cut ascending lengths greedily so that rows · last length ≤ ``max_tokens``."""
    starts = [0]
    begin = 0
    total = len(longest)
    while begin < total:
        # rows · length grows with every row, so those that fit come first
        rows = np.arange(1, total - begin + 1)[: max(1, max_tokens // int(longest[begin]))]
        fits = rows * longest[begin : begin + len(rows)] <= max_tokens
        begin += max(1, int(np.count_nonzero(fits)))
        starts.append(begin)
    return np.array(starts)


class ShuffledSample(NamedTuple):
    """Sample of the training order; with the seed, epoch and position key its random draws."""

    epoch: int
    position: int
    """Position in the epoch."""
    item: int
    """Index of the record or image."""


class Shuffle:
    """Epochs of ``count`` samples, each in an order determined by (seed, epoch).

    With ``copies`` > 1 consecutive samples are augmented copies of one item, and an epoch visits
    only ``count / copies`` items (repeated augmentation, Hoffer et al., arXiv:1901.09335, as in
    DeiT's sampler).
    """

    def __init__(self, count: int, seed: int, copies: int = 1) -> None:
        self._count = count
        self._copies = copies
        self._epoch = lru_cache(2)(lambda epoch: permutation(seed, epoch, count))

    def samples(self, step: int, positions: Sequence[int], size: int) -> list[ShuffledSample]:
        """Return the samples at ``positions`` in the global batch of ``size`` samples."""
        result = []
        for index in positions:
            epoch, position = divmod(step * size + index, self._count)
            item = int(self._epoch(epoch)[position // self._copies])
            result.append(ShuffledSample(epoch, position, item))
        return result
