"""Any text data set that the ``datasets`` library can load, from the hub or from local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparsepretrain.data.sources._source import (
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
    revision: str | None
    """Branch, tag or commit of the repository; null: its main branch."""
    data_files: list[str] | None
    """Local files or globs for the formats json, text, csv, parquet and arrow."""
    text_column: str
    """Column that holds the text."""
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


@register("source", "hf_text")
class HfText(Source):
    """Documents are rows. The validation split is ``datasets``' own seeded random split.

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
        patterns = options.data_files or []
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
        """The texts of a range of rows; empty and null rows are left out.

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
            if text:
                yield text, True

    def missing(self) -> str:
        """The message when nothing is prepared."""
        name, size = self.options.name, self.options.size_gb
        amount = f", about {size:g} GB" if size else ""
        needs = "" if self._local else f" (needs the network{amount})"
        return (
            f"{name} is not prepared: run `sparsepretrain prepare data={name}`{needs}, "
            "or train offline with data=python_source"
        )

    @property
    def _local(self) -> bool:
        return bool(self.options.data_files) or os.path.isdir(self.options.path)

    def _load(self) -> dict[str, Any]:
        from sparsepretrain.data.hub import reason

        options = self.options
        try:
            with _quiet_datasets(local=self._local) as datasets:
                rows = datasets.load_dataset(
                    options.path,
                    options.subset,
                    split=options.split,
                    revision=options.revision,
                    data_files=[os.path.expanduser(f) for f in options.data_files or []] or None,
                )
                self._check(rows)
                if options.validation == 0:
                    return {TRAIN: rows}
                parts = rows.train_test_split(
                    test_size=options.validation, seed=options.seed, shuffle=True
                )
                return {TRAIN: parts["train"], VALIDATION: parts["test"]}
        except ImportError as error:
            raise DataError(
                f"{options.name} needs the package datasets: pip install 'sparsepretrain[hf]'"
            ) from error
        except ConnectionError as error:
            raise DataError(
                f"{options.name} needs the network: {reason(error)}; connect and run "
                f"`sparsepretrain prepare data={options.name}`, "
                "or train offline with data=python_source"
            ) from error
        except DataError:
            raise
        except Exception as error:  # datasets raises whatever its builders and pyarrow raise
            raise DataError(
                f"{options.name}: datasets cannot load data.path={options.path}: {reason(error)}"
                f"{_hint(error)}"
            ) from error

    def _check(self, rows: Any) -> None:
        name, column = self.options.name, self.options.text_column
        if column not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise DataError(f"data.text_column: {name} has no column {column!r} (it has {known})")
        if len(rows) < 2 and self.options.validation > 0:
            raise DataError(f"{name} has {len(rows)} documents: too few for a validation split")
        if len(rows) == 0:
            raise DataError(f"{name} has no documents in split {self.options.split!r}")


def _hint(error: Exception) -> str:
    if "scripts are no longer supported" in str(error):
        return "; set data.revision to a revision with data files (see the data set's hub page)"
    return ""


@contextmanager
def _quiet_datasets(*, local: bool) -> Iterator[Any]:
    """``datasets`` without bars and logs, offline when the hub cannot be reached."""
    import datasets
    import huggingface_hub

    from sparsepretrain.data.hub import hub_access

    bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        with hub_access(offline=local):
            datasets.config.HF_HUB_OFFLINE = offline or huggingface_hub.constants.HF_HUB_OFFLINE
            yield datasets
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
