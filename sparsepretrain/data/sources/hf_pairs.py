"""Parallel text of the hub, such as WMT's, loaded by ``datasets``, or of local files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.data.source import SPLITS, TRAIN, Document, Shard, SourceOptions, TokenOptions
from sparsepretrain.data.sources._files import TextFile, match, refuse_shared
from sparsepretrain.data.sources._hub import HubOptions, HubSource
from sparsepretrain.data.sources._rows import (
    Row,
    cut,
    format_of,
    located,
    names_file,
    no_rows,
    suffix_of,
    text,
)
from sparsepretrain.errors import DataError, Problems
from sparsepretrain.registry import register

COLUMN = "translation"
"""Column of a ``datasets`` translation corpus: language code -> sentence."""


@dataclass(slots=True, kw_only=True)
class Options(HubOptions, TokenOptions):
    """Options of ``source: hf_pairs``."""

    languages: tuple[str, str]
    train: str
    validation: str | None
    test: str | None

    @property
    def local(self) -> dict[str, str]:
        """Split -> local file or glob; empty: all splits are those of a data set."""
        return {k: name for k in SPLITS if format_of(name := getattr(self, k) or "")}

    def problems(self) -> Problems:
        yield from TokenOptions.problems(self)
        for split in SPLITS:
            name = getattr(self, split)
            if name is None or split in self.local:
                continue
            if (is_file := names_file(name)) or self.local:
                none = None if split == TRAIN else "null"
                yield split, no_rows(name, f"data.{split}", none, is_file=is_file)
        if self.languages[0] == self.languages[1]:
            yield "languages", f"must be two different codes, got {list(self.languages)}"


@register("source", "hf_pairs")
class HfPairs(HubSource):
    """Pairs from the column ``translation``, or from two columns named by language codes."""

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "pairs"
    unit = "pairs"
    shard_rows = 16384  # 1 to 2 s of byte-level BPE on one core, lost by an interruption
    instead = "cldr_ende"

    @property
    def offline(self) -> bool:  # type: ignore[override]
        return bool(self.options.local)

    def state(self) -> list[Any]:
        if not self.options.local:
            return super().state()
        files = [(split, file) for split, paths in self._local_files().items() for file in paths]
        refuse_shared((f"data.{split}", file) for split, file in files)
        return [[split, *file.stamp] for split, file in files]

    def shards(self) -> list[Shard]:
        if not self.options.local:
            return super().shards()
        return [
            Shard(split, piece.rows, (piece,))
            for split, files in self._local_files().items()
            for file in files
            for piece in cut(file.path, format_of(self.options.local[split]) or "json")
        ]

    def _local_files(self) -> dict[str, list[TextFile]]:
        named = self.options.local.items()
        return {
            split: match(f"data.{split}", pattern, suffix_of(pattern)) for split, pattern in named
        }

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield source and target in turn; skip rows with an empty side, as WMT has thousands."""
        for place, row in self._rows(shard):
            columns = row.get(COLUMN, row)
            if not isinstance(columns, dict):
                kind = type(columns).__name__
                raise DataError(f"{place}: column {COLUMN!r} holds {kind}, not a text per language")
            with located(place, columns):
                sides = [_sentence(columns, code) for code in self.options.languages]
            if all(sides):
                yield from ((side, True) for side in sides)

    def _rows(self, shard: Shard) -> Iterator[tuple[str, Row]]:
        if self.options.local:
            (piece,) = shard.items
            yield from piece.read()
            return
        begin, end = shard.items
        columns = self.rows(shard.split)[begin:end]  # faster than row by row
        for number, values in enumerate(zip(*columns.values(), strict=True), begin):
            row = dict(zip(columns, values, strict=True))
            yield f"{self.options.name}, {shard.split}, row {number}", row

    def rows(self, split: str) -> Any:
        """Return a split of the dataset, which has both languages."""
        rows = super().rows(split)
        known = rows[0][COLUMN] if COLUMN in rows.column_names else rows.column_names
        for code in self.options.languages:
            if code not in known:
                has = f"{self.options.name} has no {code!r} (it has {', '.join(known)})"
                raise DataError(f"data.languages: {has}")
        return rows


def _sentence(columns: Row, code: str) -> str:
    """Return the sentence of one language, or "" if it is null."""
    sentence = "" if columns[code] is None else text(columns, code)
    return sentence.replace("\0", " ").strip()
