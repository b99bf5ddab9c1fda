"""Parallel text in two files with corresponding lines."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.data.source import SPLITS, Document, Shard, Source, TokenOptions
from sparsepretrain.data.sources._files import TextFile, refuse_shared, unreadable
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

SHARD_PAIRS = 16384
"""Pairs per shard: 1 to 2 s of byte-level BPE on one core, lost by an interruption."""


@dataclass(slots=True, kw_only=True)
class Options(TokenOptions):
    """Options of ``source: parallel_files``."""

    train: tuple[str, str]
    validation: tuple[str, str] | None
    test: tuple[str, str] | None


@register("source", "parallel_files")
class ParallelFiles(Source):
    """One pair per line of both files."""

    Options: ClassVar[type[TokenOptions]] = Options
    kind = "pairs"
    offline = True
    unit = "pairs"

    def state(self) -> list[Any]:
        files = [
            (split, TextFile.at(path, os.path.basename(path), f"data.{split}"))
            for split, paths in self._files()
            for path in paths
        ]
        refuse_shared((f"data.{split}", file) for split, file in files)
        return [[split, *file.stamp] for split, file in files]

    def shards(self) -> list[Shard]:
        """Return ranges of lines; read all files once, so that bad lines fail early."""
        shards = []
        for split, paths in self._files():
            number, starts = 0, []
            for number, offsets, _ in self._pairs(split, paths, 1, (0, 0)):
                if number % SHARD_PAIRS == 1:
                    starts.append((number, offsets))
            if not number:
                raise DataError(f"data.{split}: {paths[0]} has no lines")
            for start in starts:
                size = min(SHARD_PAIRS, number + 1 - start[0])
                shards.append(Shard(split, size, start))
        return shards

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield source and target in turn; check the lines again, since files may change."""
        rows = self._pairs(shard.split, dict(self._files())[shard.split], *shard.items)
        for _, _, pair in itertools.islice(rows, shard.size):
            yield from ((side, True) for side in pair)

    def _files(self) -> list[tuple[str, list[str]]]:
        return [
            (split, [os.path.expanduser(path) for path in getattr(self.options, split)])
            for split in SPLITS
            if getattr(self.options, split) is not None
        ]

    def _pairs(
        self, split: str, paths: list[str], first: int, offsets: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[int, ...], list[str]]]:
        """Yield number, offsets and checked sides of the lines from ``first`` on."""
        files = [_read(path, first, at) for path, at in zip(paths, offsets, strict=True)]
        try:
            for number, lines in enumerate(itertools.zip_longest(*files), first):
                if None in lines:
                    longer, shorter = reversed(paths) if lines[0] is None else paths
                    has = f"{shorter} has {number - 1} lines"
                    raise DataError(f"{longer}, line {number} has no counterpart: {has}")
                both = zip(lines, paths, strict=True)
                sides = [_sentence(line, f"{path}, line {number}") for (_, line), path in both]
                yield number, tuple(line[0] for line in lines), sides
        except OSError as error:
            raise unreadable(str(error.filename), error, f"data.{split}") from error


def _read(path: str, number: int, offset: int) -> Iterator[tuple[int, str]]:
    """Yield (offset, text) of the lines from ``offset`` on; only line feeds end a line."""
    with open(path, "rb") as file:
        file.seek(offset)
        for line, raw in enumerate(file, number):
            try:
                yield offset, raw.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {line}: not UTF-8 text") from error
            offset += len(raw)


def _sentence(text: str, place: str) -> str:
    text = text.strip()
    if not text:
        raise DataError(f"{place}: empty sentence: remove the pair")
    if "\0" in text:
        raise DataError(f"{place}: contains a NUL byte, which ends a sentence")
    return text
