"""Parallel text loaded by ``datasets``, such as the corpora of WMT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.data.source import Document, Shard, SourceOptions, TokenOptions
from sparsepretrain.data.sources._hub import HubOptions, HubSource
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

    def problems(self) -> Problems:
        yield from TokenOptions.problems(self)
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

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield source and target in turn; skip rows with an empty side, as WMT has thousands."""
        begin, end = shard.items
        part = self.rows(shard.split)[begin:end]
        languages = self.options.languages
        if COLUMN in part:
            columns = [[row[code] for row in part[COLUMN]] for code in languages]
        else:
            columns = [part[code] for code in languages]
        for number, pair in enumerate(zip(*columns, strict=True), begin):
            sides = []
            for code, text in zip(languages, pair, strict=True):
                if text is not None and not isinstance(text, str):
                    raise DataError(
                        f"{self.options.name}, {shard.split}, row {number}: {code!r} holds "
                        f"{type(text).__name__}, not text"
                    )
                sides.append((text or "").replace("\0", " ").strip())
            if all(sides):
                yield from ((side, True) for side in sides)

    def rows(self, split: str) -> Any:
        """Return a split of the dataset, which has both languages."""
        rows = super().rows(split)
        known = rows[0][COLUMN] if COLUMN in rows.column_names else rows.column_names
        for code in self.options.languages:
            if code not in known:
                has = f"{self.options.name} has no {code!r} (it has {', '.join(known)})"
                raise DataError(f"data.languages: {has}")
        return rows
