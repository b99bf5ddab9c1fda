"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) in the official Python format, archive or directory."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from sparsepretrain.data.source import TRAIN, VALIDATION, Shard, SourceOptions
from sparsepretrain.data.sources._files import TextFile
from sparsepretrain.data.sources._images import PixelSource
from sparsepretrain.errors import DataError, needs, reason
from sparsepretrain.registry import register


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
    unit = "files"
    shape = (32, 32, 3)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        with needs(options.name, "torchvision", "vision"):
            from torchvision import datasets
        edition = datasets.CIFAR10 if options.classes == 10 else datasets.CIFAR100
        self.directory = edition.base_folder
        self.labels = b"labels" if options.classes == 10 else b"fine_labels"
        self.files = {
            name: (split, md5)
            for split, files in ((TRAIN, edition.train_list), (VALIDATION, edition.test_list))
            for name, md5 in files
        }
        """File -> (split, MD5)."""

    def state(self) -> list[Any]:
        path = Path(self.options.path).expanduser()
        try:
            paths = [path / name for name in self.files] if path.is_dir() else [path]
            files = [TextFile.at(str(file), file.name, "data.path") for file in paths]
        except DataError as error:
            raise DataError(
                f"{error}; download cifar-{self.options.classes}-python.tar.gz from "
                "https://www.cs.toronto.edu/~kriz/cifar.html, or train offline with data=digits"
            ) from error
        return [file.stamp for file in files]

    def shards(self) -> list[Shard]:
        return self.numbered(Shard(split, 0, 1, (name,)) for name, (split, _) in self.files.items())

    def rows(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        name = shard.items[0]
        content, where = self._read(name), f"{self.options.path}: {name}"
        if self.options.verify:
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if digest != self.files[name][1]:
                raise DataError(
                    f"{where} has MD5 {digest}, not the official one: download it again, or set "
                    "data.verify=false for a set of your own"
                )
        try:
            batch = _Plain(io.BytesIO(content), encoding="bytes").load()
            labels = np.array(batch[self.labels], dtype=np.int64)
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
                member = archive.extractfile(f"{self.directory}/{name}")
                if member is None:
                    raise DataError(f"{path}: {name} is not a file")
                return member.read()
        except KeyError as error:
            raise DataError(f"{path} holds no {self.directory}/{name}") from error
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
