"""Images: small sets become rows of bytes, big ones an index of where each image lies."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepretrain.data.source import Document, Shard, Source
from sparsepretrain.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


class ImageSource(Source):
    """Base of the sources of labelled images."""

    kind = "images"
    unit = "images"


class IndexSource(ImageSource):
    """Images that stay where they are. Prepared: an index, one JSON object per image."""

    @abstractmethod
    def read(self, entry: dict[str, Any]) -> Image:
        """The image of an entry of the index, as it is stored.

        Raises:
            DataError: it is not there or does not decode.
        """


class PixelSource(ImageSource):
    """Images of one size. Prepared: label and pixels (uint8, channels last), row after row."""

    shape: ClassVar[tuple[int, int, int]]
    """(height, width, channels)."""

    @abstractmethod
    def rows(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        """Labels (rows,) and images (rows, height, width, channels), both of integers."""

    def documents(self, shard: Shard) -> Iterator[Document]:
        """All rows of a shard as one run of bytes.

        Raises:
            DataError: they cannot be read, or a label does not fit two bytes.
        """
        import numpy as np

        labels, images = self.rows(shard)
        if len(labels) and (labels.min() < 0 or labels.max() >= 1 << 16):
            raise DataError(f"labels must lie in [0, 65535], got {labels.min()} to {labels.max()}")
        first = labels.astype("<u2").view(np.uint8).reshape(len(labels), 2)
        pixels = images.astype(np.uint8).reshape(len(labels), -1)
        yield np.concatenate([first, pixels], axis=1).tobytes(), False


def index_documents(entries: Iterable[dict[str, Any]]) -> Iterator[Document]:
    """Entries of an index, one JSON object per document."""
    for entry in entries:
        yield json.dumps(entry, ensure_ascii=True, separators=(",", ":")), True


def undecodable(what: str, error: Exception) -> DataError:
    """The error of an image at ``what`` that a decoder gave up on."""
    why = " ".join(str(error).split()).replace(what, "it")[:120]
    return DataError(f"{what} does not decode: {why}")
