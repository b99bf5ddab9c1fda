"""Parallel text in two files with corresponding lines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.data.source import SPLITS, Pairs, PairSource, TokenOptions
from sparsepretrain.data.sources._compressed import BOM, opened
from sparsepretrain.data.sources._files import CONVERT, TextFile, refuse_other, refuse_shared
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class Options(TokenOptions):
    """Options of ``source: parallel_files``."""

    train: tuple[str, str]
    validation: tuple[str, str] | None
    test: tuple[str, str] | None


@register("source", "parallel_files")
class ParallelFiles(PairSource):
    """One pair per line of both files."""

    Options: ClassVar[type[TokenOptions]] = Options

    def state(self) -> list[Any]:
        files = [
            (split, TextFile.at(path, os.path.basename(path), f"data.{split}"))
            for split, paths in self._files().items()
            for path in paths
        ]
        refuse_shared((f"data.{split}", file) for split, file in files)
        return [[split, *file.stamp] for split, file in files]

    def pairs(self) -> dict[str, Pairs]:
        """Read all files."""
        splits = {}
        for split, paths in self._files().items():
            source, target = (_sentences(path, f"data.{split}") for path in paths)
            if len(source) != len(target):
                counts = f"{paths[0]} has {len(source)} lines, {paths[1]} has {len(target)}"
                raise DataError(f"data.{split}: expected corresponding lines, but {counts}")
            if not source:
                raise DataError(f"data.{split}: {paths[0]} has no lines")
            splits[split] = list(zip(source, target, strict=True))
        return splits

    def _files(self) -> dict[str, list[str]]:
        named = {split: getattr(self.options, split) for split in SPLITS}
        return {k: [os.path.expanduser(p) for p in paths] for k, paths in named.items() if paths}


def _sentences(path: str, key: str) -> list[str]:
    """Return the stripped lines of a file; only line feeds end a line."""
    with opened(path, key) as file:
        lines = file.readlines()
    if lines:
        lines[0] = lines[0].removeprefix(BOM)
    returns = sum(line.strip().count(b"\r") for line in lines)
    if lines and returns >= len(lines):  # corpora of the web have a few within sentences
        raise DataError(
            f"{path}: its lines end in carriage returns (old Mac): convert them to line feeds, "
            f"such as `tr '\\r' '\\n'`"
        )
    sentences = []
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            refuse_other(path)
            raise DataError(f"{place}: not UTF-8 text: {CONVERT}") from error
        if not text:
            raise DataError(f"{place}: empty sentence: remove the pair")
        if "\0" in text:
            refuse_other(path)
            raise DataError(f"{place}: contains a NUL byte, which ends a sentence")
        sentences.append(text)
    return sentences
