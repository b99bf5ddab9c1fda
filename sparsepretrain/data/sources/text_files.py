"""Text files of the user, named by globs."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from sparsepretrain.data.sources._files import FileSource, TextFile, refuse_shared
from sparsepretrain.data.sources._source import TEST, VALIDATION, SourceOptions, TextOptions
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """Options of ``source: text_files``."""

    source: Literal["text_files"]
    files: list[str]
    """Files or globs; ``**`` matches directories at any depth."""
    validation: float | list[str]  # type: ignore[assignment]
    """Fraction of the text that is held out, in [0, 1), or the files or globs that are."""
    test: list[str] | None
    """Files or globs of the test split; null: there is none."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from TextOptions.problems(self)
        if not self.files:
            yield "files", "must name at least one file or glob, such as [corpus/*.txt]"
        for key in ("validation", "test"):
            if getattr(self, key) == []:
                yield key, "must name at least one file or glob"


@register("source", "text_files")
class TextFiles(FileSource):
    """Every file that a glob matches."""

    Options: ClassVar[type[SourceOptions]] = Options

    def find(self) -> list[TextFile]:
        """The files.

        Raises:
            DataError: a glob matches no file.
        """
        return _match_all("data.files", self.options.files)

    @cached_property
    def _held_out(self) -> dict[str, list[TextFile]]:
        splits = {VALIDATION: self.options.validation, TEST: self.options.test}
        named = {
            split: _match_all(f"data.{split}", patterns)
            for split, patterns in splits.items()
            if isinstance(patterns, list)
        }
        every = {"files": self.find(), **named}
        refuse_shared(
            (f"data.{k}", f.path, f.identity) for k, files in every.items() for f in files
        )
        return named

    def held_out(self) -> dict[str, list[TextFile]]:
        """The files of the splits that are given as files.

        Raises:
            DataError: a glob matches no file, or a file of another split.
        """
        return self._held_out


def _match_all(key: str, patterns: list[str]) -> list[TextFile]:
    """The files of all patterns, each once."""
    found = [file for pattern in patterns for file in match(key, pattern)]
    return list({file.identity: file for file in found}.values())


def match(key: str, pattern: str) -> list[TextFile]:
    """The files that ``pattern`` names; their names are relative to its part without wildcards.

    Raises:
        DataError: there is none, or one cannot be read.
    """
    expanded = os.path.abspath(os.path.expanduser(pattern))
    plain = os.path.isfile(expanded)  # a real file name may contain [ or *
    paths = [expanded] if plain else sorted(glob.glob(expanded, recursive=True))
    paths = [path for path in paths if os.path.isfile(path)]
    if not paths:
        hint = f" (a directory: use {pattern}/**/*.txt)" if os.path.isdir(expanded) else ""
        raise DataError(f"{key}: no file matches {pattern}{hint}")
    fixed = expanded
    while plain or glob.has_magic(fixed):
        fixed, plain = os.path.dirname(fixed), False
    found = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        name = os.path.relpath(path, fixed).replace(os.sep, "/")
        identity = (stat.st_dev, stat.st_ino)
        found.append(TextFile(name, path, stat.st_size, stat.st_mtime_ns, identity))
    return found
