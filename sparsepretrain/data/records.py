"""Prepared records, and the order in which training meets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsepretrain.data.tokens import TokenData


def records(data: TokenData, split: str) -> list[dict[str, Any]]:
    """The records of a split; none where the data has no such split."""
    if split not in data.tokens:
        return []
    return [json.loads(document) for document in data.tokens[split].tobytes().split(b"\0")[:-1]]


class Shuffle:
    """Places 0 … count - 1, each once per epoch, in an order that (seed, epoch) decides.

    A pure function of (step, position), as :class:`~sparsepretrain.data.order.Windows` is.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self._seed = count, seed
        self._epochs: dict[int, np.ndarray] = {}

    def places(self, step: int, positions: Sequence[int], size: int) -> np.ndarray:
        """int64 (len(positions),): what is at ``positions`` of the global batch of ``step``."""
        samples = np.asarray(positions, dtype=np.int64) + step * size
        epochs, places = np.divmod(samples, self.count)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            places[mine] = self._permutation(int(epoch))[places[mine]]
        return places

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            # raw words: NumPy keeps their stream across versions
            key = np.array([self._seed, epoch], dtype=np.uint64)
            words = np.random.Philox(key=key).random_raw(self.count)
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = np.argsort(words, kind="stable")
        return self._epochs[epoch]
