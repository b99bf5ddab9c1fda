"""Parallel text of the user: two plain-text files whose lines correspond, or a TSV."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from sparsepretrain.data.source import (
    SPLITS,
    Document,
    Shard,
    Source,
    SourceOptions,
    TokenOptions,
)
from sparsepretrain.data.sources._files import TextFile, refuse_shared, unreadable
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

SHARD_PAIRS = 16384
"""Pairs per shard: 1 to 2 s of byte-level BPE on one core, which is what an interruption costs."""


class Start(NamedTuple):
    """Where a shard begins."""

    line: int
    """Number of the line, from 1."""
    offsets: tuple[int, ...]
    """Bytes before that line in each file."""


Row = tuple[int, tuple[int, ...], tuple[str, str]]
"""Number of a line, its offsets, and the pair."""


@dataclass(slots=True, kw_only=True)
class Options(TokenOptions):
    """Options of ``source: parallel_files``."""

    train: list[str]
    """[source file, target file] with corresponding lines, or [TSV file]."""
    validation: list[str] | None
    """The same for the validation split; null: none, then eval.batches must be 0."""
    test: list[str] | None
    """The same for the test split; null: none."""
    columns: tuple[int, int]
    """Columns of source and target in a TSV, from 0."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from TokenOptions.problems(self)
        for split in SPLITS:
            files = getattr(self, split)
            if files is not None and len(files) not in (1, 2):
                yield split, "must be [source file, target file] or [TSV file]"
        if min(self.columns) < 0 or self.columns[0] == self.columns[1]:
            yield "columns", f"must be two different columns, from 0, got {list(self.columns)}"


@register("source", "parallel_files")
class ParallelFiles(Source):
    """A pair is a line of both files, or a line of the TSV."""

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "pairs"
    offline = True
    unit = "pairs"

    def state(self) -> list[Any]:
        """Split, size and modification time of every file; none is one of two splits."""
        files = [
            (split, TextFile.at(path, os.path.basename(path), f"data.{split}"))
            for split, paths in self._files()
            for path in paths
        ]
        refuse_shared((f"data.{split}", file) for split, file in files)
        return [[split, file.name, file.size, file.mtime_ns] for split, file in files]

    def shards(self) -> list[Shard]:
        """Ranges of lines; reads everything once, so that a bad line stops it at the start."""
        shards = []
        for split, paths in self._files():
            starts, line = [], 0
            for line, offsets, _ in self._pairs(split, paths, Start(1, (0,) * len(paths))):
                if line % SHARD_PAIRS == 1:
                    starts.append(Start(line, offsets))
            if not line:
                raise DataError(f"data.{split}: {paths[0]} has no lines")
            for index, start in enumerate(starts):
                size = min(SHARD_PAIRS, line + 1 - start.line)
                shards.append(Shard(split, index, size, (start,)))
        return shards

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Source and target of a range of lines, in turn; they may have changed since."""
        rows = self._pairs(shard.split, dict(self._files())[shard.split], shard.items[0])
        for _, _, pair in itertools.islice(rows, shard.size):
            yield from ((side, True) for side in pair)

    def _files(self) -> list[tuple[str, list[str]]]:
        """Split -> files, for the splits that there are."""
        return [
            (split, [os.path.expanduser(path) for path in getattr(self.options, split)])
            for split in SPLITS
            if getattr(self.options, split) is not None
        ]

    def _pairs(self, split: str, paths: list[str], start: Start) -> Iterator[Row]:
        """Checked pairs from ``start`` on."""
        try:
            if len(paths) == 1:
                yield from self._columns(paths[0], start)
            else:
                yield from _lines(paths[0], paths[1], start)
        except OSError as error:
            raise unreadable(str(error.filename), error, f"data.{split}") from error

    def _columns(self, path: str, start: Start) -> Iterator[Row]:
        first, second = self.options.columns
        for number, offset, line in _read(path, start.line, start.offsets[0]):
            row = line.split("\t")
            if max(first, second) >= len(row):
                raise DataError(
                    f"{path}, line {number}: no column {max(first, second)} (columns count from 0, "
                    f"the line has {len(row)}): see data.columns"
                )
            pair = (
                _sentence(row[first], path, number, f" in column {first}"),
                _sentence(row[second], path, number, f" in column {second}"),
            )
            yield number, (offset,), pair


def _lines(source: str, target: str, start: Start) -> Iterator[Row]:
    left = _read(source, start.line, start.offsets[0])
    right = _read(target, start.line, start.offsets[1])
    for one, other in itertools.zip_longest(left, right):
        if one is None or other is None:
            longer, shorter = (source, target) if other is None else (target, source)
            number = (one or other)[0]
            raise DataError(
                f"{longer}, line {number} has no counterpart: {shorter} has {number - 1} lines"
            )
        number = one[0]
        pair = _sentence(one[2], source, number), _sentence(other[2], target, number)
        yield number, (one[1], other[1]), pair


def _read(path: str, number: int, offset: int) -> Iterator[tuple[int, int, str]]:
    """(number, offset, text) of the lines from ``offset`` on; only line feeds end a line."""
    with open(path, "rb") as file:
        file.seek(offset)
        for line, raw in enumerate(file, number):
            try:
                yield line, offset, raw.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {line}: not UTF-8 text") from error
            offset += len(raw)


def _sentence(text: str, path: str, number: int, where: str = "") -> str:
    text = text.strip()
    if not text:
        raise DataError(f"{path}, line {number}: empty sentence{where}: remove the pair")
    if "\0" in text:
        raise DataError(f"{path}, line {number}: contains a NUL byte, which ends a sentence")
    return text
