"""Sources loaded by the package ``datasets``, from the Hugging Face hub or local directories."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.data.hub import quiet_datasets
from sparsepretrain.data.source import SPLITS, TRAIN, Shard, Source, prepare_command, ranges
from sparsepretrain.data.sources._files import match
from sparsepretrain.errors import DataError, needs, reason

SUFFIXES = {"json": ".jsonl", "parquet": ".parquet", "text": ".txt", "csv": ".csv"}
"""``data.path`` that is a file format -> suffix of its files, for messages."""


@dataclass(kw_only=True)  # no slots: combined with a base class that has slots
class HubOptions:
    """Keys of a dataset on the hub."""

    path: str
    subset: str | None
    revision: str | None
    size_gb: float | None

    hub_tokenizers: ClassVar[bool] = True


class HubSource(Source):
    """Base of sources whose shards are row ranges of a ``datasets`` split."""

    offline = False
    shard_rows: ClassVar[int]
    """Rows per shard."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Option keys that name columns required in every split."""
    instead: ClassVar[str]
    """Offline alternative, for messages."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._opened: dict[str, Any] = {}

    @property
    def local(self) -> bool:
        """True if no network is needed."""
        return bool(self.files) or os.path.isdir(os.path.expanduser(self.options.path))

    @property
    def files(self) -> dict[str, list[str]]:
        """Local files of each split if ``path`` is a file format."""
        return _by_split(getattr(self.options, "data_files", None))

    def state(self) -> list[Any]:
        """Describe local files; data on the hub is identified by the options alone."""
        key = "data.data_files"
        patterns = [p for each in self.files.values() for p in each]
        if self.local and not self.files:
            key = "data.path"
            patterns = [os.path.join(glob.escape(self.options.path), "**")]
        suffix = SUFFIXES.get(self.options.path, ".arrow")
        return [file.stamp for pattern in patterns for file in match(key, pattern, suffix)]

    def shards(self) -> list[Shard]:
        """Return ranges of rows; download the dataset if necessary."""
        return [
            shard
            for split in SPLITS
            if getattr(self.options, split, None)
            for shard in ranges(split, len(self.rows(split)), self.shard_rows)
        ]

    def rows(self, split: str) -> Any:
        """Return a split of the dataset, checked and cached."""
        if split not in self._opened:
            options = self.options
            name = getattr(self.options, split)
            instead = f"train offline with data={self.instead}"
            rows = load_rows(options, name, instead=instead, data_files=self.files)
            if not len(rows):
                raise DataError(f"data.{split}: {options.name} has no rows in {name!r}")
            for key in self.columns:
                if (column := getattr(options, key)) not in rows.column_names:
                    has = f"no column {column!r} (it has {', '.join(rows.column_names)})"
                    raise DataError(f"data.{key}: {options.name} has {has}")
            self._opened[split] = rows
        return self._opened[split]

    def missing(self) -> str:
        size = self.options.size_gb
        amount = f", about {size:g} GB" if size else ""
        needs = "" if self.local else f" (needs the network{amount})"
        return f"{super().missing()}{needs}, or train offline with data={self.instead}"


def _by_split(files: Any) -> dict[str, list[str]]:
    """Return split -> files; a list is the train split."""
    if isinstance(files, dict):
        return files
    return {TRAIN: files} if files else {}


def _pattern(entry: str) -> str:
    """Return a pattern that matches the file ``entry`` if it exists: its name may contain ``[``."""
    path = os.path.expanduser(entry)
    return glob.escape(path) if os.path.isfile(path) else path


def load_rows(
    options: Any, split: str, *, instead: str, data_files: dict[str, list[str]] | None = None
) -> Any:
    """Load a split (or a slice such as train[:10%]) of the dataset of ``options``.

    ``instead`` is the remedy without network; ``data_files`` are local files if ``path`` is a
    file format.
    """
    name = options.name
    path = os.path.expanduser(options.path)
    files = {key: [_pattern(entry) for entry in value] for key, value in (data_files or {}).items()}
    within = {} if files else _by_split(getattr(options, "data_files", None))
    if not files and os.path.isdir(path) and glob.has_magic(path):
        raise DataError(
            f"data.path: datasets takes {path} for a pattern, because of its [, * or ?: rename the "
            "directory, link to it, or name its files (data.path=parquet 'data.data_files=[…]')"
        )
    with needs(name, "datasets", "hf"):
        from datasets import load_dataset
    try:
        with quiet_datasets(local=bool(files) or os.path.isdir(path)):
            return load_dataset(
                path,
                options.subset,
                split=split,
                revision=options.revision,
                data_files=files or within or None,
            )
    except ConnectionError as error:
        raise DataError(
            f"{name} needs the network: {reason(error)}; connect and run "
            f"{prepare_command(options)}, or {instead}"
        ) from error
    except Exception as error:  # datasets raises whatever its builders and pyarrow raise
        hint = ""
        if "scripts are no longer supported" in str(error):
            hint = "; set data.revision to a revision with data files (see the dataset's hub page)"
        where = ", ".join(files.get(split, ())) or f"data.path={path}"
        why = reason(error.__cause__ or error)
        raise DataError(f"{name}: datasets cannot load {where}: {why}{hint}") from error
