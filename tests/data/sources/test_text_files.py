"""Plain text in files: compressed ones are read, what is no UTF-8 text is refused with its line."""

import bz2
import gzip
import io
import lzma
import pickle
import re
import tarfile
import zipfile

import numpy as np
import pyarrow
import pytest
import zstandard
from PIL import Image
from pyarrow import feather, parquet

from sparsepretrain.data.sources import _files
from sparsepretrain.data.sources._files import require_text
from sparsepretrain.data.sources.text_files import Options, TextFiles
from sparsepretrain.errors import DataError, SparsePretrainWarning

TEXT = "".join(f"line {i} of the shepherd: sheep, Schäfer, 羊\n" for i in range(2000)).encode()
COMPRESS = {
    "plain": lambda data: data,
    "gz": gzip.compress,
    "gz members": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "zst frames": lambda data: b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (data[:1000], data[1000:])
    ),
}


def source(*files, validation=0.1, **more):
    options = {
        "name": "mine",
        "source": "text_files",
        "tokenizer": "bytes",
        "vocab_size": 256,
        "end_of_text": None,
        "seed": 0,
        "files": [str(file) for file in files],
        "validation": validation,
        "test": None,
    }
    return TextFiles(Options(**options | more))


def read(made):
    """Split -> documents as bytes."""
    splits = {}
    for shard in made.shards():
        documents = splits.setdefault(shard.split, [b""])
        for text, last in made.documents(shard):
            documents[-1] += text
            if last:
                documents.append(b"")
    return {split: [d for d in documents if d] for split, documents in splits.items()}


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("shard_bytes", [1 << 20, 1000])
def test_a_compressed_file_gives_the_documents_of_the_plain_one(
    tmp_path, monkeypatch, kind, shard_bytes
):
    monkeypatch.setattr(_files, "SHARD_BYTES", shard_bytes)
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.bin").write_bytes(COMPRESS[kind](TEXT))
    expected, got = read(source(tmp_path / "a.txt")), read(source(tmp_path / "b.bin"))
    assert got == expected
    assert b"".join(got["train"] + got["validation"]) == TEXT
    assert 0.08 < len(got["validation"][0]) / len(TEXT) < 0.12


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "xz"])
def test_a_truncated_file_is_named(tmp_path, kind):
    file = tmp_path / "a.txt.x"
    file.write_bytes(COMPRESS[kind](TEXT)[:-20])
    with pytest.raises(DataError, match=r"a\.txt\.x is damaged"):
        read(source(file))


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT)
    splits = read(source(tmp_path / "a.txt"))
    assert b"".join(splits["train"] + splits["validation"]) == TEXT


UNKNOWN = "not UTF-8: .*iconv -f ENCODING "
NO_TEXT = {
    "NUL": (b"a line\nsheep\0goats\n", 2, "a NUL byte"),
    "UTF-16": ("a line\nsheep\n".encode("utf-16"), 1, "iconv -f UTF-16"),
    "UTF-16LE": ("a line\nsheep\n".encode("utf-16-le"), 1, "iconv -f UTF-16LE"),
    "UTF-16BE": ("a line\nsheep\n".encode("utf-16-be"), 1, "iconv -f UTF-16BE"),
    "NUL in UTF-8": ("a line\nSchäfer\0und Schaf\n".encode(), 2, r"tr -d '\\000'"),
    "UTF-16 with accents": ("une règle: “é”\n".encode("utf-16-le"), 1, "iconv -f UTF-16LE"),
    "UTF-32": ("a line\n羊\n".encode("utf-32"), 1, "got UTF-32: .*iconv -f UTF-32 "),
    "UTF-32 BE mark": (b"\0\0\xfe\xff" + "羊\n".encode("utf-32-be"), 1, "iconv -f UTF-32 "),
    "UTF-32LE": ("] line\n羊🐑\n".encode("utf-32-le"), 1, "iconv -f UTF-32LE"),
    "UTF-32BE": ("a line\n羊🐑\n".encode("utf-32-be"), 1, "iconv -f UTF-32BE"),
    "Latin-1": ("a line\nSchäfer\n".encode("latin-1"), 2, UNKNOWN),
    "GB18030": ("a line\n羊吃草\n".encode("gb18030"), 2, UNKNOWN),
    "Shift JIS": ("a line\n羊は草を\n".encode("shift_jis"), 2, UNKNOWN),
    "KOI8": ("a line\nовца\n".encode("koi8-r"), 2, UNKNOWN),
    "UTF-16 of Chinese": ("羊吃草，山羊吃蓟。\n".encode("utf-16-le"), 1, UNKNOWN),
    "token ids": (np.arange(1000, 50000, 7, dtype="<i4").tobytes(), 1, UNKNOWN),
    "numbers": (np.arange(300, dtype="<i4").tobytes(), 1, "convert the file to UTF-8 if it is"),
    "truncated": (b"a line\n" + "羊".encode()[:2], 2, "not UTF-8"),
}


@pytest.mark.parametrize("kind", NO_TEXT)
@pytest.mark.parametrize("compressed", [False, True])
def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path, kind, compressed):
    data, line, words = NO_TEXT[kind]
    file = tmp_path / "a.txt"
    file.write_bytes(gzip.compress(data) if compressed else data)
    with pytest.raises(DataError, match=rf"a\.txt, line {line}: expected UTF-8 text.*({words})"):
        read(source(file, validation=0.0))


def archive(kind, name="a.txt"):
    """A tar or zip archive of one text."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as made:
            made.writestr(name, TEXT[:200])
    else:
        with tarfile.open(fileobj=buffer, mode="w", format=kind) as made:
            about = tarfile.TarInfo(name)
            about.size = 200
            made.addfile(about, io.BytesIO(TEXT[:200]))
    return buffer.getvalue()


def image(kind):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, kind)
    return buffer.getvalue()


def table(write):
    buffer = io.BytesIO()
    write(pyarrow.table({"text": ["sheep"]}), buffer)
    return buffer.getvalue()


REST = bytes(range(256))
BINARY = {
    "zip": (archive("zip"), "is a zip archive .*: unpack it"),
    "tar": (archive(tarfile.USTAR_FORMAT), "is a tar archive: unpack it"),
    "gnu tar": (archive(tarfile.GNU_FORMAT), "is a tar archive: unpack it"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + REST, "is a 7z archive: unpack it"),
    "rar": (b"Rar!\x1a\x07\x01\0" + REST, "is a rar archive: unpack it"),
    "lz4": (b"\x04\x22\x4d\x18" + REST, "is compressed by lz4: decompress it"),
    "compress": (b"\x1f\x9d\x90" + REST, r"is compressed by compress \(\.Z\): decompress it"),
    "lzma": (lzma.compress(TEXT, lzma.FORMAT_ALONE), "is compressed by lzma: decompress it"),
    "pzstd": (
        b"\x50\x2a\x4d\x18\x04\0\0\0" + REST,
        "is compressed with a skippable first frame .*: decompress it",
    ),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + REST, "is a PDF: convert it to text"),
    "Parquet": (table(parquet.write_table), "is a Parquet file: name it .parquet"),
    "Feather": (table(feather.write_feather), r"is an Arrow \(Feather\) file: write its rows"),
    "SQLite": (b"SQLite format 3\0" + REST, "is an SQLite database"),
    "PNG": (image("PNG"), "is a PNG image"),
    "JPEG": (image("JPEG"), "is a JPEG image"),
    "pickle": (pickle.dumps(["a"] * 9), "is a Python pickle"),
}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("around", ["", "gzip", "xz", "bzip2", "Zstandard"])
def test_binary_files_are_named_with_what_to_do(tmp_path, kind, around):
    content, words = BINARY[kind]
    within = {"": "plain", "gzip": "gz", "bzip2": "bz2", "Zstandard": "zst"}.get(around, around)
    file = tmp_path / "a.txt"
    file.write_bytes(COMPRESS[within](content))
    with pytest.raises(DataError, match=rf"a\.txt {words.partition(': ')[0]}") as caught:
        read(source(file, validation=0.0))
    message = str(caught.value)
    assert (f", compressed by {around}: " in message) is bool(around) and "\n" not in message
    assert "iconv" not in message and "tr -d" not in message
    assert re.search(words.rpartition(": ")[2], message)


def test_lzma_of_a_known_size_is_known_by_its_suffix(tmp_path):
    content = bytearray(lzma.compress(TEXT, lzma.FORMAT_ALONE))
    content[5:13] = len(TEXT).to_bytes(8, "little")
    (tmp_path / "a.txt.lzma").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt\.lzma is compressed by lzma: decompress it"):
        read(source(tmp_path / "a.txt.lzma", validation=0.0))


@pytest.mark.parametrize("outer", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("inner", ["gz", "bz2", "xz", "zst"])
def test_files_that_are_compressed_twice_are_named(tmp_path, outer, inner):
    names = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "Zstandard"}
    file = tmp_path / "a.txt"
    file.write_bytes(COMPRESS[outer](COMPRESS[inner](TEXT)))
    words = rf"a\.txt is {names[inner]} within {names[outer]}: decompress it once"
    with pytest.raises(DataError, match=words):
        read(source(file, validation=0.0))


@pytest.mark.parametrize(
    "begin", ["PK", "%PDF-1.4 is a format", "PAR1", "BZ", "Rar!", "]]", "GIF8"]
)
def test_texts_that_begin_like_a_binary_file_are_texts(tmp_path, begin):
    text = f"{begin}\nand sheep\n".encode()
    (tmp_path / "a.txt").write_bytes(text)
    assert read(source(tmp_path / "a.txt", validation=0.0)) == {"train": [text]}


def test_a_late_wrong_byte_is_named_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT * 20 + b"\xff\n")
    with pytest.raises(DataError, match=r"line 40001: .*iconv -f ENCODING"):
        read(source(tmp_path / "a.txt", validation=0.0))


def test_line_ends_of_the_old_mac_are_text(tmp_path):
    text = TEXT.replace(b"\n", b"\r")
    (tmp_path / "a.txt").write_bytes(text)
    splits = read(source(tmp_path / "a.txt"))
    assert b"".join(splits["train"] + splits["validation"]) == text


def test_a_line_that_is_cut_within_a_character_is_text(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "SHARD_BYTES", 100)
    monkeypatch.setattr(_files, "LONGEST_LINE", 7)
    rng = np.random.default_rng(0)
    letters = ["a", "ä", "羊", "🐑"]
    text = "".join(letters[i] for i in rng.integers(0, 4, 1000)).encode()
    (tmp_path / "a.txt").write_bytes(text)
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(text)
    for name, validation in ("a.txt", 0.0), ("a.txt", 0.3), ("b.txt.gz", 0.0):
        made = source(tmp_path / name, validation=validation)
        pieces = [piece for shard in made.shards() for piece, _ in made.documents(shard)]
        assert len(pieces) > 5 and b"".join(pieces) == text
        assert all(piece.decode() for piece in pieces), "whole characters, as a tokenizer sees them"


def test_text_that_is_cut_and_wrong_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("羊羊".encode()[:4] + b"\xff" + b"a" * 10)
    with pytest.raises(DataError, match="line 1"):
        require_text(file.read_bytes()[1:], str(file), 1)


def test_what_a_glob_does_not_find_is_explained(tmp_path):
    folder = tmp_path / "data [v2]"
    folder.mkdir()
    (folder / "a.txt").write_bytes(TEXT)
    assert read(source(folder / "a.txt"))["train"], "a file may have any name"
    with pytest.raises(DataError, match=r"\[ is a wildcard.*data \[\[\]v2\]/\*\.txt"):
        read(source(f"{folder}/*.txt"))
    assert read(source(f"{tmp_path}/data [[]v2]/*.txt"))["train"]
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"gone\.txt is a link to a file that does not exist"):
        read(source(f"{tmp_path}/data [[]v2]/*.txt"))


@pytest.mark.parametrize("end", ["jsonl", "ndjson", "jsonl.xz", "json.gz", "parquet"])
def test_files_of_rows_that_a_glob_finds_are_one_warning(tmp_path, end):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.json").write_text("[]")  # corpora of code have these
    (tmp_path / f"c.{end}").write_bytes(b'{"text": "sheep"}\n')
    with pytest.warns(SparsePretrainWarning, match=rf"1 files hold rows, such as .*c\.{end}"):
        source(tmp_path / "*").find()


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst", "txt", "mark"])
def test_files_without_text_are_as_good_as_absent(tmp_path, kind):
    empty = tmp_path / f"empty.txt.{kind}"
    writers = {"gz": gzip, "bz2": bz2, "xz": lzma, "zst": zstandard}
    content = b"\xef\xbb\xbf" if kind == "mark" else b""
    empty.write_bytes(writers[kind].compress(b"") if kind in writers else content)
    with pytest.raises(DataError, match="all files are empty"):
        read(source(empty))
    other = tmp_path / "a.txt"
    other.write_text("hello sheep and goats\n" * 400)
    made = source(empty, other)
    assert [file.path for file in made.files] == [str(other)]
    assert {shard.split for shard in made.shards()} == {"train", "validation"}


@pytest.mark.parametrize("text", ["日本", "é", "日本語のテキスト" * 3, "a日", "🐑🐐"])
@pytest.mark.parametrize("share", [0.1, 0.34, 0.5, 0.9])
def test_a_text_of_one_line_is_cut_between_characters(tmp_path, text, share):
    file = tmp_path / "a.txt"
    file.write_text(text, encoding="utf-8")
    made = source(file, validation=share)
    pieces = [
        b"".join(part for part, _ in made.documents(shard)).decode() for shard in made.shards()
    ]
    assert "".join(pieces) == text
