"""Text of the hub, loaded by ``datasets``, or of local files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np

from sparsepretrain.data.source import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    Document,
    Shard,
    TextOptions,
)
from sparsepretrain.data.sources._files import TextFile, match, refuse_shared
from sparsepretrain.data.sources._hub import SUFFIXES, HubOptions, HubSource
from sparsepretrain.data.sources._rows import Format, Piece, Row, cut, format_of, located, text
from sparsepretrain.errors import DataError, Problems
from sparsepretrain.registry import register

READ = ("json", "parquet")
"""Paths that are file formats read without ``datasets``."""
LOADERS = (*READ, "text", "csv", "arrow")
"""Paths that are file formats, not repositories."""


@dataclass(slots=True, kw_only=True)
class Options(HubOptions, TextOptions):
    """Options of ``source: hf_text``; ``path`` may be a file format, with ``data_files``.

    With a repository or directory ``data_files`` are files in it, instead of all of them.
    """

    split: str
    validation: float | str  # type: ignore[assignment]
    test: str | None
    data_files: list[str] | dict[str, list[str]] | None
    text_column: str
    rows: Literal["documents", "lines"]

    @property
    def train(self) -> str:
        """The split to read, under the key of other sources."""
        return self.split

    def problems(self) -> Problems:
        yield from TextOptions.problems(self)
        if self.path in LOADERS and not self.data_files:
            yield "data_files", f"must name local files for data.path={self.path}"
        if self.data_files == [] or self.data_files == {}:
            yield "data_files", "must name at least one file, or be null"
        files = self.data_files or []
        entries = files if isinstance(files, list) else [e for each in files.values() for e in each]
        for entry in entries if self.path in READ else ():
            if (found := format_of(entry)) and found != self.path:
                yield "path", f"is {self.path}, and {entry!r} is {found}: data.path={found}"
                break
        if self.rows == "lines" and self.validation != 0 and isinstance(self.validation, float):
            yield "validation", "must be 0 or name a split where data.rows=lines"


@register("source", "hf_text")
class HfText(HubSource):
    """Rows are documents, or the lines of one document per split.

    The validation split is part of the dataset, or a seeded random split as ``datasets`` makes it.
    Seed 2357 and 0.05 % give nanoGPT's split of OpenWebText, as in the papers. Local files of the
    formats ``READ`` keep the order of their rows.
    """

    Options: ClassVar[type[TextOptions]] = Options
    unit = "documents"
    shard_rows = 4096  # OpenWebText has 5 kB each, so 20 MB, about 10 s on one core
    columns = ("text_column",)
    instead = "python_source"

    @property
    def offline(self) -> bool:  # type: ignore[override]
        return self.options.path in READ

    @property
    def files(self) -> dict[str, list[str]]:
        return super().files if self.options.path in LOADERS else {}

    def shards(self) -> list[Shard]:
        if self.options.path not in READ:
            return super().shards()
        named = [split for split in SPLITS if isinstance(getattr(self.options, split), str)]
        files = {split: self._matched(split) for split in named}
        refuse_shared(
            (f"data.data_files, split {split}", file) for split in named for file in files[split]
        )
        pieces = {split: self._cut(files[split]) for split in named}
        fraction = 0.0 if VALIDATION in named else self.options.validation
        held_out = self._hold_out(pieces[TRAIN], fraction)
        pairs = list(zip(pieces.pop(TRAIN), held_out, strict=True))
        nothing: frozenset[int] = frozenset()
        return [
            *(Shard(TRAIN, p.rows - len(held), (p, held, False)) for p, held in pairs),
            *(Shard(VALIDATION, len(held), (p, held, True)) for p, held in pairs if held),
            *(Shard(split, p.rows, (p, nothing, False)) for split in pieces for p in pieces[split]),
        ]

    def _matched(self, split: str) -> list[TextFile]:
        """Return the local files of a split."""
        name = getattr(self.options, split)
        if name not in self.files:
            key = "split" if split == TRAIN else split
            has = ", ".join(self.files)
            raise DataError(f"data.{key}: data.data_files has no {name!r} (it has {has})")
        suffix = SUFFIXES[self.options.path]
        files = [file for p in self.files[name] for file in match("data.data_files", p, suffix)]
        return list({file.path: file for file in files}.values())

    def _cut(self, files: list[TextFile]) -> list[Piece]:
        kind = cast(Format, self.options.path)
        pieces = [piece for file in files for piece in cut(file.path, kind)]
        if not any(piece.rows for piece in pieces):
            raise DataError(f"data.data_files: {', '.join(f.path for f in files)}: no rows")
        return pieces

    def _hold_out(self, pieces: list[Piece], fraction: float) -> list[frozenset[int]]:
        """Return the indices of the validation documents in each piece.

        The documents that ``datasets.Dataset.train_test_split`` holds out.
        """
        total = sum(piece.rows for piece in pieces)
        if fraction and total < 2:
            self._require_texts(pieces)
            raise DataError(self._too_few(total))
        count = math.ceil(fraction * total)
        order = np.random.default_rng(self.options.seed).permutation(total if count else 0)
        chosen = np.sort(order[:count])
        bounds = np.cumsum([0, *(p.rows for p in pieces)])
        places = np.searchsorted(chosen, bounds)
        return [
            frozenset((chosen[first:last] - begin).tolist())
            for begin, (first, last) in zip(bounds, itertools.pairwise(places), strict=False)
        ]

    def _require_texts(self, pieces: list[Piece]) -> None:
        """Refuse rows without text: one row may be a file of another layout of JSON."""
        column = self.options.text_column
        try:
            for piece in pieces:
                for place, row in piece.read([column]):
                    _text(place, row, column)
        except DataError as error:
            if self.options.path != "json":
                raise
            raise DataError(
                f"{error}; expected one JSON object per line, or an array of objects, with the "
                f"text under {column!r} (data.text_column)"
            ) from error

    def _too_few(self, count: int) -> str:
        return f"{self.options.name} has {count} documents: too few for a validation split"

    def rows(self, split: str) -> Any:
        """Return a split of the dataset, or a part of the divided one."""
        fraction = self.options.validation
        divided = not isinstance(fraction, str) and fraction > 0 and split != TEST
        if divided and split not in self._opened:
            seed = self.options.seed
            whole = super().rows(TRAIN)
            if len(whole) < 2:
                raise DataError(self._too_few(len(whole)))
            parts = whole.train_test_split(test_size=fraction, seed=seed, shuffle=True)
            self._opened |= {TRAIN: parts["train"], VALIDATION: parts["test"]}
        return super().rows(split)

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield the texts of a range of rows; skip empty and null documents."""
        for document in self._texts(shard):
            if self.options.rows == "lines":
                # some datasets keep line ends, others strip them
                yield (document or "").removesuffix("\n") + "\n", False
            elif document:
                yield document, True

    def _texts(self, shard: Shard) -> Iterator[str | None]:
        column = self.options.text_column
        if isinstance(shard.items[0], Piece):
            piece, chosen, inside = shard.items
            for place, row in piece.read([column], wanted=lambda i: (i in chosen) == inside):
                yield _text(place, row, column)
            return
        begin, end = shard.items
        for document in self.rows(shard.split)[begin:end][column]:
            if document is not None and not isinstance(document, str):
                kind = type(document).__name__
                raise DataError(f"data.text_column: {column!r} holds {kind}, not text")
            yield document


def _text(place: str, row: Row, column: str) -> str | None:
    """Return the text of a row, or None if it is null."""
    with located(place, row):
        return None if row[column] is None else text(row, column)
