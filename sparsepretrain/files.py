"""Atomic writes, and the directory in which this user's files are cached."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
