"""Access to prepared images."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain import registry
from sparsepretrain.data.formats import LABEL_BYTES, count
from sparsepretrain.data.preparation import OnProgress, load
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class Images(ABC):
    """Labeled images of one split."""

    def __init__(self, source: Any, data: TokenData, split: str, classes: int) -> None:
        """Open a split of ``data``, prepared from ``source``; raise DataError if unusable."""
        self._source, self._bytes, self._classes = source, data.tokens[split], classes
        self._where = f"{data.name}, {split} split"
        self.count = count(source, self._bytes, data.end_of_text)
        """Number of images."""
        if not self.count:
            raise DataError(f"{self._where}: no images")

    @abstractmethod
    def label(self, index: int) -> int:
        """Return the class of an image; raise DataError if the model lacks it."""

    @abstractmethod
    def image(self, index: int) -> Image:
        """Return an image in RGB and its own size; raise DataError if undecodable."""

    def _check(self, label: int, index: int) -> int:
        if not 0 <= label < self._classes:
            raise DataError(
                f"{self._where}: image {index} has label {label}, out of range for "
                f"model.classes={self._classes}"
            )
        return label


class _Rows(Images):
    """Rows of label and pixels, see :class:`PixelSource`."""

    def __init__(self, source: Any, data: TokenData, split: str, classes: int) -> None:
        super().__init__(source, data, split, classes)
        self._rows = self._bytes.reshape(self.count, -1)
        labels = np.ascontiguousarray(self._rows[:, :LABEL_BYTES]).view("<u2")
        self._check(int(labels.max()), int(labels.argmax()))

    def label(self, index: int) -> int:
        low, high = self._rows[index, :LABEL_BYTES]
        return int(low) + 256 * int(high)

    def image(self, index: int) -> Image:
        from PIL import Image

        pixels = np.array(self._rows[index, LABEL_BYTES:]).reshape(self._source.shape)
        gray = pixels.shape[-1] == 1
        return Image.fromarray(pixels[..., 0] if gray else pixels).convert("RGB")


class _Index(Images):
    """Index of images stored elsewhere, see :class:`IndexSource`."""

    def __init__(self, source: Any, data: TokenData, split: str, classes: int) -> None:
        super().__init__(source, data, split, classes)
        self._ends = np.flatnonzero(np.asarray(self._bytes) == 0)
        self.label(self.count - 1)  # folders come in the order of their labels

    def label(self, index: int) -> int:
        return self._check(int(self._entry(index)["label"]), index)

    def image(self, index: int) -> Image:
        image: Image = self._source.read(self._entry(index)).convert("RGB")
        return image

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
    opened = _Index if source.shape is None else _Rows
    return {s: opened(source, data, s, classes) for s in splits}, data.fingerprint
