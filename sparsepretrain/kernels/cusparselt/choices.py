"""Chosen algorithms in the user's cache directory, one JSON file per problem.

A file per problem needs no lock: ranks that search at the same time replace whole files. A file
that cannot be read or written costs a search, never a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from sparsepretrain.files import cache_directory, read_json, write_atomic

Key = dict[str, str | int | bool]
"""Problem, device and versions; see :func:`sparsepretrain.kernels.cusparselt.packed24.fastest`."""


def load_choice(key: Key) -> list[int] | None:
    """Return the numbers of the algorithm chosen for ``key``; None: there is no valid file."""
    try:
        content = read_json(_file(key))
    except (OSError, ValueError):
        return None
    numbers = content.get("algorithm")
    if content.get("key") != key or not isinstance(numbers, list):
        return None
    return numbers if all(type(number) is int for number in numbers) else None


def save_choice(key: Key, numbers: list[int]) -> None:
    """Write the algorithm chosen for ``key``; without a writable directory, write nothing."""
    file = _file(key)
    text = json.dumps({"key": key, "algorithm": numbers}, indent=1) + "\n"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text, tag=f".{os.getpid()}")


def drop_choice(key: Key) -> None:
    """Remove the file of ``key``, if any."""
    with contextlib.suppress(OSError):
        _file(key).unlink(missing_ok=True)


def _file(key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / "kernels" / "cusparselt" / f"{digest[:16]}.json"
