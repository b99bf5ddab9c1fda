"""Access to prepared images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain import registry
from sparsepretrain.data.preparation import OnProgress, load
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class Images:
    """Labeled images of one split, found by the index of an :class:`IndexSource`."""

    def __init__(self, source: Any, data: TokenData, split: str, classes: int) -> None:
        """Open a split of ``data``, prepared from ``source``.

        Raises:
            DataError: it has no images, or the last one has a label that the model lacks.
        """
        self._source, self._bytes, self._classes = source, data.tokens[split], classes
        self._where = f"{data.name}, {split} split"
        self._ends = np.flatnonzero(np.asarray(self._bytes) == 0)
        self.count = len(self._ends)
        """Number of images."""
        if not self.count:
            raise DataError(f"{self._where}: no images")
        self.label(self.count - 1)  # folders come in the order of their labels

    def label(self, index: int) -> int:
        """Return the class of an image; raise DataError if the model lacks it."""
        label = int(self._entry(index)["label"])
        if not 0 <= label < self._classes:
            raise DataError(
                f"{self._where}: image {index} has label {label}, out of range for "
                f"model.classes={self._classes}"
            )
        return label

    def image(self, index: int) -> Image:
        """Return an image in RGB and its own size; raise DataError if undecodable."""
        return self._source.read(self._entry(index)).convert("RGB")

    def _entry(self, index: int) -> Any:
        begin = int(self._ends[index - 1]) + 1 if index else 0
        return json.loads(bytes(self._bytes[begin : self._ends[index]]))


def open_images(
    options: Any, splits: tuple[str, ...], classes: int, on_progress: OnProgress | None = None
) -> tuple[dict[str, Images], str]:
    """Open splits of a source; return them and the fingerprint of the prepared data."""
    source: Any = registry.get("source", options.source)(options)
    data = load(options, on_progress=on_progress)
    for split in splits:
        if split not in data.tokens:
            raise DataError(f"{data.name} has no {split} split")
    return {s: Images(source, data, s, classes) for s in splits}, data.fingerprint
