"""Image sources: images stay where they are; the prepared data is an index of them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparsepretrain.data.source import Document, Source
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


def index_documents(entries: Iterable[dict[str, Any]]) -> Iterator[Document]:
    """Yield one JSON object per index entry."""
    for entry in entries:
        yield json.dumps(entry, ensure_ascii=True, separators=(",", ":")), True


def undecodable(what: str, error: Exception) -> DataError:
    """Return the error for an image at ``what`` that does not decode."""
    return DataError(f"{what} does not decode: {reason(error).replace(what, 'it')}")
