"""Text that lies in files: listing, splitting by file, reading in pieces."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparsepretrain.data.sources._source import TRAIN, VALIDATION, Document, Shard, Source
from sparsepretrain.errors import DataError

SHARD_BYTES = 4 << 20
"""Text per shard: 1 to 2 s of byte-level BPE on one core, which is what an interruption costs."""
LONGEST_LINE = 1 << 20
"""Large files are cut at the end of a line, unless the line is longer than this (bytes)."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of the corpus; one file is one document."""

    name: str
    """Path relative to its root with forward slashes: decides the split on every machine."""
    path: str
    size: int
    """Bytes."""
    mtime_ns: int
    identity: tuple[int, int]
    """Device and inode: a file reached in two ways is read once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a file."""

    path: str
    begin: int
    end: int
    last: bool
    """Whether the document ends here."""


class FileSource(Source):
    """A source whose documents are files, read as bytes.

    The split is by file: files are ordered by a hash of (seed, relative path) and go to the
    validation split while they fit into its share of the bytes (at least one does). Both splits
    keep that order, so that the first windows of the validation split are a fair sample. A corpus
    of a single file is cut at a line end instead: its last part is the validation split.
    """

    offline = True
    unit = "bytes"

    @abstractmethod
    def find(self) -> list[TextFile]:
        """All files, in any order, duplicates and empty ones included.

        Raises:
            DataError: nothing is there or a directory cannot be read.
        """

    @cached_property
    def files(self) -> list[TextFile]:
        """Non-empty files in the order of their hashes."""
        unique = {file.identity: file for file in self.find() if file.size > 0}
        if not unique:
            raise DataError(f"{self.options.name}: all files are empty")
        return sorted(unique.values(), key=lambda file: (self._hash(file.name), file.path))

    def held_out(self) -> dict[str, list[TextFile]]:
        """Files of the splits that the options name; they are no part of :meth:`find`'s.

        Raises:
            DataError: nothing is there.
        """
        return {}

    def state(self) -> list[Any]:
        """Name, size and modification time of every file."""
        named = [
            [split, file.name, file.size, file.mtime_ns]
            for split, files in self.held_out().items()
            for file in files
        ]
        return [[file.name, file.size, file.mtime_ns] for file in self.files] + named

    def shards(self) -> list[Shard]:
        """Shards of about ``SHARD_BYTES``; the pieces of a file stay in order."""
        return [
            shard
            for split, pieces in self._split().items()
            for shard in _pack(split, (part for piece in pieces for part in _cut(piece)))
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Read the pieces of ``shard``.

        Raises:
            DataError: a file cannot be read or has become shorter.
        """
        for piece in shard.items:
            try:
                with open(piece.path, "rb") as file:
                    file.seek(piece.begin)
                    text = file.read(piece.end - piece.begin)
            except OSError as error:
                raise _unreadable(piece.path, error) from error
            if len(text) != piece.end - piece.begin:
                raise DataError(f"{piece.path} changed while it was read: run again")
            yield text, piece.last

    def _hash(self, name: str) -> bytes:
        return hashlib.sha256(f"{self.options.seed}:{name}".encode(errors="replace")).digest()

    def _split(self) -> dict[str, list[Piece]]:
        files, named = self.files, self.held_out()
        fraction = 0.0 if VALIDATION in named else self.options.validation
        pieces = self._by_fraction(files, fraction)
        for split, held in named.items():
            pieces[split] = [Piece(file.path, 0, file.size, True) for file in held]
        return pieces

    @staticmethod
    def _by_fraction(files: list[TextFile], fraction: float) -> dict[str, list[Piece]]:
        budget = fraction * sum(file.size for file in files)
        if len(files) == 1 and fraction > 0:
            whole = files[0]
            at = _line_end(whole.path, int(whole.size - budget), whole.size)
            if not 0 < at < whole.size:  # one long line
                at = max(1, int(whole.size - budget))
            return {
                TRAIN: [Piece(whole.path, 0, at, True)],
                VALIDATION: [Piece(whole.path, at, whole.size, True)] if at < whole.size else [],
            }
        held_out = set()
        for file in files:
            if file.size <= budget:
                held_out.add(file)
                budget -= file.size
        if fraction > 0 and not held_out:
            held_out = {min(files, key=lambda file: file.size)}
        split: dict[str, list[Piece]] = {TRAIN: [], VALIDATION: []}
        for file in files:
            where = VALIDATION if file in held_out else TRAIN
            split[where].append(Piece(file.path, 0, file.size, True))
        return split


def refuse_shared(files: Iterable[tuple[str, str, tuple[int, int]]]) -> None:
    """Refuse a file that two splits have.

    Args:
        files: key of the configuration, path, (device, inode).

    Raises:
        DataError: names both keys.
    """
    seen: dict[tuple[int, int], str] = {}
    for key, path, identity in files:
        if (other := seen.setdefault(identity, key)) != key:
            raise DataError(f"{key}: {path} is also one of {other}")


def _cut(piece: Piece) -> Iterator[Piece]:
    begin = piece.begin
    while piece.end - begin > SHARD_BYTES:
        at = _line_end(piece.path, begin + SHARD_BYTES, piece.end)
        if at == piece.end:
            break
        yield Piece(piece.path, begin, at, False)
        begin = at
    yield Piece(piece.path, begin, piece.end, piece.last)


def _line_end(path: str, at: int, end: int) -> int:
    """Offset after the first line end from ``at`` on, at most ``end``."""
    try:
        with open(path, "rb") as file:
            file.seek(at)
            file.readline(LONGEST_LINE)
            return min(file.tell(), end)
    except OSError as error:
        raise _unreadable(path, error) from error


def _pack(split: str, pieces: Iterator[Piece]) -> list[Shard]:
    shards: list[Shard] = []
    items: list[Piece] = []
    size = 0

    def close() -> None:
        shards.append(Shard(split, len(shards), size, tuple(items)))

    for piece in pieces:
        if items and size + piece.end - piece.begin > SHARD_BYTES:
            close()
            items, size = [], 0
        items.append(piece)
        size += piece.end - piece.begin
    if items:
        close()
    return shards


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror or error}")
