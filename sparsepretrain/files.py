"""Atomic writes, and the directory in which this user's files are cached."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NAMES: dict[type, str] = {dict: "object", list: "array"}
"""Kinds of JSON values, in errors."""

LONGEST_NAME = 200
"""Bytes of a directory's name; file systems allow 255, and temporary names are longer."""


def is_plain_name(text: str) -> bool:
    """True if ``text`` can be the name of a directory that is neither hidden nor two lines long."""
    plain = bool(text) and "/" not in text and not text.startswith(".") and text.isprintable()
    return plain and len(text.encode()) <= LONGEST_NAME


def cache_directory() -> Path:
    """Return ``$SPARSEPRETRAIN_CACHE_DIR``, or ``sparsepretrain`` in the user's cache directory."""
    own = os.environ.get("SPARSEPRETRAIN_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if not base or not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.cache")
    return Path(base, "sparsepretrain")


def parse_json(text: str | bytes, kind: type[T]) -> T:
    """Return the value that ``text`` writes in JSON.

    Raises:
        ValueError: ``text`` is not JSON, nested too deeply, or no ``kind``.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"expected a JSON {NAMES[kind]}, got {type(value).__name__}")
    return value


def read_json(path: Path, kind: type[T]) -> T:
    """Return the value in a JSON file.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, which may have no end.
        ValueError: see :func:`parse_json`; or the file is not UTF-8.
    """
    require_file(path)
    return parse_json(path.read_text(encoding="utf-8"), kind)


def require_file(path: Path) -> None:
    """Refuse what is no regular file: reading a pipe may never end.

    Raises:
        OSError: ``path`` is missing, or something else.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def write_atomic(path: Path, content: str | bytes | memoryview, *, tag: str = "") -> None:
    """Write ``path`` so that it has all of ``content`` or is left as it was.

    Written to ``<name><tag>.tmp`` beside it, flushed to disk, then renamed. What a killed process
    leaves is overwritten by the next one.

    Args:
        path: in a directory that exists.
        content: text is written as UTF-8.
        tag: tells apart the temporary files of processes that may write the same path at once.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f"{path.name}{tag}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk: so they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
