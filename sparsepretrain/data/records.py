"""Prepared records, and the order in which training meets them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsepretrain.data.order import PerEpoch, permutation
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
        self.count = count
        self._permutations = PerEpoch(functools.partial(permutation, seed, count=count))

    def places(self, step: int, positions: Sequence[int], size: int) -> np.ndarray:
        """int64 (len(positions),): what is at ``positions`` of the global batch of ``step``."""
        samples = np.asarray(positions, dtype=np.int64) + step * size
        epochs, places = np.divmod(samples, self.count)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            places[mine] = self._permutations[int(epoch)][places[mine]]
        return places
