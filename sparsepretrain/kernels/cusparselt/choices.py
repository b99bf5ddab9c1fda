"""Chosen algorithms and verdicts in the user's cache directory, one JSON file for each.

Separate files need no lock: ranks that search at the same time replace whole files. A file that
cannot be read or written costs a search, never a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sparsepretrain.files import cache_directory, read_json, write_atomic

Key = dict[str, str | int | bool]
"""Problem, device and versions; see :func:`sparsepretrain.kernels.cusparselt.packed24.fastest`."""


def load_choice(key: Key) -> list[int] | None:
    """Return the numbers of the algorithm chosen for ``key``; None: there is no valid file."""
    numbers = _load(key, "algorithm")
    if not isinstance(numbers, list):
        return None
    return numbers if all(type(number) is int for number in numbers) else None


def save_choice(key: Key, numbers: list[int]) -> None:
    """Write the algorithm chosen for ``key``; without a writable directory, write nothing."""
    _save(key, "algorithm", numbers)


def load_verdict(key: Key) -> str | None:
    """Return the fault that a start-up test found, "" for none; None: there is no valid file."""
    found = _load(key, "fault")
    return found if isinstance(found, str) else None


def save_verdict(key: Key, fault: str) -> None:
    """Write the fault that a start-up test found; without a writable directory, write nothing."""
    _save(key, "fault", fault)


def drop_choice(key: Key) -> None:
    """Remove the file of ``key``, if any."""
    with contextlib.suppress(OSError):
        _file(key).unlink(missing_ok=True)


def _load(key: Key, name: str) -> Any:
    """Return the entry ``name`` of the file of ``key``; None: there is no valid file."""
    try:
        content = read_json(_file(key))
    except (OSError, ValueError):
        return None
    return content.get(name) if content.get("key") == key else None


def _save(key: Key, name: str, value: Any) -> None:
    """Write the file of ``key``."""
    file = _file(key)
    text = json.dumps({"key": key, name: value}, indent=1) + "\n"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text, tag=f".{os.getpid()}")


def _file(key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / "kernels" / "cusparselt" / f"{digest[:16]}.json"
