"""Prepared token files: where they are, and opening them as memory maps.

A prepared directory holds ``train.bin`` and ``validation.bin`` (raw little-endian integers),
``tokenizer.json`` unless tokens are bytes, and ``manifest.json``. It appears by one rename, so a
directory with a manifest is complete; sizes are checked whenever it is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsepretrain.data.encoding import open_codec
from sparsepretrain.errors import DataError

FORMAT = 1
"""Version of the layout; part of every directory's name, so that others are never opened."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenData:
    """Prepared data, opened. ``decode`` turns tokens into text again."""

    name: str
    directory: Path
    fingerprint: str
    """16 hexadecimal digits of the contents: equal tokens and tokenizer, equal fingerprint."""
    vocab_size: int
    """Every token is below this (``data.vocab_size``; a small text may use fewer)."""
    tokens: dict[str, np.ndarray]
    """Split -> read-only memory map of its tokens (uint8, uint16 or uint32)."""
    tokenizer_file: Path | None
    """tokenizer.json of the ``tokenizers`` library; None: tokens are bytes."""
    end_of_text: int | None
    """Token after each document."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the tokens ``ids``."""
        return open_codec(self.tokenizer_file).decode([int(i) for i in ids])


def cache_directory() -> Path:
    """``$SPARSEPRETRAIN_CACHE_DIR``, else ``sparsepretrain`` in the user's cache directory."""
    own = os.environ.get("SPARSEPRETRAIN_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if not base or not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.cache")
    return Path(base, "sparsepretrain")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest unsigned little-endian dtype that holds every token."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def is_prepared(directory: Path) -> bool:
    """Whether ``directory`` was completed; its files may have been damaged since."""
    return (directory / MANIFEST).is_file()


def open_tokens(directory: Path) -> TokenData:
    """Open a prepared directory.

    Raises:
        DataError: a file is missing, or its size is not the recorded one.
    """
    manifest = _read_manifest(directory)
    dtype = np.dtype(manifest["dtype"])
    tokens = {}
    for split, count in manifest["tokens"].items():
        file = directory / f"{split}.bin"
        _check_size(file, count * dtype.itemsize, manifest["name"])
        tokens[split] = (
            np.memmap(file, dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)
        )
    tokenizer = None
    if manifest["tokenizer_bytes"] is not None:
        tokenizer = directory / TOKENIZER
        _check_size(tokenizer, manifest["tokenizer_bytes"], manifest["name"])
    return TokenData(
        name=manifest["name"],
        directory=directory,
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
        tokens=tokens,
        tokenizer_file=tokenizer,
        end_of_text=manifest["end_of_text"],
    )


def _read_manifest(directory: Path) -> dict[str, Any]:
    file = directory / MANIFEST
    try:
        manifest = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        manifest = {}
    if manifest.get("format") != FORMAT:
        raise DataError(f"{file} is missing or damaged: delete {directory}")
    return manifest


def _check_size(file: Path, expected: int, name: str) -> None:
    try:
        actual: int | None = file.stat().st_size
    except OSError:
        actual = None
    if actual != expected:
        found = "is missing" if actual is None else f"has {actual} bytes"
        raise DataError(
            f"{file} {found}, expected {expected} bytes: delete {file.parent} or run "
            f"`sparsepretrain prepare data={name}` (with the data options of this run) again"
        )
