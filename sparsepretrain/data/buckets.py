"""Sentence pairs: where they lie in a token stream, and the buckets that training reads.

Prepared pairs are a stream of documents: pair i is documents 2i (source) and 2i + 1 (target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsepretrain.data.order import PerEpoch, epoch_words
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

MULTIPLE = 4
"""Lengths are padded to it, so that groups of four tokens (MVUE) lie within a sentence."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of one split."""

    tokens: np.ndarray
    """The stream, as stored."""
    bounds: np.ndarray
    """(pairs, 3) int64: where the source begins, the target begins, and the target ends."""
    lengths: np.ndarray
    """(pairs, 2) int64: tokens of source and target, each with its end token."""

    def __len__(self) -> int:
        return len(self.bounds)

    def source(self, pair: int) -> np.ndarray:
        """Tokens of the source, its end token last."""
        begin, middle, _ = self.bounds[pair]
        return self.tokens[begin:middle]

    def target(self, pair: int) -> np.ndarray:
        """Tokens of the target, its end token last."""
        _, middle, end = self.bounds[pair]
        return self.tokens[middle:end]


def pairs(data: TokenData, split: str) -> Pairs:
    """The pairs of ``split``.

    Raises:
        DataError: it has none, its documents do not pair up, or nothing ends a document.
    """
    file = data.directory / f"{split}.bin"
    tokens = data.tokens.get(split)
    if tokens is None or not len(tokens):
        raise DataError(
            f"{data.name} has no pairs in split {split!r}: set data.{split} (cldr_ende: "
            f"data.{split}_pairs), or do without the split (validation: eval.batches=0)"
        )
    if data.end_of_text is None:
        raise DataError(f"{data.name}: the tokenizer has no token that ends a sentence")
    ends = np.flatnonzero(tokens == data.end_of_text) + 1
    if len(ends) % 2 or not len(ends) or ends[-1] != len(tokens):
        raise DataError(f"{file} does not hold pairs of sentences: delete {data.directory}")
    begins = np.concatenate([[0], ends[:-1]])
    bounds = np.stack([begins[::2], begins[1::2], ends[1::2]], axis=1)
    return Pairs(tokens, bounds, np.diff(bounds, axis=1))


def references(data: TokenData, split: str) -> list[str] | None:
    """The raw targets of a held-out split, pair by pair; None: the data was prepared without.

    Raises:
        DataError: there are not as many as pairs.
    """
    file = data.references.get(split)
    if file is None:
        return None
    lines = file.read_bytes().decode(errors="replace").split("\0")[:-1]
    if len(lines) != len(pairs(data, split)):
        raise DataError(f"{file} does not belong to {split}.bin: delete {data.directory}")
    return lines


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
        self._epochs = PerEpoch(self._draw)

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
        order, permutation = self._epochs[epoch]
        bucket = permutation[place]
        return order[self.starts[bucket] : self.starts[bucket + 1]]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Sorted pairs and the permutation of the buckets."""
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
