"""Text files: search, split by file, and reading in pieces."""

from __future__ import annotations

import glob
import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparsepretrain.data.source import TRAIN, VALIDATION, Document, Shard, Source
from sparsepretrain.errors import DataError

SHARD_BYTES = 4 << 20
"""Bytes per shard: 1 to 2 s of byte-level BPE on one core, lost by an interruption."""
LONGEST_LINE = 1 << 20
"""Large files are cut at a line end, unless a line is longer than this (bytes)."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """File of the corpus; one file is one document."""

    name: str
    """Path relative to its root with forward slashes; determines the split on every machine."""
    path: str
    """Without symbolic links: a file found twice is read once."""
    size: int
    """Bytes."""
    mtime_ns: int

    @property
    def stamp(self) -> list[Any]:
        """Contribution to :meth:`Source.state`; changes with the file."""
        return [self.name, self.size, self.mtime_ns]

    @classmethod
    def at(cls, path: str, name: str, key: str = "") -> TextFile:
        """Describe the file at ``path``, given by the configuration key ``key``."""
        try:
            stat = os.stat(path)
        except OSError as error:
            raise unreadable(path, error, key) from error
        return cls(name, os.path.realpath(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a file."""

    path: str
    begin: int
    end: int
    last: bool
    """True if the document ends here."""

    @property
    def size(self) -> int:
        return self.end - self.begin


class FileSource(Source):
    """Base of sources whose documents are files, read as bytes.

    Files are ordered by a hash of (seed, relative path). Those that fit into the validation share
    of the bytes, at least one, are the validation split. Both splits keep the order, so the first
    validation windows are a fair sample. A single file is cut at a line end instead, and its last
    part is the validation split.
    """

    offline = True
    unit = "bytes"

    @abstractmethod
    def find(self) -> list[TextFile]:
        """Return all files in any order, duplicates and empty files included.

        Raises:
            DataError: no file, or an unreadable directory.
        """

    @cached_property
    def files(self) -> list[TextFile]:
        """Non-empty files in the order of their hashes."""
        unique = {file.path: file for file in self.find() if file.size}
        if not unique:
            raise DataError(f"{self.options.name}: all files are empty")
        return sorted(unique.values(), key=lambda file: (self._hash(file.name), file.path))

    @cached_property
    def held_out(self) -> dict[str, list[TextFile]]:
        """Files of the splits named in the options, disjoint from those of :meth:`find`."""
        return {}

    def state(self) -> list[Any]:
        named = [[split, *f.stamp] for split, files in self.held_out.items() for f in files]
        return [file.stamp for file in self.files] + named

    def shards(self) -> list[Shard]:
        """Return shards of about ``SHARD_BYTES``; the pieces of a file stay in order."""
        return [
            shard
            for split, pieces in self._split().items()
            for shard in _pack(split, (part for piece in pieces for part in _cut(piece)))
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        for piece in shard.items:
            try:
                with open(piece.path, "rb") as file:
                    file.seek(piece.begin)
                    text = file.read(piece.size)
            except OSError as error:
                raise unreadable(piece.path, error) from error
            if len(text) != piece.size:
                raise DataError(f"{piece.path} changed while it was read: run again")
            yield text, piece.last

    def _hash(self, name: str) -> bytes:
        return hashlib.sha256(f"{self.options.seed}:{name}".encode(errors="replace")).digest()

    def _split(self) -> dict[str, list[Piece]]:
        splits = self._by_fraction(0.0 if VALIDATION in self.held_out else self.options.validation)
        return splits | {split: _whole(files) for split, files in self.held_out.items()}

    def _by_fraction(self, fraction: float) -> dict[str, list[Piece]]:
        files = self.files
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
        held_out = []
        for file in files:
            if file.size <= budget:
                held_out.append(file)
                budget -= file.size
        if fraction > 0 and not held_out:
            held_out = [min(files, key=lambda file: file.size)]
        rest = set(files) - set(held_out)
        return {TRAIN: _whole(f for f in files if f in rest), VALIDATION: _whole(held_out)}


def _whole(files: Iterable[TextFile]) -> list[Piece]:
    return [Piece(file.path, 0, file.size, True) for file in files]


def match(key: str, pattern: str) -> list[TextFile]:
    """Return the files matching ``pattern``, named relative to its part without wildcards."""
    expanded = os.path.abspath(os.path.expanduser(pattern))
    plain = os.path.isfile(expanded)  # a real file name may contain [ or *
    paths = [expanded] if plain else sorted(glob.glob(expanded, recursive=True))
    paths = [path for path in paths if os.path.isfile(path)]
    if not paths:
        hint = f" (a directory: use {pattern}/**/*.txt)" if os.path.isdir(expanded) else ""
        raise DataError(f"{key}: no file matches {pattern}{hint}")
    fixed = expanded
    while plain or glob.has_magic(fixed):
        fixed, plain = os.path.dirname(fixed), False
    names = (os.path.relpath(path, fixed).replace(os.sep, "/") for path in paths)
    return [TextFile.at(path, name) for path, name in zip(paths, names, strict=True)]


def refuse_shared(files: Iterable[tuple[str, TextFile]]) -> None:
    """Raise DataError if two configuration keys name the same file."""
    seen: dict[str, str] = {}
    for key, file in files:
        if (other := seen.setdefault(file.path, key)) != key:
            raise DataError(f"{key}: {file.path} is also one of {other}")


def unreadable(path: str, error: OSError, key: str = "") -> DataError:
    """Return the error for an unreadable file, given by the configuration key ``key``."""
    where = f"{key}: " if key else ""
    return DataError(f"{where}cannot read {path}: {error.strerror or error}")


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
    """Return the offset after the first line end from ``at`` on, at most ``end``."""
    try:
        with open(path, "rb") as file:
            file.seek(at)
            file.readline(LONGEST_LINE)
            return min(file.tell(), end)
    except OSError as error:
        raise unreadable(path, error) from error


def _pack(split: str, pieces: Iterator[Piece]) -> list[Shard]:
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not groups or piece.size > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(piece)
        room -= piece.size
    return [Shard(split, sum(piece.size for piece in group), tuple(group)) for group in groups]
