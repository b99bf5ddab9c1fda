"""Files of text that may be compressed, read as their plain bytes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from sparsepretrain.errors import DataError, needs, reason
from sparsepretrain.files import lfs_pointer

CHUNK = 1 << 20
"""Bytes that are read at a time."""


class Zstandard(io.RawIOBase):
    """Decompressed bytes of a Zstandard file, of one frame or several."""

    def __init__(self, path: str) -> None:
        with needs(path, "zstandard", "zstd"):
            import zstandard
        self._library = zstandard
        self._file = open(path, "rb")  # noqa: SIM115, closed by close()
        self._rewind()

    def _rewind(self) -> None:
        self._file.seek(0)
        self._position = 0
        self._frame: Any = None  # being decompressed; None: between two frames
        self._ready = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: going back decompresses again from the start."""
        return True

    def tell(self) -> int:
        """Return the number of decompressed bytes before the next one."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset from the start, at most to the end."""
        if whence == io.SEEK_CUR:
            offset += self._position
        if offset < self._position:
            self._rewind()
        while self._position < offset and self.read(min(CHUNK, offset - self._position)):
            pass
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; 0 at the end."""
        while not self._ready and self._feed():
            pass
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._position += count
        return count

    def _feed(self) -> bool:
        """Decompress the next compressed bytes; False at the end of the file."""
        unused = b"" if self._frame is None else self._frame.unused_data
        chunk = unused or self._file.read(CHUNK)
        if not chunk:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("it ends within a frame")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._frame.decompress(chunk)
        except self._library.ZstdError as error:
            raise EOFError(str(error)) from error
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _open_zstandard(path: str) -> io.BufferedReader:
    return io.BufferedReader(Zstandard(path))


OPENERS: dict[bytes, Callable[[str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstandard,
}
"""First bytes of a compressed file -> function that opens it. Names may lie: files of the hub's
cache are links to files without a suffix."""
BOM = b"\xef\xbb\xbf"
"""Byte-order mark of UTF-8, which some editors write at the start of a file."""


def irregular(mode: int) -> str:
    """Return the problem of a file that is no regular one, given its ``st_mode``, or "".

    A pipe cannot be read twice and may never end. A directory is left to the system's message.
    """
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    kind = kinds.get(stat.S_IFMT(mode))
    return f"is no regular file but {kind}: write its content to a file" if kind else ""


def _open_regular(path: str) -> BinaryIO:
    """Open a file for reading, unless opening it may block."""
    if problem := irregular(os.stat(path).st_mode):
        raise DataError(f"{path} {problem}")
    return open(path, "rb")


def is_compressed(path: str) -> bool:
    """Return True if the first bytes of a file are those of a compressed one."""
    with _open_regular(path) as file:
        start = file.read(8)
    return any(start.startswith(magic) for magic in OPENERS)


@contextlib.contextmanager
def opened(path: str, key: str = "") -> Iterator[BinaryIO]:
    """Open a file, decompressed; its errors become a DataError with the path.

    Args:
        path: of the file.
        key: configuration key that names it.
    """
    try:
        with _open_regular(path) as plain:
            if problem := lfs_pointer(path):
                raise DataError(f"{path} {problem}")
            start = plain.read(8)
            opener = next((o for magic, o in OPENERS.items() if start.startswith(magic)), None)
            plain.seek(0)
            if opener is None:
                yield plain
                return
        with opener(path) as stream:
            yield stream
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error, key) from error
        raise DataError(f"{path} is damaged: {reason(error)}") from error


def plain_size(path: str) -> int:
    """Return the number of bytes of a file, decompressed; reads a compressed one once."""
    size = 0
    with opened(path) as stream:
        while chunk := stream.read(CHUNK):
            size += len(chunk)
    return size


def unreadable(path: str, error: OSError, key: str = "") -> DataError:
    """Return the error for an unreadable file, given by the configuration key ``key``."""
    where = f"{key}: " if key else ""
    return DataError(f"{where}cannot read {path}: {error.strerror or error}")
