"""Which tokens of a window are masked: a pure function of (seed, split, step, position)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from sparsepretrain.data.source import SPLITS


def selected(probability: float, eligible: int) -> int:
    """How many of ``eligible`` tokens are selected: rounded, at least one if there is one.

    A number per sample, not a draw per token, as in BERT's and Cramming's code: so every sample
    has about the same weight and no micro-batch is empty.
    """
    return min(eligible, max(1, int(probability * eligible + 0.5)))


class Masking:
    """Selection of tokens and what they are replaced by."""

    def __init__(self, options: Any, mask: int, special: Collection[int], vocab_size: int) -> None:
        """Take the task's options, the id of the mask token, and the vocabulary.

        Args:
            options: ``probability``, ``mask_fraction``, ``random_fraction``.
            mask: id that replaces selected tokens.
            special: ids that are neither selected nor drawn as random tokens.
            vocab_size: random tokens are below it.
        """
        self._probability = options.probability
        self._masked = options.mask_fraction
        self._changed = options.mask_fraction + options.random_fraction
        self._mask = mask
        self._special = np.array(sorted(special), dtype=np.int64)
        self._ordinary = np.setdiff1d(np.arange(vocab_size), self._special)

    def apply(
        self, rows: np.ndarray, seed: int, split: str, step: int, positions: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mask the samples ``positions`` of the global batch of ``step``.

        Args:
            rows: (len(positions), length) int64 tokens; not changed.
            seed: of the run, in [0, 2^63).
            split: name of the split.
            step: optimiser step, from 0.
            positions: of the rows in the global batch.

        Returns:
            Tokens of the shape of ``rows``; selected places in their flattened form, ascending;
            the tokens that were there. All int64.
        """
        tokens = rows.copy()
        length = rows.shape[1]
        key = np.array([seed, step * len(SPLITS) + SPLITS.index(split)], dtype=np.uint64)
        eligible = ~np.isin(rows, self._special)
        places = [np.zeros(0, dtype=np.int64)]
        for index, position in enumerate(positions):
            # raw words, whose stream NumPy keeps across versions; the 1 keeps them apart from
            # those of the order of the windows, whose key is (seed, epoch)
            counter = np.array([0, 0, 1, position], dtype=np.uint64)
            words = np.random.Philox(key=key, counter=counter).random_raw(3 * length)
            candidates = np.flatnonzero(eligible[index])
            count = selected(self._probability, len(candidates))
            order = np.argsort(words[:length][candidates], kind="stable")
            chosen = np.sort(candidates[order[:count]])
            self._replace(tokens[index], chosen, words[length:].reshape(2, length))
            places.append(chosen + index * length)
        flat = np.concatenate(places)
        return tokens, flat, rows.reshape(-1)[flat]

    def _replace(self, row: np.ndarray, chosen: np.ndarray, words: np.ndarray) -> None:
        """Replace the tokens of ``row`` at ``chosen``, in place; draws belong to places."""
        uniform = (words[0, chosen] >> np.uint64(11)) * 2.0**-53
        drawn = self._ordinary[words[1, chosen] % np.uint64(len(self._ordinary))]
        changed = np.where(uniform < self._masked, self._mask, drawn)
        row[chosen] = np.where(uniform < self._changed, changed, row[chosen])
