"""Records from the Hugging Face hub or from local JSONL and Parquet files."""

from __future__ import annotations

import glob
import json
import os
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsepretrain.data.source import SPLITS, TRAIN, Document, Shard, Source, SourceOptions, ranges
from sparsepretrain.data.sources._files import TextFile, match, refuse_shared
from sparsepretrain.data.sources._hub import load_rows
from sparsepretrain.errors import DataError, Problems

SHARD_ROWS = 16384
"""Rows per shard."""
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Suffix of local files -> format of ``datasets``; other names are splits of a hub repository."""

Row = dict[str, Any]


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
        return any(
            Path(entry).suffix in FILES for entries in self.entries.values() for entry in entries
        )

    def problems(self) -> Problems:
        yield from SourceOptions.problems(self)
        if not self.train:
            yield "train", "must name a split or a file"
        for key, entries in self.entries.items():
            for entry in entries if self.local else []:
                if Path(entry).suffix not in FILES:
                    # shipped configurations name hub splits
                    hint = f"; give files for data.{key} too, or data.{key}=[]"
                    yield key, f"{entry!r} is not a {', '.join(FILES)} file{hint}"
        if not self.local and not self.path:
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
            entries = [(split, part, file.path) for split, part, file in self._files()]
        else:
            named = self.options.entries.items()
            entries = [(split, *each) for split, names in named for each in enumerate(names)]
        opened = (
            (split, part, entry, self._open(split, part, entry)) for split, part, entry in entries
        )
        return [
            replace(shard, items=(part, entry, rows.select(range(*shard.items)), shard.items[0]))
            for split, part, entry, rows in opened
            for shard in ranges(split, len(rows), SHARD_ROWS)
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield the records of one shard; errors name the file or the split, and the row."""
        part, entry, rows, begin = shard.items
        for number, row in enumerate(rows, begin):
            place = f"{entry}, row {number}"
            try:
                document = encode(self.record(row, part))
            except KeyError as error:
                known = ", ".join(map(repr, row))
                raise DataError(f"{place}: no column {error} (it has {known})") from error
            except ValueError as error:
                raise DataError(f"{place}: {str(error)[:200]}") from error
            yield document, True

    def _files(self) -> Iterator[tuple[str, int, TextFile]]:
        for split, entries in self.options.entries.items():
            for part, entry in enumerate(entries):
                for file in match(f"data.{split}", entry):
                    yield split, part, file

    def _open(self, split: str, part: int, entry: str) -> Any:
        """Return the rows of a file or of a hub split."""
        instead = "let data.train and data.validation name local files"
        options, name, files, more = self.options, entry, {}, {}
        if options.local:
            name, files = TRAIN, {TRAIN: [glob.escape(entry)]}  # `datasets` takes entries for globs
            # of the configured entry: a file that it links to may have another suffix
            kind = FILES[Path(options.entries[split][part]).suffix]
            options = replace(options, path=kind, subset=None, revision=None)
            # JSON in one chunk: a later one must have the keys of the first
            more = {"chunksize": max(1, os.path.getsize(entry))} if kind == "json" else {}
        return load_rows(options, name, instead=instead, data_files=files, **more)


def encode(record: Row) -> bytes:
    """Encode a record as a document; JSON never contains byte 0, the terminator."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def text(row: Row, column: str) -> str:
    """Return the text in ``column``; raise KeyError or ValueError if there is none."""
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not text")
    return value
