"""The order of training: which window of tokens is sample ``position`` of step ``step``.

The answer is a pure function of (seed, step, position), so there is no loader state to save, and
neither resuming nor the number of processes can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from sparsepretrain.data.sources._source import TRAIN
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

T = TypeVar("T")


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


class PerEpoch(Generic[T]):
    """``draw(epoch)``, remembered for two epochs: a batch touches no more at most times."""

    def __init__(self, draw: Callable[[int], T]) -> None:
        self._draw = draw
        self._drawn: dict[int, T] = {}

    def __getitem__(self, epoch: int) -> T:
        """What belongs to ``epoch``."""
        if epoch not in self._drawn:
            if len(self._drawn) > 1:
                del self._drawn[min(self._drawn)]
            self._drawn[epoch] = self._draw(epoch)
        return self._drawn[epoch]


class Windows:
    """Non-overlapping windows of ``length + 1`` tokens (inputs, and targets shifted by one).

    Neighbours share one token: the last target of one is the first input of the next. Shuffled
    windows visit every place once per epoch, in a new permutation and from a new offset in
    [0, length), so that windows of different epochs start at different tokens. Windows with
    replacement start anywhere, each drawn for itself.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        seed: int,
        *,
        shuffled: bool,
        replacement: bool = False,
        complete: bool = False,
    ) -> None:
        """Take windows of ``tokens``, which has at least ``length + 1`` entries.

        Args:
            tokens: of one split.
            length: inputs per window.
            seed: of the order.
            shuffled: whether to permute and to shift the windows.
            replacement: of shuffled windows: draw every one anew, as nanoGPT does.
            complete: every pass is the first epoch, followed by shorter windows of what that
                leaves out, so that each token but the first is the target of one window.
        """
        self._tokens, self._length, self._seed, self._shuffled = tokens, length, seed, shuffled
        self._replacement = replacement
        places = (len(tokens) - 1) // length
        # one place fewer leaves room for any offset; a text of one window has to do without
        self.count = max(1, (len(tokens) - length) // length) if shuffled else places
        """Windows per epoch."""
        self._offsets = min(length, len(tokens) - self.count * length)
        self._epochs = PerEpoch(self._draw)
        self._full, self._complete = self.count, complete
        self._rest = self._left_out() if complete else []
        self.count += len(self._rest)

    def batch(self, step: int, positions: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Samples ``positions`` of the global batch of ``step``.

        Args:
            step: optimiser step, from 0.
            positions: samples of the global batch, each in [0, size).
            size: samples per global batch.

        Returns:
            int64 of shape (len(positions), length + 1); -1 after the end of a shorter window.
        """
        samples = np.asarray(positions, dtype=np.int64) + step * size
        if not self._complete:
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
        """Whole windows, by their place in the sequence of epochs."""
        epochs, places = np.divmod(samples, self._full)
        starts = places * self._length
        if self._shuffled:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                starts[mine] = self._epochs[int(epoch)][places[mine]]
        return self._tokens[starts[:, None] + np.arange(self._length + 1)].astype(np.int64)

    def _left_out(self) -> list[tuple[int, int]]:
        """(start, stop) of the windows before and after those of the first epoch."""
        begin = int(self._epochs[0].min()) if self._shuffled else 0
        end, last = begin + self._full * self._length, len(self._tokens) - 1
        starts = [*([0] if begin else []), *range(end, last, self._length)]
        return [(s, min(s + self._length, begin if s < begin else last) + 1) for s in starts]

    def _draw(self, epoch: int) -> np.ndarray:
        """Where the windows of an epoch start, in their order."""
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
    shuffled: bool | None = None,
    replacement: bool = False,
    complete: bool = False,
) -> Windows:
    """Windows of one split.

    Args:
        data: prepared data.
        split: ``train`` or ``validation``.
        length: sequence length in tokens.
        seed: seed of the order, in [0, 2^64); unused where windows are not shuffled.
        shuffled: None: shuffled for ``train``; the windows of ``validation`` come in file order.
        replacement: see :class:`Windows`.
        complete: see :class:`Windows`.

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
    shuffled = split == TRAIN if shuffled is None else shuffled
    return Windows(
        tokens, length, seed, shuffled=shuffled, replacement=replacement, complete=complete
    )
