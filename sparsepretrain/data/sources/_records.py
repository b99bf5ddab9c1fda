"""Records of the Hugging Face hub or of local files: JSONL and Parquet with the same columns."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sparsepretrain.data.source import SPLITS, Document, Shard, Source, SourceOptions, ranges
from sparsepretrain.data.sources._files import TextFile, match, refuse_shared, unreadable
from sparsepretrain.data.sources._hub import load_rows
from sparsepretrain.errors import DataError, needs
from sparsepretrain.limits import Problems

SHARD_ROWS = 16384
"""Rows of a hub data set per shard."""
FILES = (".jsonl", ".json", ".parquet")
"""Endings that tell a local file from a split of a hub repository."""

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
        """Split -> what it is read from."""
        return {split: getattr(self, split) for split in SPLITS}

    @property
    def local(self) -> bool:
        """Whether the entries are files."""
        return any(entry.endswith(FILES) for entries in self.entries.values() for entry in entries)

    def problems(self) -> Problems:
        yield from SourceOptions.problems(self)
        if not self.train:
            yield "train", "must name a split or a file"
        for key, entries in self.entries.items():
            for entry in entries if self.local else []:
                if not entry.endswith(FILES):
                    # the other splits of a shipped file are the hub's
                    hint = f"; give files for data.{key} too, or data.{key}=[]"
                    yield key, f"{entry!r} is no {', '.join(FILES)} file{hint}"
        if not self.local and not self.path:
            yield "path", "must be a hub repository, or let data.train name files"


class RecordSource(Source):
    """Documents are records: one JSON object each, in the form that the tasks read.

    A row that is not as it must be is refused with its file and line.
    """

    kind = "records"
    holds: ClassVar[str]
    """What a record is, in words: a task wants one kind of them."""
    unit = "records"

    @property
    def offline(self) -> bool:  # type: ignore[override]
        return bool(self.options.local)

    @abstractmethod
    def record(self, row: Row, part: int) -> Row:
        """The record of a row, column -> value, from entry ``part`` of its split.

        Raises:
            ValueError: what is wrong with the row; a KeyError names a missing column.
        """

    def state(self) -> list[Any]:
        if not self.options.local:
            return []
        files = list(self._files())
        refuse_shared((f"data.{split}", file) for split, _, file in files)
        return [[split, part, *file.stamp] for split, part, file in files]

    def shards(self) -> list[Shard]:
        if self.options.local:
            files = self._files()
            return self.numbered(
                Shard(split, 0, f.size, (part, f.path)) for split, part, f in files
            )
        return self.numbered(
            replace(shard, items=(part, entry, *shard.items))
            for split, entries in self.options.entries.items()
            for part, entry in enumerate(entries)
            for shard in ranges(split, len(self._open(entry)), SHARD_ROWS)
        )

    def documents(self, shard: Shard) -> Iterator[Document]:
        """The records of one shard; the error of an unsuitable row names the file and the line."""
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
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                raise DataError(f"{place}: {half} is half a character: repair the text") from error
            except (ValueError, OverflowError, RecursionError) as error:
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
    """A record as a document; JSON never contains byte 0, which ends it."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def text(row: Row, column: str) -> str:
    """The text in ``column``.

    Raises:
        KeyError: there is no such column.
        ValueError: it holds something else.
    """
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
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    problem = f"not a JSON object per line ({error})"
                    raise DataError(f"{file}:{number}: {problem}") from error
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise DataError(f"{file}:{number}: must be a JSON object, got {kind}")
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
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{file} cannot be read: {why}") from error
