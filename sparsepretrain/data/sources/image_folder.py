"""Image files in one directory per class; the prepared data is an index of the files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepretrain.data.source import TRAIN, VALIDATION, IndexSource, Shard, SourceOptions
from sparsepretrain.data.sources._compressed import unreadable
from sparsepretrain.errors import DataError
from sparsepretrain.files import lfs_pointer, require_file
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of image files, case-insensitive; torchvision's list."""


@dataclass(slots=True, kw_only=True)
class Options(SourceOptions):
    """Options of ``source: image_folder``."""

    root: str
    train: str
    validation: str
    size_gb: float | None


@register("source", "image_folder")
class ImageFolder(IndexSource):
    """Directory names in sorted order are the classes, as in torchvision.

    Images of a class may lie in folders below its directory.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    offline = True

    def _classes(self) -> dict[str, list[Path]]:
        root = Path(self.options.root).expanduser()
        if not root.is_dir():
            size = f", about {self.options.size_gb:g} GB" if self.options.size_gb else ""
            raise DataError(
                f"data.root: {root} is not a directory: put {self.options.name} there{size}, set "
                "data.root=DIR, or train offline with data=digits"
            )
        classes = {}
        for split in (TRAIN, VALIDATION):
            directory = root / getattr(self.options, split)
            entries = _visible(directory) if os.path.isdir(directory) else []
            classes[split] = [path for path in entries if os.path.isdir(path)]
            if not classes[split]:
                raise DataError(f"data.{split}: {directory} holds no class directory")
        return classes

    def state(self) -> list[Any]:
        """Return the class directories, those below them, and their modification times.

        Listing all files of ImageNet takes too long for every start, so a file rewritten under its
        old name is not noticed.
        """
        directories = [
            (split, path, folder)
            for split, paths in self._classes().items()
            for path in paths
            for folder in _folders(path, by_links=True)
        ]
        return [
            [split, folder.relative_to(path.parent).as_posix(), folder.stat().st_mtime_ns]
            for split, path, folder in directories
        ]

    def shards(self) -> list[Shard]:
        classes = self._classes()
        labels = {path.name: label for label, path in enumerate(classes[TRAIN])}
        shards = []
        for split, paths in classes.items():
            for path in paths:
                if path.name not in labels:
                    raise DataError(
                        f"{path}: no class of that name in {path.parents[1] / self.options.train} "
                        f"({len(labels)} classes), so its label would be out of range"
                    )
                files = [
                    file.relative_to(path).as_posix()
                    for folder in _folders(path)
                    for file in _visible(folder)
                    if file.suffix.lower() in SUFFIXES and not os.path.isdir(file)
                ]
                if not files:
                    raise DataError(f"{path}: the class has no image ({', '.join(SUFFIXES[:3])} …)")
                folder = os.path.relpath(path, Path(self.options.root).expanduser())
                items = (labels[path.name], folder, tuple(files))
                shards.append(Shard(split, len(files), items))
        return shards

    def entries(self, shard: Shard) -> Iterator[dict[str, Any]]:
        """Yield entries of one class: ``path`` relative to the root, and ``label``."""
        label, folder, files = shard.items
        return ({"path": f"{folder}/{file}", "label": label} for file in files)

    def read(self, entry: dict[str, Any]) -> Image:
        from PIL import Image

        path = Path(self.options.root).expanduser() / entry["path"]
        require_file(path)  # a pipe would block
        if problem := lfs_pointer(path):
            raise DataError(f"{path} {problem}")
        with Image.open(path) as image:
            image.load()
            return image


def _folders(path: Path, *, by_links: bool = False) -> Iterator[Path]:
    """Yield a directory and the visible ones below it, in order; each once.

    Args:
        path: of a class.
        by_links: do not list a directory with two links, which has no directories below it, so that
            the 1.3 million files of ImageNet are not listed. CIFS says two for every directory.
    """
    seen = set()
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        about = folder.stat()
        if (about.st_dev, about.st_ino) in seen:  # a symbolic link to a folder above
            continue
        seen.add((about.st_dev, about.st_ino))
        yield folder
        if not (by_links and about.st_nlink == 2):
            waiting += [path for path in reversed(_visible(folder)) if os.path.isdir(path)]


def _visible(folder: Path) -> list[Path]:
    """Return the entries of a directory in order, without hidden ones.

    macOS leaves ._a.png, which is no image, beside a.png. Callers ask ``os.path.isdir`` about the
    entries: ``Path.is_dir`` of Python before 3.14 raises an error if it may not look.

    Raises:
        DataError: the directory may not be listed.
    """
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise unreadable(str(folder), error) from error
