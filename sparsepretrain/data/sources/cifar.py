"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) in the official Python format, archive or directory."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsepretrain.data.source import TRAIN, VALIDATION, Shard, SourceOptions
from sparsepretrain.data.sources._files import TextFile
from sparsepretrain.data.sources._images import PixelSource
from sparsepretrain.errors import DataError, reason
from sparsepretrain.registry import register

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Edition:
    """Files of one dataset."""

    directory: str
    labels: bytes
    """Key of the labels in a file."""
    files: dict[str, tuple[str, str, int]]
    """File -> (split, MD5, number of images), from the authors' page and torchvision."""


EDITIONS = {
    10: Edition(
        "cifar-10-batches-py",
        b"labels",
        {
            "data_batch_1": (TRAIN, "c99cafc152244af753f735de768cd75f", 10_000),
            "data_batch_2": (TRAIN, "d4bba439e000b95fd0a9bffe97cbabec", 10_000),
            "data_batch_3": (TRAIN, "54ebc095f3ab1f0389bbae665268c751", 10_000),
            "data_batch_4": (TRAIN, "634d18415352ddfa80567beed471001a", 10_000),
            "data_batch_5": (TRAIN, "482c414d41f54cd18b22e5b47cb7c3cb", 10_000),
            "test_batch": (VALIDATION, "40351d587109b95175f43aff81a1287e", 10_000),
        },
    ),
    100: Edition(
        "cifar-100-python",
        b"fine_labels",
        {
            "train": (TRAIN, "16019d7e3df5f24257cddd939b257f8d", 50_000),
            "test": (VALIDATION, "f0ef6b0ae62326f3e7ffdfab6717acfc", 10_000),
        },
    ),
}


@dataclass(slots=True, kw_only=True)
class Options(SourceOptions):
    """Options of ``source: cifar``."""

    classes: Literal[10, 100]
    path: str
    verify: bool


@register("source", "cifar")
class Cifar(PixelSource):
    """32×32 color images. The official test set is the validation split, as in the papers."""

    Options: ClassVar[type[SourceOptions]] = Options
    offline = True
    shape = (32, 32, 3)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.edition = EDITIONS[options.classes]

    def state(self) -> list[Any]:
        path = Path(self.options.path).expanduser()
        try:
            paths = [path / name for name in self.edition.files] if path.is_dir() else [path]
            files = [TextFile.at(str(file), file.name, "data.path") for file in paths]
        except DataError as error:
            base = self.edition.directory.removesuffix("-batches-py").removesuffix("-python")
            raise DataError(
                f"{error}; download {base}-python.tar.gz from "
                "https://www.cs.toronto.edu/~kriz/cifar.html, or train offline with data=digits"
            ) from error
        return [file.stamp for file in files]

    def shards(self) -> list[Shard]:
        return self.numbered(
            Shard(split, 0, images, (name,))
            for name, (split, _, images) in self.edition.files.items()
        )

    def rows(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        name = shard.items[0]
        content, where = self._read(name), f"{self.options.path}: {name}"
        if self.options.verify:
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if digest != self.edition.files[name][1]:
                raise DataError(
                    f"{where} has MD5 {digest}, not the official one: download it again, or set "
                    "data.verify=false for a set of your own"
                )
        try:
            batch = _Plain(io.BytesIO(content), encoding="bytes").load()
            labels = np.array(batch[self.edition.labels], dtype=np.int64)
            images = np.asarray(batch[b"data"]).reshape(len(labels), 3, 32, 32)
        except Exception as error:  # unpickling damaged bytes raises arbitrary errors
            raise DataError(f"{where} is not a CIFAR file: {reason(error)}") from error
        wrong = np.flatnonzero((labels < 0) | (labels >= self.options.classes))
        if len(wrong):
            raise DataError(
                f"{where}: image {wrong[0]} has label {labels[wrong[0]]}, out of range for "
                f"{self.options.classes} classes"
            )
        return labels, images.transpose(0, 2, 3, 1)

    def _read(self, name: str) -> bytes:
        path = Path(self.options.path).expanduser()
        try:
            if path.is_dir():
                return (path / name).read_bytes()
            with tarfile.open(path) as archive:
                member = archive.extractfile(f"{self.edition.directory}/{name}")
                if member is None:
                    raise DataError(f"{path}: {name} is not a file")
                return member.read()
        except KeyError as error:
            raise DataError(f"{path} holds no {self.edition.directory}/{name}") from error
        except (OSError, tarfile.TarError, EOFError) as error:
            raise DataError(f"cannot read {path}: {reason(error)}") from error


class _Plain(pickle.Unpickler):
    """Unpickler restricted to arrays and plain values, since a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar"}
        if module.split(".")[0] == "numpy" and name in allowed:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
