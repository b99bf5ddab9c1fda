"""Text files given by globs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from sparsepretrain.data.source import TEST, VALIDATION, SourceOptions, TextOptions
from sparsepretrain.data.sources._files import FileSource, TextFile, match, refuse_shared
from sparsepretrain.data.sources._rows import format_of
from sparsepretrain.errors import Problems, SparsePretrainWarning
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """Options of ``source: text_files``."""

    files: list[str]
    validation: float | list[str]  # type: ignore[assignment]
    test: list[str] | None

    def problems(self) -> Problems:
        yield from TextOptions.problems(self)
        if not self.files:
            yield "files", "must name at least one file or glob, such as [corpus/*.txt]"
        for key in ("files", "validation", "test"):
            entries = getattr(self, key)
            for entry in entries if isinstance(entries, list) else ():
                if _holds_rows(entry):
                    has = f"has {entry!r}, which holds rows, not plain text"
                    yield key, f"{has}: use data=document_files"
        for key in ("validation", "test"):
            if getattr(self, key) == []:
                yield key, "must name at least one file or glob"


def _holds_rows(name: str) -> bool:
    """Return True for a file or glob of rows; not for .json, which corpora of code have."""
    return format_of(name) is not None and not name.endswith(".json")


@register("source", "text_files")
class TextFiles(FileSource):
    """All files that match a glob."""

    Options: ClassVar[type[SourceOptions]] = Options
    is_text = True

    def find(self) -> list[TextFile]:
        files = self._match("files")
        rows = [file.path for file in files if _holds_rows(file.path)]
        if rows:
            warnings.warn(
                f"data.files: {len(rows)} files hold rows, such as {rows[0]}, and are read as "
                "plain text: data=document_files reads a column of them",
                SparsePretrainWarning,
                stacklevel=2,
            )
        return files

    @cached_property
    def held_out(self) -> dict[str, list[TextFile]]:
        """Files of the splits given as files; no two splits share a file."""
        named = {
            split: self._match(split)
            for split in (VALIDATION, TEST)
            if isinstance(getattr(self.options, split), list)
        }
        every = {"files": self.find(), **named}
        refuse_shared((f"data.{key}", file) for key, files in every.items() for file in files)
        return named

    def _match(self, key: str) -> list[TextFile]:
        patterns = getattr(self.options, key)
        files = [file for pattern in patterns for file in match(f"data.{key}", pattern)]
        return list({file.path: file for file in files}.values())
