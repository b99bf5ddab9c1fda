"""Any text data set that the ``datasets`` library can load, from the hub or from local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparsepretrain.data.hub import load_rows
from sparsepretrain.data.sources._source import (
    TEST,
    TRAIN,
    VALIDATION,
    Document,
    Shard,
    Source,
    SourceOptions,
    TextOptions,
)
from sparsepretrain.data.sources.text_files import match
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

SHARD_DOCUMENTS = 4096
"""Documents per shard: OpenWebText has 5 kB each, so 20 MB, about 10 s on one core."""
LOADERS = ("json", "text", "csv", "parquet", "arrow")
"""Paths that are file formats of ``datasets`` and not repositories."""


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """Options of ``source: hf_text``."""

    source: Literal["hf_text"]
    path: str
    """Hub repository, local directory, or a file format with ``data_files``."""
    subset: str | None
    """The hub's configuration name."""
    split: str
    """Split of the data set that is read; slices such as train[:10%] work."""
    validation: float | str  # type: ignore[assignment]
    """Fraction of the documents that is held out, in [0, 1), or a split of the data set."""
    test: str | None
    """Split of the data set that becomes the test split; null: there is none."""
    revision: str | None
    """Branch, tag or commit of the repository; null: its main branch."""
    data_files: list[str] | dict[str, list[str]] | None
    """Local files or globs for the formats json, text, csv, parquet and arrow: of the split train,
    or split -> files."""
    text_column: str
    """Column that holds the text."""
    rows: Literal["documents", "lines"]
    """What a row is; lines of one running text keep their order, blank ones included."""
    size_gb: float | None
    """Disk that the download and its cache take, for messages only (10^9 bytes)."""

    hub_tokenizers: ClassVar[bool] = True
    about: ClassVar[frozenset[str]] = frozenset({"name", "size_gb"})

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from TextOptions.problems(self)
        if self.path in LOADERS and not self.data_files:
            yield "data_files", f"must name local files for data.path={self.path}"
        if self.path not in LOADERS and self.data_files is not None:
            yield "data_files", f"needs data.path to be one of {', '.join(LOADERS)}"
        for files in self.data_files.values() if isinstance(self.data_files, dict) else ():
            if not isinstance(files, list) or not all(isinstance(f, str) for f in files):
                yield "data_files", f"must map each split to a list of files, got {files!r}"
        if self.rows == "lines" and self.validation != 0 and isinstance(self.validation, float):
            yield "validation", "must be 0 or name a split where data.rows=lines"


@register("source", "hf_text")
class HfText(Source):
    """Documents are rows, or a split is one document of which the rows are lines.

    The validation split is one that the data set has, or ``datasets``' own seeded random split.
    With seed 2357 and 0.05 % this is nanoGPT's split of OpenWebText, which the papers use.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    offline = False
    unit = "documents"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._splits: dict[str, Any] | None = None

    def state(self) -> list[Any]:
        """Size and time of local files; nothing for the hub, where only the options speak."""
        options = self.options
        patterns = [file for files in self._files.values() for file in files]
        if not patterns and os.path.isdir(options.path):
            patterns = [os.path.join(options.path, "**")]
        key = "data.data_files" if options.data_files else "data.path"
        files = [file for pattern in patterns for file in match(key, pattern)]
        return [[file.name, file.size, file.mtime_ns] for file in files]

    def shards(self) -> list[Shard]:
        """Ranges of rows; downloads the data set if that has not happened.

        Raises:
            DataError: the data set cannot be had, or has no such column or split.
        """
        self._splits = self._load()
        shards = []
        for split, rows in self._splits.items():
            for index, begin in enumerate(range(0, len(rows), SHARD_DOCUMENTS)):
                end = min(begin + SHARD_DOCUMENTS, len(rows))
                shards.append(Shard(split, index, end - begin, (begin, end)))
        return shards

    def documents(self, shard: Shard) -> Iterator[Document]:
        """The texts of a range of rows; empty and null documents are left out.

        Raises:
            DataError: the column holds something else than text.
        """
        if self._splits is None:
            self._splits = self._load()
        begin, end = shard.items
        column = self.options.text_column
        for text in self._splits[shard.split][begin:end][column]:
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"data.text_column: {column!r} holds {kind}, not text")
            if self.options.rows == "lines":
                # the data set's own line ends, which some keep and some strip
                yield (text or "").removesuffix("\n") + "\n", False
            elif text:
                yield text, True

    def missing(self) -> str:
        """The message when nothing is prepared."""
        name, size = self.options.name, self.options.size_gb
        amount = f", about {size:g} GB" if size else ""
        needs = "" if self._local else f" (needs the network{amount})"
        return (
            f"{name} is not prepared: run `{self.command()}`{needs}, "
            "or train offline with data=python_source"
        )

    @property
    def _local(self) -> bool:
        return bool(self.options.data_files) or os.path.isdir(self.options.path)

    @property
    def _files(self) -> dict[str, list[str]]:
        """Split -> local files, for the formats that need them."""
        files = self.options.data_files or {}
        return files if isinstance(files, dict) else {TRAIN: files}

    def _load(self) -> dict[str, Any]:
        options = self.options
        splits = {TRAIN: self._rows(options.split)}
        if isinstance(options.validation, str):
            splits[VALIDATION] = self._rows(options.validation)
        elif options.validation > 0:
            parts = splits[TRAIN].train_test_split(
                test_size=options.validation, seed=options.seed, shuffle=True
            )
            splits = {TRAIN: parts["train"], VALIDATION: parts["test"]}
        if options.test is not None:
            splits[TEST] = self._rows(options.test)
        return splits

    def _rows(self, split: str) -> Any:
        """One split of the data set, checked."""
        instead = "train offline with data=python_source"
        rows = load_rows(self.options, split, instead=instead, data_files=self._files)
        self._check(rows, split)
        return rows

    def _check(self, rows: Any, split: str) -> None:
        name, column = self.options.name, self.options.text_column
        if column not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise DataError(f"data.text_column: {name} has no column {column!r} (it has {known})")
        fraction = self.options.validation
        if len(rows) < 2 and isinstance(fraction, float) and fraction > 0:
            raise DataError(f"{name} has {len(rows)} documents: too few for a validation split")
        if len(rows) == 0:
            raise DataError(f"{name} has no documents in split {split!r}")
