"""Atomic writes, JSON files, and the user's cache directory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_NAME = 200
"""Maximum bytes of a directory name: file systems allow 255, and temporary names are longer."""


def is_plain_name(text: str) -> bool:
    """Return True if ``text`` is usable as the name of a visible directory."""
    plain = bool(text) and "/" not in text and not text.startswith(".") and text.isprintable()
    return plain and len(text.encode()) <= LONGEST_NAME


def cache_directory() -> Path:
    """Return ``$SPARSEPRETRAIN_CACHE_DIR``, or ``sparsepretrain`` in the user's cache directory."""
    directory = os.environ.get("SPARSEPRETRAIN_CACHE_DIR")
    if directory:
        return Path(directory).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "sparsepretrain")


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError for anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file; raise OSError if unreadable, ValueError if not a UTF-8 object."""
    require_file(path)
    return parse_json(path.read_text(encoding="utf-8"))


def require_file(path: Path) -> None:
    """Raise OSError unless ``path`` is a regular file: reading a pipe may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""First line of the file that Git LFS leaves in place of one that was not fetched."""


def lfs_pointer(path: str | Path) -> str:
    """Return the problem of a file that is a pointer of Git LFS, or ""."""
    if os.stat(path).st_size > 1024 or not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    return "is a Git LFS pointer, not the file itself: run git lfs pull there" if is_pointer else ""


def write_atomic(path: Path, content: str | bytes, *, tag: str = "") -> None:
    """Replace ``path`` atomically by ``content`` (text as UTF-8); see :func:`replacing`."""
    with replacing(path, tag=tag) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def writer_tag() -> str:
    """Return a ``tag`` of :func:`replacing` that no other process has, on no machine."""
    return f".{socket.gethostname()}-{os.getpid()}"


@contextlib.contextmanager
def replacing(path: Path, *, tag: str = "") -> Iterator[BinaryIO]:
    """Replace ``path`` atomically: write and flush ``<name><tag>.tmp``, then rename it.

    Args:
        path: file in an existing directory.
        tag: distinguishes temporary files of processes that may write ``path`` concurrently.

    Raises:
        OSError: the write failed; the temporary file is removed.
    """
    temporary = path.with_name(f"{path.name}{tag}.tmp")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
