"""Text files of the user, named by globs."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from sparsepretrain.data.sources._files import FileSource, TextFile
from sparsepretrain.data.sources._source import SourceOptions, TextOptions
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """Options of ``source: text_files``."""

    source: Literal["text_files"]
    files: list[str]
    """Files or globs; ``**`` matches directories at any depth."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from TextOptions.problems(self)
        if not self.files:
            yield "files", "must name at least one file or glob, such as [corpus/*.txt]"


@register("source", "text_files")
class TextFiles(FileSource):
    """Every file that a glob matches."""

    Options: ClassVar[type[SourceOptions]] = Options

    def find(self) -> list[TextFile]:
        """The files.

        Raises:
            DataError: a glob matches no file.
        """
        return [file for pattern in self.options.files for file in match("data.files", pattern)]


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
