"""The order of training: which window of tokens is sample ``position`` of step ``step``.

The answer is a pure function of (seed, step, position), so there is no loader state to save, and
neither resuming nor the number of processes can change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsepretrain.data.sources._source import TRAIN
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError


class Windows:
    """Non-overlapping windows of ``length + 1`` tokens (inputs, and targets shifted by one).

    Neighbours share one token: the last target of one is the first input of the next. Shuffled
    windows visit every place once per epoch, in a new permutation and from a new offset in
    [0, length), so that windows of different epochs start at different tokens.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int, *, shuffled: bool) -> None:
        """Take windows of ``tokens``, which has at least ``length + 1`` entries."""
        self._tokens, self._length, self._seed, self._shuffled = tokens, length, seed, shuffled
        places = (len(tokens) - 1) // length
        # one place fewer leaves room for any offset; a text of one window has to do without
        self.count = max(1, (len(tokens) - length) // length) if shuffled else places
        """Windows per epoch."""
        self._offsets = min(length, len(tokens) - self.count * length)
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def batch(self, step: int, positions: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Samples ``positions`` of the global batch of ``step``.

        Args:
            step: optimiser step, from 0.
            positions: samples of the global batch, each in [0, size).
            size: samples per global batch.

        Returns:
            int64 of shape (len(positions), length + 1).
        """
        samples = np.asarray(positions, dtype=np.int64) + step * size
        epochs, places = np.divmod(samples, self.count)
        starts = places * self._length
        if self._shuffled:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                offset, permutation = self._epoch(int(epoch))
                starts[mine] = offset + permutation[places[mine]] * self._length
        return self._tokens[starts[:, None] + np.arange(self._length + 1)].astype(np.int64)

    def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """Offset and permutation of an epoch.

        Both come from raw Philox words, whose stream NumPy keeps across versions, which it does
        not promise for ``Generator.permutation``.
        """
        if epoch not in self._epochs:
            key = np.array([self._seed, epoch], dtype=np.uint64)
            words = np.random.Philox(key=key).random_raw(self.count + 1)
            permutation = np.argsort(words[1:], kind="stable")
            if len(self._epochs) > 1:  # a batch touches two epochs at most times
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = int(words[0] % np.uint64(self._offsets)), permutation
        return self._epochs[epoch]


def windows(
    data: TokenData, split: str, length: int, seed: int, *, shuffled: bool | None = None
) -> Windows:
    """Windows of one split.

    Args:
        data: prepared data.
        split: ``train`` or ``validation``.
        length: sequence length in tokens.
        seed: seed of the order, in [0, 2^64); unused where windows are not shuffled.
        shuffled: None: shuffled for ``train``; the windows of ``validation`` come in file order.

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
    return Windows(tokens, length, seed, shuffled=split == TRAIN if shuffled is None else shuffled)
