"""Text loaded by ``datasets``, from the hub or from local files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparsepretrain.data.source import TEST, TRAIN, VALIDATION, Document, Shard, TextOptions
from sparsepretrain.data.sources._hub import HubOptions, HubSource
from sparsepretrain.errors import DataError, Problems
from sparsepretrain.registry import register

LOADERS = ("json", "text", "csv", "parquet", "arrow")
"""Paths that are file formats of ``datasets``, not repositories."""


@dataclass(slots=True, kw_only=True)
class Options(HubOptions, TextOptions):
    """Options of ``source: hf_text``; ``path`` may be a file format, with ``data_files``."""

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
        if self.path not in LOADERS and self.data_files is not None:
            yield "data_files", f"needs data.path to be one of {', '.join(LOADERS)}"
        if self.rows == "lines" and self.validation != 0 and isinstance(self.validation, float):
            yield "validation", "must be 0 or name a split where data.rows=lines"


@register("source", "hf_text")
class HfText(HubSource):
    """Rows are documents, or the lines of one document per split.

    The validation split is part of the dataset, or a seeded random split by ``datasets``. Seed 2357
    and 0.05 % give nanoGPT's split of OpenWebText, as in the papers.
    """

    Options: ClassVar[type[TextOptions]] = Options
    unit = "documents"
    shard_rows = 4096  # OpenWebText has 5 kB each, so 20 MB, about 10 s on one core
    columns = ("text_column",)
    instead = "python_source"

    def rows(self, split: str) -> Any:
        """Return a split of the dataset, or a part of the divided one."""
        fraction = self.options.validation
        divided = not isinstance(fraction, str) and fraction > 0 and split != TEST
        if divided and split not in self._opened:
            seed, whole = self.options.seed, super().rows(TRAIN)
            if len(whole) < 2:
                few = f"has {len(whole)} documents: too few for a validation split"
                raise DataError(f"{self.options.name} {few}")
            parts = whole.train_test_split(test_size=fraction, seed=seed, shuffle=True)
            self._opened |= {TRAIN: parts["train"], VALIDATION: parts["test"]}
        return super().rows(split)

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield the texts of a range of rows; skip empty and null documents."""
        begin, end = shard.items
        column = self.options.text_column
        for text in self.rows(shard.split)[begin:end][column]:
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"data.text_column: {column!r} holds {kind}, not text")
            if self.options.rows == "lines":
                # some datasets keep line ends, others strip them
                yield (text or "").removesuffix("\n") + "\n", False
            elif text:
                yield text, True
