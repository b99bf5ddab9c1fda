"""Kinds of binary files by their first bytes, and encodings that zero bytes give away."""

from __future__ import annotations

import codecs

from sparsepretrain.data.sources._compressed import OPENERS

HEAD = 4096
"""Bytes at the start of a file that are inspected."""

_UNPACK = "unpack it and name the text files"
_RECOMPRESS = "decompress it, or use .gz, .bz2, .xz or .zst"
_ROWS = "name it .parquet and read its rows (text: data=document_files data.path=parquet)"
_NO_TEXT = "name text files"
_KINDS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"PK\x03\x04", "a zip archive (also .docx, .xlsx, .epub, .npz, .pt)", _UNPACK),
    (0, b"PK\x05\x06", "an empty zip archive", _NO_TEXT),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4", _RECOMPRESS),
    (0, b"\x02\x21\x4c\x18", "compressed by lz4", _RECOMPRESS),
    (0, b"\x1f\x9d", "compressed by compress (.Z)", _RECOMPRESS),
    (0, b"LZIP", "compressed by lzip", _RECOMPRESS),
    (0, b"\x89LZO\x00", "compressed by lzop", _RECOMPRESS),
    (0, b"\xff\x06\x00\x00sNaPpY", "compressed by snappy", _RECOMPRESS),
    (1, b"\x2a\x4d\x18", "compressed with a skippable first frame (pzstd, lz4)", _RECOMPRESS),
    (0, b"%PDF-", "a PDF", "convert it to text (pdftotext)"),
    (0, b"PAR1", "a Parquet file", _ROWS),
    (0, b"ARROW1\0\0", "an Arrow (Feather) file", "write its rows as JSON Lines or Parquet"),
    (0, b"FEA1", "a Feather file", "write its rows as JSON Lines or Parquet"),
    (0, b"SQLite format 3\0", "an SQLite database", "write its rows as JSON Lines or Parquet"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", "write its rows as JSON Lines or Parquet"),
    (0, b"\x93NUMPY", "a NumPy array", _NO_TEXT),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", _NO_TEXT),
    (0, b"\xff\xd8\xff", "a JPEG image", _NO_TEXT),
    (0, b"GIF8", "a GIF image", _NO_TEXT),
    (0, b"\x7fELF", "a program (ELF)", _NO_TEXT),
    *((0, bytes([0x80, n]), "a Python pickle", _NO_TEXT) for n in range(2, 6)),
)
"""Offset and bytes that mark a kind of file, its name, and the remedy."""
_COMPRESSIONS = dict(zip(OPENERS, ("gzip", "bzip2", "xz", "Zstandard"), strict=True))


def binary_kind(head: bytes, outer: bytes = b"", name: str = "") -> str | None:
    """Return the kind of a binary file and the remedy, or None if the kind is unknown.

    Call this for a file that is no text: some texts begin with such bytes, too.

    Args:
        head: first bytes of the file, decompressed.
        outer: first bytes as stored; differ if the file is compressed.
        name: of the file.
    """
    around = _compression(outer)
    inner = _compression(head)
    within = f", compressed by {around}" if around else ""
    if around and inner:
        return f"is {inner} within {around}: decompress it once"
    for offset, magic, kind, remedy in _KINDS:
        if head.startswith(magic, offset) and (offset != 1 or head[0] & 0xF0 == 0x50):
            return f"is {kind}{within}: {remedy}"
    # UTF-32 of "]" begins with the same bytes; an unknown size is eight bytes 0xff
    if head.startswith(b"\x5d\0\0") and (
        name.endswith((".lzma", ".tlz")) or head[5:13] == b"\xff" * 8
    ):
        return f"is compressed by lzma{within}: {_RECOMPRESS}"
    return None


def _compression(head: bytes) -> str | None:
    return next((kind for magic, kind in _COMPRESSIONS.items() if head.startswith(magic)), None)


def known_encoding(head: bytes) -> str | None:
    """Return the encoding that the first bytes of a file prove, as iconv names it, or None.

    Proofs are a byte-order mark, and zero bytes at fixed places between characters of text. An
    8-bit encoding has neither: a wrong guess would convert every text to another one.
    """
    # the mark of UTF-32 begins with that of UTF-16
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        text = _decoded(head, encoding)
        # integers, such as token ids, are characters, too, but rarely below U+0100
        if _is_text(text) and sum(c < "\u0100" for c in text) > 0.75 * len(text):
            return encoding
    return None


def _decoded(head: bytes, encoding: str) -> str:
    """Return the text of the first bytes, which may end within a character; "" if impossible."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head[:HEAD])
    except UnicodeDecodeError:
        return ""


def _is_text(text: str) -> bool:
    """Return True if nearly all characters are printable or white space."""
    shown = sum(c.isprintable() or c.isspace() for c in text)
    return bool(text) and shown >= 0.95 * len(text)


def is_text_with_zeros(data: bytes) -> bool:
    """Return True if data is UTF-8 text but for a few zero bytes; some binary data are not."""
    zeros = data.count(0)
    text = data.replace(b"\0", b"").decode(errors="replace")
    return zeros <= len(data) / 8 and "\ufffd" not in text[4:-4] and _is_text(text)
