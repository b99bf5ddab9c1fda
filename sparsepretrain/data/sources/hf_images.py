"""Labelled images that the ``datasets`` library can load; the prepared data is an index of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsepretrain.data.hub import load_rows
from sparsepretrain.data.sources._images import IndexSource, index_documents
from sparsepretrain.data.sources._source import (
    TRAIN,
    VALIDATION,
    Document,
    Shard,
    SourceOptions,
)
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from PIL.Image import Image

SHARD_ROWS = 1 << 16
"""Rows per shard; only their labels are read."""


@dataclass(slots=True, kw_only=True)
class Options(SourceOptions):
    """Options of ``source: hf_images``."""

    source: Literal["hf_images"]
    path: str
    """Hub repository or local directory; the images stay in the cache of ``datasets``."""
    subset: str | None
    """The hub's configuration name."""
    revision: str | None
    """Branch, tag or commit of the repository; null: its main branch."""
    train: str
    """Split that is trained on; slices such as train[:10%] work."""
    validation: str
    """Split that is evaluated on."""
    image_column: str
    """Column that holds the images."""
    label_column: str
    """Column that holds the labels, integers from 0."""
    size_gb: float | None
    """Disk that the download and its cache take, for messages only (10^9 bytes)."""

    about: ClassVar[frozenset[str]] = frozenset({"name", "size_gb"})


@register("source", "hf_images")
class HfImages(IndexSource):
    """Rows of two splits. Preparing downloads them; training reads them from the cache."""

    Options: ClassVar[type[SourceOptions]] = Options
    offline = False

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._rows: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the open data set, which every process opens for itself."""
        return {**self.__dict__, "_rows": {}}

    def state(self) -> list[Any]:
        """Nothing for the hub, where only the options speak; the file times of a directory."""
        path = os.path.expanduser(self.options.path)
        if not os.path.isdir(path):
            return []
        return [
            [os.path.relpath(directory, path), name, os.stat(os.path.join(directory, name)).st_size]
            for directory, _, names in sorted(os.walk(path))
            for name in sorted(names)
        ]

    def shards(self) -> list[Shard]:
        """Ranges of rows; downloads the data set if that has not happened.

        Raises:
            DataError: it cannot be had, or has no such split or column.
        """
        shards = []
        for split in (TRAIN, VALIDATION):
            rows = len(self._split(split))
            for index, begin in enumerate(range(0, rows, SHARD_ROWS)):
                end = min(begin + SHARD_ROWS, rows)
                shards.append(Shard(split, index, end - begin, (begin, end)))
        return shards

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Entries: ``split``, ``row`` and ``label``.

        Raises:
            DataError: a label is not an integer from 0.
        """
        begin, end = shard.items
        column = self.options.label_column
        labels = self._split(shard.split).select_columns([column])[begin:end][column]
        for row, label in enumerate(labels, begin):
            if not isinstance(label, int) or label < 0:
                raise DataError(
                    f"{self.options.name}: row {row} of {getattr(self.options, shard.split)} has "
                    f"label {label!r}, not an integer from 0"
                )
        return index_documents(
            [
                {"split": shard.split, "row": row, "label": label}
                for row, label in enumerate(labels, begin)
            ]
        )

    def read(self, entry: dict[str, Any]) -> Image:
        """The decoded image of a row.

        Raises:
            DataError: it does not decode, or the data set is gone from the cache.
        """
        split, row = entry["split"], entry["row"]
        rows = self._split(split)
        try:
            image: Image = rows[row][self.options.image_column]
            image.load()
            return image
        except Exception as error:  # Pillow's decoders raise whatever they raise
            where = f"row {row} of {getattr(self.options, split)}"
            why = " ".join(str(error).split())[:120]
            raise DataError(f"{self.options.name}: {where} does not decode: {why}") from error

    def missing(self) -> str:
        """The message when nothing is prepared."""
        name, size = self.options.name, self.options.size_gb
        amount = f" (needs the network, about {size:g} GB)" if size else ""
        return (
            f"{name} is not prepared: run `sparsepretrain prepare data={name}`{amount}, "
            "or train offline with data=digits"
        )

    def _split(self, split: str) -> Any:
        if split not in self._rows:
            self._rows[split] = self._load(getattr(self.options, split))
        return self._rows[split]

    def _load(self, split: str) -> Any:
        options = self.options
        rows = load_rows(options, split, instead="train offline with data=digits")
        for key in ("image_column", "label_column"):
            if getattr(options, key) not in rows.column_names:
                known = ", ".join(rows.column_names)
                column = getattr(options, key)
                raise DataError(
                    f"data.{key}: {options.name} has no column {column!r} (it has {known})"
                )
        return rows
