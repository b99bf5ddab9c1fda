"""Python source files: by default the running interpreter's own standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from sparsepretrain.data.source import SourceOptions, TextOptions
from sparsepretrain.data.sources._compressed import unreadable
from sparsepretrain.data.sources._files import FileSource, TextFile
from sparsepretrain.errors import DataError, Problems
from sparsepretrain.registry import register

SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Skipped directories: installed packages and caches."""


@dataclass(kw_only=True)  # no slots: combined with a base class that has slots
class RootOptions(SourceOptions):
    """Keys of sources of Python files."""

    roots: list[str] | None

    def problems(self) -> Problems:
        yield from super().problems()
        if self.roots is not None and not self.roots:
            yield "roots", "must name at least one directory, or be null (standard library)"


@dataclass(slots=True, kw_only=True)
class Options(RootOptions, TextOptions):
    """Options of ``source: python_source``."""


@register("source", "python_source")
class PythonSource(FileSource):
    """All .py files below the roots, except in hidden and installed-package directories."""

    Options: ClassVar[type[SourceOptions]] = Options

    def find(self) -> list[TextFile]:
        """Find the .py files below each root; an empty root is an error."""
        roots = self.options.roots
        if roots is None:
            roots = [sysconfig.get_path("stdlib")]
        files = []
        for root in map(os.path.expanduser, roots):
            if not os.path.isdir(root):
                raise DataError(f"data.roots: {root} is not a directory")
            below = list(walk(root))
            if not below:
                raise DataError(f"data.roots: {root} holds no .py file")
            files.extend(below)
        return files


def walk(root: str) -> Iterator[TextFile]:
    """Yield the .py files below a directory, named relative to it."""

    def fail(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    for directory, below, names in os.walk(root, onerror=fail):
        below[:] = [name for name in below if name not in SKIPPED and not name.startswith(".")]
        for path in (os.path.join(directory, name) for name in names if name.endswith(".py")):
            if os.path.isfile(path):  # not a broken link
                yield TextFile.at(path, os.path.relpath(path, root))
