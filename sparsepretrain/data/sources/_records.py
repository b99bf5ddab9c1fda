"""Records from the Hugging Face hub or from local JSONL and Parquet files."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sparsepretrain.data.source import SPLITS, Document, Shard, Source, SourceOptions, ranges
from sparsepretrain.data.sources._files import TextFile, match, refuse_shared, unreadable
from sparsepretrain.data.sources._hub import load_rows
from sparsepretrain.errors import DataError, Problems, needs, reason
from sparsepretrain.files import parse_json

SHARD_ROWS = 16384
"""Rows of a hub dataset per shard."""
FILES = (".jsonl", ".json", ".parquet")
"""Suffixes of local files; other names are splits of a hub repository."""

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
        return any(entry.endswith(FILES) for entries in self.entries.values() for entry in entries)

    def problems(self) -> Problems:
        yield from SourceOptions.problems(self)
        if not self.train:
            yield "train", "must name a split or a file"
        for key, entries in self.entries.items():
            for entry in entries if self.local else []:
                if not entry.endswith(FILES):
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
            return [Shard(s, file.size, (part, file.path)) for s, part, file in self._files()]
        return [
            replace(shard, items=(part, entry, *shard.items))
            for split, entries in self.options.entries.items()
            for part, entry in enumerate(entries)
            for shard in ranges(split, len(self._open(entry)), SHARD_ROWS)
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield the records of one shard; errors name the file and the line."""
        part, entry, *rest = shard.items
        if rest:
            where = f"{self.options.path} {entry}, row "
            chosen = self._open(entry).select(range(*rest))
            rows: Iterable[tuple[int, Row]] = enumerate(chosen, rest[0])
        elif entry.endswith(".parquet"):
            where, rows = f"{entry}, row ", _parquet_rows(entry)
        else:
            where, rows = f"{entry}:", _json_rows(entry)
        for number, row in rows:
            place = f"{where}{number}"
            try:
                document = encode(self.record(row, part))
            except KeyError as error:
                known = ", ".join(map(repr, row))
                raise DataError(f"{place}: no column {error} (it has {known})") from error
            except ValueError as error:
                raise DataError(f"{place}: {str(error)[:200]}") from error
            yield document, True

    def missing(self) -> str:
        mirror = "let data.train and data.validation name files of a mirror"
        return f"{super().missing()} (needs the network), or {mirror}"

    def _files(self) -> Iterator[tuple[str, int, TextFile]]:
        for split, entries in self.options.entries.items():
            for part, entry in enumerate(entries):
                for file in match(f"data.{split}", entry):
                    yield split, part, file

    def _open(self, split: str) -> Any:
        instead = "let data.train and data.validation name local files"
        return load_rows(self.options, split, instead=instead)


def encode(record: Row) -> bytes:
    """Encode a record as a document; JSON never contains byte 0, the terminator."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def text(row: Row, column: str) -> str:
    """Return the text in ``column``; raise KeyError or ValueError if there is none."""
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not text")
    return value


def _json_rows(file: str) -> Iterator[tuple[int, Row]]:
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    problem = f"not a JSON object per line ({error})"
                    raise DataError(f"{file}:{number}: {problem}") from error
                yield number, row
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _parquet_rows(file: str) -> Iterator[tuple[int, Row]]:
    with needs(file, "pyarrow", "hf"):
        from pyarrow import ArrowException, parquet
    try:
        batches = parquet.ParquetFile(file).iter_batches()
        yield from enumerate(row for batch in batches for row in batch.to_pylist())
    except (OSError, ArrowException) as error:
        raise DataError(f"{file} cannot be read: {reason(error)}") from error
