"""Text files: search, split by file, and reading in pieces."""

from __future__ import annotations

import glob
import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from sparsepretrain.data.source import TRAIN, VALIDATION, Document, Shard, Source
from sparsepretrain.data.sources._compressed import (
    BOM,
    CHUNK,
    irregular,
    is_compressed,
    opened,
    plain_size,
    unreadable,
)
from sparsepretrain.data.sources._magic import (
    HEAD,
    binary_kind,
    is_text_with_zeros,
    known_encoding,
)
from sparsepretrain.errors import DataError

SHARD_BYTES = 4 << 20
"""Bytes per shard: 1 to 2 s of byte-level BPE on one core, lost by an interruption."""
LONGEST_LINE = 1 << 20
"""Large files are cut at a line end, unless a line is longer than this (bytes)."""
BLANK_BYTES = 512
"""Largest size of a compressed file without text (bytes): headers, and in gzip a file name."""
CONVERT = "convert the file from its encoding, `iconv -f ENCODING -t UTF-8`"
"""Remedy for text that is not UTF-8."""


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
        if problem := irregular(stat.st_mode):
            raise DataError(f"{key}: {path} {problem}" if key else f"{path} {problem}")
        return cls(name, os.path.realpath(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a file, decompressed."""

    path: str
    begin: int
    end: int
    last: bool
    """True if the document ends here."""
    compressed: bool = False

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
    is_text: ClassVar[bool] = False
    """True if bytes that are no UTF-8 text are refused."""

    @abstractmethod
    def find(self) -> list[TextFile]:
        """Return all files in any order, duplicates and empty files included.

        Raises:
            DataError: no file, or an unreadable directory.
        """

    @cached_property
    def files(self) -> list[TextFile]:
        """Non-empty files in the order of their hashes."""
        found = (f for f in self.find() if f.size and not (self.is_text and _is_blank(f)))
        unique = {file.path: file for file in found}
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
            with opened(piece.path) as file:
                file.seek(piece.begin)
                at = piece.begin
                while at < piece.end:
                    text = file.read(min(piece.end - at, SHARD_BYTES))
                    # a compressed file is one piece, which need not fit into memory
                    text += file.readline(min(piece.end - at - len(text), LONGEST_LINE))
                    # a tokenizer would read the two parts of a character as two wrong ones
                    text += file.read(min(piece.end - at - len(text), _lacking(text)))
                    if not text:
                        raise DataError(f"{piece.path} changed while it was read: run again")
                    if self.is_text:
                        require_text(text, piece.path, at)
                    at += len(text)
                    yield (
                        text.removeprefix(BOM if at == len(text) else b""),
                        (piece.last and at == piece.end),
                    )

    def _hash(self, name: str) -> bytes:
        return hashlib.sha256(f"{self.options.seed}:{name}".encode(errors="replace")).digest()

    def _split(self) -> dict[str, list[Piece]]:
        splits = self._by_fraction(0.0 if VALIDATION in self.held_out else self.options.validation)
        named = self.held_out.items()
        return splits | {split: _whole(files, is_text=self.is_text) for split, files in named}

    def _by_fraction(self, fraction: float) -> dict[str, list[Piece]]:
        files = self.files
        budget = fraction * sum(file.size for file in files)
        if len(files) == 1 and fraction > 0:
            (whole,) = _whole(files, is_text=self.is_text)
            at = _line_end(whole.path, int(whole.size - fraction * whole.size), whole.size)
            if not 0 < at < whole.size:  # one long line
                at = max(1, int(whole.size - fraction * whole.size))
                if self.is_text:
                    at = _character_end(whole.path, at, whole.size)
            return {
                TRAIN: [replace(whole, end=at)],
                VALIDATION: [replace(whole, begin=at)] if at < whole.size else [],
            }
        held_out = []
        for file in files:
            if file.size <= budget:
                held_out.append(file)
                budget -= file.size
        if fraction > 0 and not held_out:
            held_out = [min(files, key=lambda file: file.size)]
        rest = set(files) - set(held_out)
        return {
            TRAIN: _whole((f for f in files if f in rest), is_text=self.is_text),
            VALIDATION: _whole(held_out, is_text=self.is_text),
        }


def _whole(files: Iterable[TextFile], *, is_text: bool) -> list[Piece]:
    """Return each file as one piece; text files may be compressed."""
    pieces = []
    for file in files:
        compressed = is_text and _is_compressed(file.path)
        size = plain_size(file.path) if compressed else file.size
        pieces.append(Piece(file.path, 0, size, True, compressed))
    return pieces


def _is_blank(file: TextFile) -> bool:
    """Return True if a file has no text: only a byte order mark, or nothing, compressed."""
    if file.size > BLANK_BYTES or not (file.size <= len(BOM) or _is_compressed(file.path)):
        return False
    with opened(file.path) as stream:
        return stream.read(len(BOM) + 1) in (b"", BOM)


def _is_compressed(path: str) -> bool:
    try:
        return is_compressed(path)
    except OSError as error:
        raise unreadable(path, error) from error


def require_text(text: bytes, path: str, at: int) -> None:
    """Refuse bytes that are not UTF-8 text; name the line.

    Args:
        text: bytes of a file from ``at`` on; a long line may be cut within a character.
        path: of the file.
        at: offset in the file, decompressed.
    """
    inside = _continued(text) if at else 0
    try:
        text[inside:].decode()
    except UnicodeDecodeError as error:
        wrong = inside + error.start
        what = "bytes that are not UTF-8"
        if len(text) - wrong < 4 and _goes_on(path, at + len(text)) and _is_begun(text[wrong:]):
            wrong = -1
    else:
        wrong = -1
    nul = text.find(b"\0")
    if nul >= 0 and not 0 <= wrong < nul:
        wrong = nul
        what = "a NUL byte"
    if wrong < 0:
        return
    refuse_binary(path)
    line = _lines_before(path, at + wrong) + 1
    encoding = known_encoding(_head(path))
    if encoding:
        what = encoding
        remedy = CONVERT.replace("ENCODING", encoding)
    elif what != "a NUL byte":
        remedy = CONVERT
    elif is_text_with_zeros(text):
        remedy = "remove such bytes, as `tr -d '\\000'` does"
    else:
        remedy = "convert the file to UTF-8 if it is text"
    raise DataError(
        f"{path}, line {line}: expected UTF-8 text, got {what}: {remedy}, or leave the file out"
    )


def refuse_binary(path: str) -> None:
    """Refuse a file whose first bytes are those of a kind of binary file.

    Call this for files that are no text: some texts begin with such bytes, too.
    """
    with open(path, "rb") as file:
        stored = file.read(HEAD)
    if kind := binary_kind(_head(path), stored if is_compressed(path) else b"", path):
        raise DataError(f"{path} {kind}")


def refuse_other(path: str) -> None:
    """Refuse a file that is no UTF-8 text, by its first bytes; see :func:`refuse_binary`."""
    refuse_binary(path)
    if encoding := known_encoding(_head(path)):
        remedy = CONVERT.replace("ENCODING", encoding)
        raise DataError(f"{path}: expected UTF-8 text, got {encoding}: {remedy}")


def _head(path: str) -> bytes:
    with opened(path) as file:
        return file.read(HEAD)


def _lines_before(path: str, end: int) -> int:
    """Return the number of line feeds before a byte of a file, decompressed."""
    lines = 0
    with opened(path) as file:
        while end > 0 and (chunk := file.read(min(end, CHUNK))):
            lines += chunk.count(b"\n")
            end -= len(chunk)
    return lines


def _goes_on(path: str, at: int) -> bool:
    with opened(path) as file:
        file.seek(at)
        return bool(file.read(1))


def _is_begun(end: bytes) -> bool:
    """Return True if bytes are the beginning of a character."""
    length = next((n for bits, n in ((0xF0, 4), (0xE0, 3), (0xC0, 2)) if end[0] & bits == bits), 1)
    return len(end) < length and all(byte & 0xC0 == 0x80 for byte in end[1:])


SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files that ``save_to_disk`` of ``datasets`` writes beside the ``.arrow`` files with the rows."""


def directory_hint(directory: str, suffix: str) -> str:
    """Return what to name instead of a directory of files with ``suffix``."""
    return _saved_hint(directory) or f"use {directory}/**/*{suffix}"


def _saved_hint(directory: str) -> str:
    """Return how to convert a directory of ``save_to_disk``; "" for another directory."""
    names = [name for name in SAVED if os.path.isfile(os.path.join(directory, name))]
    has_splits = SAVED[2] in names
    if not has_splits and len(names) < 2:
        return ""
    split = '["train"]' if has_splits else ""
    return (
        "save_to_disk of datasets wrote it; write Parquet by "
        f"datasets.load_from_disk({directory!r}){split}.to_parquet(FILE) and name that file"
    )


def _refuse_saved(key: str, paths: list[str]) -> None:
    """Refuse files of ``save_to_disk``, whose JSON files hold no rows."""
    for path in paths:
        directory, name = os.path.split(path)
        is_saved = name in SAVED or name.endswith(".arrow")
        if is_saved and (hint := _saved_hint(directory)):
            raise DataError(f"{key}: {path} holds no text: {hint}")


def match(key: str, pattern: str, suffix: str = ".txt") -> list[TextFile]:
    """Return the files matching ``pattern``, each once.

    Their names are relative to the part of ``pattern`` without wildcards.

    Args:
        key: configuration key of the pattern.
        pattern: file or glob.
        suffix: of the files that the source reads, for messages.
    """
    expanded = os.path.abspath(os.path.expanduser(pattern))
    # a real file name may contain [ or *
    plain = os.path.exists(expanded) and not os.path.isdir(expanded)
    paths = [expanded] if plain else sorted(glob.glob(expanded, recursive=True))
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"{key}: {path} is a link to a file that does not exist")
    paths = [path for path in paths if not os.path.isdir(path)]
    if not paths:
        hint = ""
        if os.path.isdir(expanded):
            hint = f" (a directory: {directory_hint(expanded, suffix)})"
        if "[" in pattern:
            literal = pattern.replace("[", "[[]")
            hint = f" ([ is a wildcard: for the character itself write {literal})"
        raise DataError(f"{key}: no file matches {pattern}{hint}")
    if suffix != ".arrow":  # only datasets itself reads these
        _refuse_saved(key, paths)
    fixed = expanded
    while plain or glob.has_magic(fixed):
        fixed, plain = os.path.dirname(fixed), False
    files: dict[str, TextFile] = {}
    for path in paths:
        name = os.path.relpath(path, fixed).replace(os.sep, "/")
        file = TextFile.at(path, name, key)
        files.setdefault(file.path, file)  # a link names it too, and ** may find it twice
    return list(files.values())


def refuse_shared(files: Iterable[tuple[str, TextFile]]) -> None:
    """Raise DataError if two configuration keys name the same file."""
    seen: dict[str, str] = {}
    for key, file in files:
        if (other := seen.setdefault(file.path, key)) != key:
            raise DataError(f"{key}: {file.path} is also one of {other}: name other data")


def _cut(piece: Piece) -> Iterator[Piece]:
    begin = piece.begin
    while piece.end - begin > SHARD_BYTES and not piece.compressed:
        at = _line_end(piece.path, begin + SHARD_BYTES, piece.end)
        if at == piece.end:
            break
        yield Piece(piece.path, begin, at, False)
        begin = at
    yield replace(piece, begin=begin)


def _line_end(path: str, at: int, end: int) -> int:
    """Return the offset after the first line end from ``at`` on, at most ``end``."""
    with opened(path) as file:
        file.seek(at)
        line = file.readline(LONGEST_LINE)
        return min(file.tell() + _lacking(line), end)


def _character_end(path: str, at: int, end: int) -> int:
    """Return the first offset from ``at`` on that is not within a character of UTF-8."""
    with opened(path) as file:
        file.seek(at)
        return min(at + _continued(file.read(3)), end)


def _lacking(text: bytes) -> int:
    """Return how many bytes the last character of a text in UTF-8 lacks."""
    for count, byte in enumerate(text[:-4:-1], 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character
            length = 1 + sum(byte >= first for first in (0xC0, 0xE0, 0xF0))
            return max(0, length - count)
    return 0


def _continued(text: bytes) -> int:
    """Return how many bytes at the begin of a text belong to a character that began before it."""
    most = text[:3]  # a character has four bytes at most
    return next((k for k, byte in enumerate(most) if byte & 0xC0 != 0x80), len(most))


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
