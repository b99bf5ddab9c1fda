"""Parallel text that the ``datasets`` library can load, such as the corpora of WMT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparsepretrain.data.hub import load_rows
from sparsepretrain.data.sources._source import (
    SPLITS,
    Document,
    Shard,
    Source,
    SourceOptions,
    TokenOptions,
)
from sparsepretrain.data.sources.text_files import match
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

SHARD_PAIRS = 16384
"""Pairs per shard: 1 to 2 s of byte-level BPE on one core, which is what an interruption costs."""
COLUMN = "translation"
"""Column of a ``datasets`` translation corpus: a mapping of language code to sentence."""


@dataclass(slots=True, kw_only=True)
class Options(TokenOptions):
    """Options of ``source: hf_pairs``."""

    source: Literal["hf_pairs"]
    path: str
    """Hub repository or local directory."""
    subset: str | None
    """The hub's configuration name."""
    revision: str | None
    """Branch, tag or commit of the repository; null: its main branch."""
    languages: tuple[str, str]
    """Codes of source and target."""
    train: str
    """Split of the data set that is trained on; slices such as train[:10%] work."""
    validation: str | None
    """Split that is evaluated in training; null: none."""
    test: str | None
    """Split for the final score; null: none."""
    size_gb: float | None
    """Disk that the download and its cache take, for messages only (10^9 bytes)."""

    hub_tokenizers: ClassVar[bool] = True
    about: ClassVar[frozenset[str]] = frozenset({"name", "size_gb"})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from TokenOptions.problems(self)
        if self.languages[0] == self.languages[1]:
            yield "languages", f"must be two different codes, got {list(self.languages)}"


@register("source", "hf_pairs")
class HfPairs(Source):
    """A pair is a row's ``translation``, or its two columns named by the language codes."""

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "pairs"
    offline = False
    unit = "pairs"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._splits: dict[str, Any] = {}

    def state(self) -> list[Any]:
        """Size and time of local files; nothing for the hub, where only the options speak."""
        path = self.options.path
        files = match("data.path", os.path.join(path, "**")) if os.path.isdir(path) else []
        return [[file.name, file.size, file.mtime_ns] for file in files]

    def shards(self) -> list[Shard]:
        """Ranges of rows; downloads the data set if that has not happened.

        Raises:
            DataError: the data set cannot be had, or has no such split or language.
        """
        shards = []
        for split in SPLITS:
            if getattr(self.options, split) is not None:
                rows = len(self._rows(split))
                for index, begin in enumerate(range(0, rows, SHARD_PAIRS)):
                    end = min(begin + SHARD_PAIRS, rows)
                    shards.append(Shard(split, index, end - begin, (begin, end)))
        return shards

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Source and target of a range of rows, in turn; rows with an empty side are left out.

        WMT's training text has some thousand of these.

        Raises:
            DataError: a side is not text.
        """
        begin, end = shard.items
        part = self._rows(shard.split)[begin:end]
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

    def missing(self) -> str:
        """The message when nothing is prepared."""
        name, size = self.options.name, self.options.size_gb
        amount = f", about {size:g} GB" if size else ""
        needs = "" if os.path.isdir(self.options.path) else f" (needs the network{amount})"
        return (
            f"{name} is not prepared: run `sparsepretrain prepare data={name}`{needs}, "
            "or train offline with data=cldr_ende"
        )

    def _rows(self, split: str) -> Any:
        """One split of the data set."""
        if split not in self._splits:
            instead = "train offline with data=cldr_ende"
            rows = load_rows(self.options, getattr(self.options, split), instead=instead)
            self._check(split, rows)
            self._splits[split] = rows
        return self._splits[split]

    def _check(self, split: str, rows: Any) -> None:
        name, names = self.options.name, list(rows.column_names)
        if not len(rows):
            raise DataError(f"data.{split}: {name} has no rows in {getattr(self.options, split)!r}")
        if COLUMN in names:
            names = list(rows[0][COLUMN])
        for code in self.options.languages:
            if code not in names:
                known = ", ".join(names)
                raise DataError(f"data.languages: {name} has no {code!r} (it has {known})")
