"""Handwritten digits shipped with scikit-learn: 1,797 images of 8×8 pixels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from sparsepretrain.data.order import permutation
from sparsepretrain.data.source import TEST, TRAIN, VALIDATION, IndexSource, Shard, SourceOptions
from sparsepretrain.errors import Problems, needs
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from PIL.Image import Image

SMALLEST_CLASS = 174
"""Images of the rarest digit (8)."""


@dataclass(slots=True, kw_only=True)
class Options(SourceOptions):
    """Options of ``source: digits``."""

    validation: Annotated[int, "≥ 1"]
    test: Annotated[int, "≥ 1"]
    seed: Annotated[int, "[0, 2^32)"]

    def problems(self) -> Problems:
        yield from SourceOptions.problems(self)
        if self.validation + self.test >= SMALLEST_CLASS:
            yield "test", f"and validation must sum to less than {SMALLEST_CLASS} images per digit"


@register("source", "digits")
class Digits(IndexSource):
    """Gray images; held-out splits have equally many of each digit."""

    Options: ClassVar[type[SourceOptions]] = Options
    offline = True

    def state(self) -> list[Any]:
        """Return the version of the index: the images have not changed since 1998."""
        return [2]

    def shards(self) -> list[Shard]:
        labels = _load()[0]
        order = permutation(self.options.seed, 0, len(labels))
        ends = np.cumsum([self.options.validation, self.options.test])
        parts: dict[str, list[int]] = {TRAIN: [], VALIDATION: [], TEST: []}
        for digit in range(10):
            held_out, tested, rest = np.split(order[labels[order] == digit], ends)
            for split, chosen in ((VALIDATION, held_out), (TEST, tested), (TRAIN, rest)):
                parts[split] += chosen.tolist()
        return [Shard(split, len(ids), tuple(sorted(ids))) for split, ids in parts.items()]

    def entries(self, shard: Shard) -> Iterator[dict[str, Any]]:
        """Yield entries with ``image``, the number in ``load_digits``, and ``label``."""
        labels = _load()[0]
        return ({"image": i, "label": int(labels[i])} for i in shard.items)

    def read(self, entry: dict[str, Any]) -> Image:
        """Return an image; the 17 shades 0 to 16 are scaled to 0 to 255."""
        from PIL import Image

        shades = _load()[1][entry["image"]]
        return Image.fromarray(np.rint(shades * (255 / 16)).astype(np.uint8))


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    with needs("digits", "scikit-learn", "vision"):
        from sklearn.datasets import load_digits
    digits: Any = load_digits()
    return digits.target, digits.images
