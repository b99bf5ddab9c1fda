"""scikit-learn's digits: 1,797 handwritten digits of 8×8 pixels, shipped with the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from sparsepretrain.data.sources._images import PixelSource
from sparsepretrain.data.sources._source import TRAIN, VALIDATION, Shard, SourceOptions
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

SMALLEST_CLASS = 174
"""Images of the rarest digit (8)."""


@dataclass(slots=True, kw_only=True)
class Options(SourceOptions):
    """Options of ``source: digits``."""

    source: Literal["digits"]
    held_out: int
    """Images of each digit that are held out for validation."""
    seed: int
    """Decides which ones."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from SourceOptions.problems(self)
        if not 0 < self.held_out < SMALLEST_CLASS:
            yield "held_out", f"must lie in [1, {SMALLEST_CLASS - 1}], got {self.held_out}"
        if not 0 <= self.seed < 2**32:
            yield "seed", f"must lie in [0, 2^32), got {self.seed}"


@register("source", "digits")
class Digits(PixelSource):
    """The images, in grey; the held-out ones are the same number of every digit."""

    Options: ClassVar[type[SourceOptions]] = Options
    offline = True
    shape = (8, 8, 1)

    def state(self) -> list[Any]:
        """Nothing: the images are part of a package, and have not changed since 1998."""
        return []

    def shards(self) -> list[Shard]:
        """One per split.

        Raises:
            DataError: scikit-learn is not installed.
        """
        labels = _load()[0]
        words = np.random.Philox(key=np.array([self.options.seed, 0], dtype=np.uint64))
        order = np.argsort(words.random_raw(len(labels)), kind="stable")
        held_out = np.zeros(len(labels), dtype=bool)
        for digit in range(10):
            held_out[order[labels[order] == digit][: self.options.held_out]] = True
        return [
            Shard(split, 0, int(chosen.sum()), tuple(np.flatnonzero(chosen).tolist()))
            for split, chosen in ((TRAIN, ~held_out), (VALIDATION, held_out))
        ]

    def rows(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        """Labels and images; the 17 shades from 0 to 16 become 0 to 255."""
        labels, images = _load()
        chosen = np.array(shard.items)
        return labels[chosen], np.rint(images[chosen] * (255 / 16))


def _load() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "digits needs the package scikit-learn: pip install 'sparsepretrain[vision]'"
        ) from error
    digits: Any = load_digits()
    return digits.target, digits.images
