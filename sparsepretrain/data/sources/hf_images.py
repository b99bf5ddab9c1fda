"""Labeled images loaded by ``datasets``; the prepared data is an index of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepretrain.data.source import IndexSource, Shard, SourceOptions
from sparsepretrain.data.sources._hub import HubOptions, HubSource
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(slots=True, kw_only=True)
class Options(HubOptions, SourceOptions):
    """Options of ``source: hf_images``; the images stay in the cache of ``datasets``."""

    train: str
    validation: str
    image_column: str
    label_column: str


@register("source", "hf_images")
class HfImages(HubSource, IndexSource):
    """Rows of two splits, downloaded when prepared and read from the cache in training."""

    Options: ClassVar[type[SourceOptions]] = Options
    shard_rows = 1 << 16  # only their labels are read
    columns = ("image_column", "label_column")
    instead = "digits"

    def entries(self, shard: Shard) -> Iterator[dict[str, Any]]:
        """Yield entries with ``split``, ``row`` and ``label``, an integer from 0."""
        begin, end = shard.items
        column = self.options.label_column
        labels = self.rows(shard.split).select_columns([column])[begin:end][column]
        for row, label in enumerate(labels, begin):
            if not isinstance(label, int) or label < 0:
                raise DataError(
                    f"{self.options.name}: row {row} of {getattr(self.options, shard.split)} has "
                    f"label {label!r}, not an integer from 0"
                )
            yield {"split": shard.split, "row": row, "label": label}

    def read(self, entry: dict[str, Any]) -> Image:
        image: Image = self.rows(entry["split"])[entry["row"]][self.options.image_column]
        return image
