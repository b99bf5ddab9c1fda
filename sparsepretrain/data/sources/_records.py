"""Records from the Hugging Face hub or from local JSONL and Parquet files."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sparsepretrain.data.source import SPLITS, TRAIN, Document, Shard, Source, SourceOptions, ranges
from sparsepretrain.data.sources._files import TextFile, match, refuse_shared
from sparsepretrain.data.sources._hub import load_rows
from sparsepretrain.data.sources._rows import (
    Piece,
    Row,
    cut,
    format_of,
    located,
    names_file,
    no_rows,
    suffix_of,
    text,
)
from sparsepretrain.errors import DataError, Problems

SHARD_ROWS = 16384
"""Rows of a hub split per shard."""


@dataclass(slots=True, kw_only=True)
class RecordOptions(SourceOptions):
    """Keys of every source of records."""

    path: str | None
    subset: str | None
    revision: str | None
    train: list[str]
    validation: list[str]
    test: list[str]

    @property
    def entries(self) -> dict[str, list[str]]:
        """Split -> its files or hub splits."""
        return {split: getattr(self, split) for split in SPLITS}

    @property
    def local(self) -> bool:
        """True if the entries are files."""
        return any(format_of(entry) for entries in self.entries.values() for entry in entries)

    def problems(self) -> Problems:
        yield from SourceOptions.problems(self)
        if not self.train:
            yield "train", "must name a split or a file"
        is_known = True
        for key, entries in self.entries.items():
            for entry in entries:
                is_file = names_file(entry) or not self.path
                if format_of(entry) is None and (self.local or is_file):
                    none = None if key == TRAIN else "[]"
                    yield key, no_rows(entry, f"data.{key}", none, is_file=is_file)
                    is_known = False
        if is_known and not self.local and not self.path:
            yield "path", "must be a hub repository, or let data.train name files"


class RecordSource(Source):
    """Base of sources whose documents are records, one JSON object each."""

    unit = "records"

    @property
    def offline(self) -> bool:  # type: ignore[override]
        return bool(self.options.local)

    @abstractmethod
    def record(self, row: Row, part: int) -> Row:
        """Convert a row (column -> value) of entry ``part`` of its split to a record.

        Raises:
            ValueError: unsuitable row.
            KeyError: missing column.
        """

    def state(self) -> list[Any]:
        if not self.options.local:
            return []
        files = list(self._files())
        refuse_shared((f"data.{split}", file) for split, _, file in files)
        return [[split, part, *file.stamp] for split, part, file in files]

    def shards(self) -> list[Shard]:
        if self.options.local:
            return [
                Shard(split, piece.rows, (part, piece))
                for split, part, file in self._files()
                # of the configured entry: a file that it links to may have another suffix
                for piece in cut(file.path, format_of(self.options.entries[split][part]) or "json")
            ]
        instead = "let data.train and data.validation name local files"
        return [
            replace(shard, items=(part, _HubPiece(entry, rows, *shard.items)))
            for split, entries in self.options.entries.items()
            for part, entry in enumerate(entries)
            for rows in [load_rows(self.options, entry, instead=instead)]
            for shard in ranges(split, len(rows), SHARD_ROWS)
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield the records of one shard; errors name the file or the split, and the row."""
        part, piece = shard.items
        assert isinstance(piece, Piece | _HubPiece)
        for place, row in piece.read():
            with located(place, row):
                document = encode(self.record(row, part))
            yield document, True

    def _files(self) -> Iterator[tuple[str, int, TextFile]]:
        for split, entries in self.options.entries.items():
            parts: dict[str, int] = {}
            for part, entry in enumerate(entries):
                for file in match(f"data.{split}", entry, suffix_of(entry)):
                    before = parts.setdefault(file.path, part)
                    if before == part:
                        yield split, part, file
                    elif split != TRAIN:  # training reads it once
                        raise DataError(
                            f"data.{split}: {file.path} is in entries {before + 1} and {part + 1}, "
                            "which metrics tell apart: name other data"
                        )


@dataclass(frozen=True, slots=True)
class _HubPiece:
    """Rows ``begin`` to ``end`` of a hub split."""

    split: str
    dataset: Any
    begin: int
    end: int

    def read(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their places; see :meth:`Piece.read`."""
        for number, row in enumerate(self.dataset.select(range(self.begin, self.end)), self.begin):
            yield f"{self.split}, row {number}", row


def whole_text(row: Row, column: str) -> str:
    """Return the text in ``column``; refuse the character that separates texts read as bytes."""
    found = text(row, column)
    if "\0" in found:
        raise ValueError(f"column {column!r} has a NUL character, which ends a text: remove it")
    return found


def encode(record: Row) -> bytes:
    """Encode a record as a document; JSON never contains byte 0, the terminator."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
