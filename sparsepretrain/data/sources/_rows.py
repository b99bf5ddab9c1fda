"""Rows of local JSON and Parquet files, read one at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from sparsepretrain.data.sources._compressed import BOM, is_compressed, opened
from sparsepretrain.data.sources._files import CONVERT, SHARD_BYTES, directory_hint, refuse_other
from sparsepretrain.errors import DataError, needs, reason
from sparsepretrain.files import lfs_pointer, parse_json

Row = dict[str, Any]
"""Column -> value."""

Format = Literal["json", "parquet"]
SUFFIXES: dict[str, Format] = {
    **{
        f"{kind}{compression}": "json"
        for kind in (".jsonl", ".ndjson", ".json")
        for compression in ("", ".gz", ".bz2", ".xz", ".zst")
    },
    ".parquet": "parquet",
}
"""End of a file name -> its format."""
KNOWN = ".jsonl, .ndjson, .json (plain, .gz, .bz2, .xz or .zst) or .parquet"
""":data:`SUFFIXES` in words."""

OTHERS = frozenset(
    f".{end}"
    for end in (
        *("arrow", "avro", "bz2", "csv", "feather", "gz", "h5", "hdf5", "json", "json5", "jsonl"),
        *("lz4", "lzma", "ndjson", "npy", "npz", "orc", "parquet", "pickle", "pkl", "pt"),
        *("sqlite", "tar", "text", "tgz", "tsv", "txt", "xls", "xlsx", "xml", "xz", "yaml"),
        *("yml", "z", "zip", "zst"),
    )
)
"""Suffixes that mark the name of a file; names of hub splits may contain a dot."""

BATCH = 1024
"""Rows of a Parquet file that are decoded at a time."""


def no_rows(entry: str, key: str, none: str | None, *, is_file: bool) -> str:
    """Return the problem of an entry that is no file of a known format.

    Args:
        entry: value of the configuration.
        key: its key.
        none: value that leaves the split out; None: it cannot be left out.
        is_file: True if the entry cannot be a hub split.
    """
    problem = f"{entry!r} is not a {KNOWN} file"
    if os.path.isdir(os.path.expanduser(entry)):
        return f"{entry!r} is a directory: {directory_hint(entry, '.jsonl')}"
    if is_file:
        return f"{problem}: convert it, or rename it if it is one"
    # shipped configurations name hub splits
    instead = f", or {key}={none}" if none else ""
    return f"{problem}, as those of other splits: give files for {key} too{instead}"


def names_file(entry: str) -> bool:
    """Return True for a file or glob, False for a split of the hub (train+test, train[:10%])."""
    plain = entry.partition("[")[0]
    is_pattern = any(character in entry for character in "/\\*?~")
    suffix = os.path.splitext(plain)[1].lower()
    return is_pattern or suffix in OTHERS


def suffix_of(name: str) -> str:
    """Return a suffix of the format of a file name or glob, for messages."""
    return ".parquet" if format_of(name) == "parquet" else ".jsonl"


def format_of(name: str) -> Format | None:
    """Return the format of a file name or glob, or None if it is not one of ``SUFFIXES``."""
    return next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), None)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a file. A compressed file and a JSON array are one piece."""

    path: str
    rows: int
    first: int
    """Number of the first line of JSON Lines, counted from 1; index of the first row elsewhere."""
    begin: int
    """Byte at which the lines begin; row group of a Parquet file."""
    kind: Literal["lines", "array", "parquet"]

    def read(
        self, columns: list[str] | None = None, *, wanted: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their places for messages, such as ``a.jsonl, line 7``.

        Args:
            columns: columns that are read of a Parquet file; None: all.
            wanted: True for the indices within the piece that are read; None: all.

        Raises:
            DataError: the file cannot be read, or a row is not a JSON object.
        """
        kinds = {"lines": self._lines, "array": self._array, "parquet": self._groups}
        for place, row in kinds[self.kind](columns, wanted or (lambda index: True)):
            yield f"{self.path}, {place}", row

    def _lines(self, _: Any, wanted: Callable[[int], bool]) -> Iterator[tuple[str, Row]]:
        with opened(self.path) as stream:
            stream.seek(self.begin)
            index = 0
            number = self.first
            while index < self.rows:
                line = stream.readline()
                if not line:
                    raise DataError(f"{self.path} changed while it was read: run again")
                if not _is_blank(line):
                    if wanted(index):
                        yield f"line {number}", _parse(line, f"{self.path}, line {number}")
                    index += 1
                number += 1

    def _array(self, _: Any, wanted: Callable[[int], bool]) -> Iterator[tuple[str, Row]]:
        for index, row in enumerate(_load_array(self.path)):
            if not isinstance(row, dict):
                kind = type(row).__name__
                text = f"{self.path}, row {index}: expected a JSON object, got {kind}"
                raise DataError(text)
            if wanted(index):
                yield f"row {index}", row

    def _groups(
        self, columns: list[str] | None, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[str, Row]]:
        with _parquet(self.path) as file:
            known = file.schema_arrow.names
            for column in columns or ():
                if column not in known:
                    has = ", ".join(map(repr, known))
                    raise DataError(f"{self.path}: no column {column!r} (it has {has})")
                if known.count(column) > 1:
                    number = known.count(column)
                    raise DataError(
                        f"{self.path}: {number} columns are called {column!r}: rename all but one"
                    )
            batches = file.iter_batches(BATCH, row_groups=[self.begin], columns=columns)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for index, row in enumerate(rows):
                if wanted(index):
                    yield f"row {self.first + index}", row


def cut(path: str, kind: Format) -> list[Piece]:
    """Divide a file into pieces that can be read in any order.

    JSON Lines are cut about every ``SHARD_BYTES``, Parquet between row groups. Reads a JSON file
    once, to count its lines.

    Raises:
        DataError: the file cannot be read, or pyarrow is missing for Parquet.
    """
    if kind == "parquet":
        with _parquet(path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        firsts = itertools.accumulate(sizes, initial=0)
        groups = enumerate(zip(sizes, firsts, strict=False))
        return [Piece(path, rows, first, i, "parquet") for i, (rows, first) in groups if rows]
    with opened(path) as stream:
        refuse_other(path)  # such bytes begin no JSON
        is_whole = is_compressed(path)
        start = stream.read(4096).removeprefix(BOM).lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            return [Piece(path, len(_load_array(path)), 0, 0, "array")]
        pieces = []
        number = 1
        begin = 0
        # readlines takes whole lines; a compressed file has no place to continue from
        while lines := stream.readlines(SHARD_BYTES):
            rows = len(lines) - sum(map(_is_blank, lines))
            pieces.append(Piece(path, rows, number, begin, "lines"))
            number, begin = number + len(lines), stream.tell()
    if is_whole:
        return [Piece(path, sum(piece.rows for piece in pieces), 1, 0, "lines")]
    return [piece for piece in pieces if piece.rows]


@contextlib.contextmanager
def located(place: str, row: Row) -> Iterator[None]:
    """Name the place of an unsuitable row: KeyError is a missing column, ValueError a value."""
    try:
        yield
    except KeyError as error:
        known = ", ".join(map(repr, row))
        raise DataError(f"{place}: no column {error} (it has {known})") from error
    except ValueError as error:
        raise DataError(f"{place}: {str(error)[:200]}") from error


def text(row: Row, column: str) -> str:
    """Return the text in ``column``; raise KeyError or ValueError if there is none."""
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character: "\ud83d"
        raise ValueError(f"column {column!r} is not Unicode text: {reason(error)}") from error
    return value


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(BOM).strip()


def _parse(line: bytes, place: str) -> Row:
    try:
        return parse_json(line.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text: {CONVERT}") from error
    except json.JSONDecodeError as error:  # its own line number is that within the line
        why = f"{error.msg} at character {error.pos + 1}"
        if b"\r" in line.strip():
            why += "; lines end in carriage returns (old Mac): convert them (tr '\\r' '\\n')"
        raise DataError(f"{place}: expected one JSON object per line: {why}") from error
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


def _load_array(path: str) -> list[Any]:
    with opened(path) as stream:
        try:
            value = json.loads(stream.read().removeprefix(BOM).decode())
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: expected one JSON object per line, or a JSON array of objects: "
                f"{reason(error)}"
            ) from error
    return cast(list[Any], value)


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Any]:
    """Open a Parquet file; its errors become a DataError with the path."""
    with needs(path, "pyarrow", "parquet"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    try:
        if problem := lfs_pointer(path):
            raise DataError(f"{path} {problem}")
        with ParquetFile(path) as file:
            yield file
    except (OSError, ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {reason(error)}") from error
