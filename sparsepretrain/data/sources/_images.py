"""Image sources: small images are stored as rows of bytes, others as an index of locations."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sparsepretrain.data.source import Document, Shard, Source
from sparsepretrain.errors import DataError, reason

if TYPE_CHECKING:
    from PIL.Image import Image


class IndexSource(Source):
    """Images left in place. Prepared data: an index with one JSON object per image."""

    kind = "images"
    unit = "images"

    @abstractmethod
    def read(self, entry: dict[str, Any]) -> Image:
        """Return the stored image of an index entry; raise DataError if missing or damaged."""


class PixelSource(Source):
    """Images of one size. Prepared data: rows of label and pixels (uint8, channels last)."""

    kind = "images"
    unit = "images"
    shape: ClassVar[tuple[int, int, int]]
    """(height, width, channels)."""

    @abstractmethod
    def rows(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        """Return integer labels (rows,) and images (rows, height, width, channels)."""

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield all rows of a shard as one byte string."""
        labels, images = self.rows(shard)
        if len(labels) and (labels.min() < 0 or labels.max() >= 1 << 16):
            raise DataError(f"labels must lie in [0, 65535], got {labels.min()} to {labels.max()}")
        first = labels.astype("<u2").view(np.uint8).reshape(len(labels), 2)
        pixels = images.astype(np.uint8).reshape(len(labels), -1)
        yield np.concatenate([first, pixels], axis=1).tobytes(), False


def index_documents(entries: Iterable[dict[str, Any]]) -> Iterator[Document]:
    """Yield one JSON object per index entry."""
    for entry in entries:
        yield json.dumps(entry, ensure_ascii=True, separators=(",", ":")), True


def undecodable(what: str, error: Exception) -> DataError:
    """Return the error for an image at ``what`` that does not decode."""
    return DataError(f"{what} does not decode: {reason(error).replace(what, 'it')}")
