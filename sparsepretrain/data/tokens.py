"""Prepared token files, opened as memory maps.

A prepared directory holds ``<split>.bin`` (tokens) and ``<split>.bounds`` (where its documents
begin and end) of each split as raw little-endian integers, ``tokenizer.json`` unless tokens are
bytes, ``manifest.json``, and the raw targets of held-out pairs. It appears by one rename, so a
directory with a manifest is complete. Checksums are compared before it is opened, unless size,
modification time and inode of every file equal those in ``verified.json``, written after the last
successful check.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsepretrain.data.encoding import open_codec
from sparsepretrain.errors import DataError
from sparsepretrain.files import read_json, write_atomic

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
VERIFIED = "verified.json"
"""File -> [bytes, modification time in ns, inode] at the last successful check."""
BOUND = np.dtype("<i8")
"""Type of the entries of ``<split>.bounds``."""


class Damaged(DataError):
    """Prepared data was changed or lost; preparing again repairs it."""

    def __init__(self, directory: Path, problem: str) -> None:
        self.problem = problem
        name = directory.name.rpartition("-")[0]
        super().__init__(
            f"{problem}: delete {directory} or run `sparsepretrain prepare data={name}` (with the "
            "data options of this run) again"
        )


@dataclass(frozen=True, slots=True)
class TokenData:
    """Opened prepared data."""

    name: str
    directory: Path
    fingerprint: str
    """16 hexadecimal digits: hash of tokens and tokenizer."""
    vocab_size: int
    """Exclusive upper bound of the tokens: ``data.vocab_size``."""
    tokens: dict[str, np.ndarray]
    """Split -> read-only memory map (uint8, uint16 or uint32)."""
    tokenizer_file: Path | None
    """tokenizer.json of the ``tokenizers`` library; None: tokens are bytes."""
    end_of_text: int | None
    """Token after each document."""
    bounds: dict[str, np.ndarray]
    """Split -> read-only memory map (documents + 1) of int64: document i is tokens[bounds[i] :
    bounds[i + 1]], its end-of-text token included; only the last document may lack one."""
    references: dict[str, Path] = field(default_factory=dict)
    """Held-out split of pairs -> its raw targets, each followed by byte 0."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the tokens ``ids``."""
        return open_codec(self.tokenizer_file).decode([int(i) for i in ids])

    def documents(self, split: str) -> int:
        """Return the number of documents of a split."""
        return len(self.bounds[split]) - 1


def open_tokens(directory: Path, *, known: bool = False) -> TokenData:
    """Compare the files of a prepared directory with their checksums, and open it.

    Args:
        directory: see the description of this module.
        known: trust files that have not changed since the last successful check.

    Raises:
        Damaged: a file is missing or has other contents.
    """
    manifest = _read_manifest(directory)
    sums = manifest["sha256"] | manifest["bounds"] | manifest["references"]
    _verify(directory, sums, known=known)
    dtype = np.dtype(manifest["dtype"])
    tokens: dict[str, np.ndarray] = {}
    bounds: dict[str, np.ndarray] = {}
    for split, count in manifest["tokens"].items():
        file = directory / f"{split}.bin"
        tokens[split] = np.memmap(file, dtype, mode="r") if count else np.zeros(0, dtype)
        bounds[split] = np.memmap(directory / f"{split}.bounds", BOUND, mode="r")
    return TokenData(
        manifest["name"],
        directory,
        manifest["fingerprint"],
        manifest["vocab_size"],
        tokens,
        directory / TOKENIZER if TOKENIZER in manifest["sha256"] else None,
        manifest["end_of_text"],
        bounds,
        {file.partition(".")[0]: directory / file for file in manifest["references"]},
    )


def _verify(directory: Path, sums: dict[str, str], *, known: bool) -> None:
    remembered = None
    with contextlib.suppress(OSError, ValueError):
        remembered = read_json(directory / VERIFIED)
    try:
        stats = {name: os.stat(directory / name) for name in sums}
        stamps = {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()}
        if known and remembered == stamps:
            return
        for name, expected in sums.items():
            with open(directory / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            if digest.hexdigest() != expected:
                raise Damaged(directory, f"{directory / name} does not match its checksum")
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        raise Damaged(directory, problem) from error
    with contextlib.suppress(OSError):  # a read-only cache is checked every time
        write_atomic(directory / VERIFIED, json.dumps(stamps), tag=f".{os.getpid()}")


def fingerprint(dtype: str, sums: dict[str, str]) -> str:
    """Return 16 hexadecimal digits that identify dtype and files (name -> SHA-256)."""
    return hashlib.sha256(json.dumps([dtype, sorted(sums.items())]).encode()).hexdigest()[:16]


def _read_manifest(directory: Path) -> dict[str, Any]:
    file = directory / MANIFEST
    try:
        manifest = read_json(file)
        is_whole = manifest["fingerprint"] == fingerprint(manifest["dtype"], manifest["sha256"])
    except (OSError, ValueError, KeyError):
        is_whole = False
    if not is_whole:
        raise Damaged(directory, f"{file} is missing or damaged")
    return manifest
