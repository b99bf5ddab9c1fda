"""Plain text in files: compressed ones are read, what is no UTF-8 text is refused with its line."""

import bz2
import gzip
import lzma

import numpy as np
import pytest
import zstandard

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


NO_TEXT = {
    "NUL": (b"a line\nsheep\0goats\n", 2, "a NUL byte"),
    "UTF-16": ("a line\nsheep\n".encode("utf-16"), 1, "iconv -f UTF-16"),
    "UTF-16LE": ("a line\nsheep\n".encode("utf-16-le"), 1, "iconv -f UTF-16LE"),
    "UTF-16BE": ("a line\nsheep\n".encode("utf-16-be"), 1, "iconv -f UTF-16BE"),
    "NUL in UTF-8": ("a line\nSchäfer\0und Schaf\n".encode(), 2, r"tr -d '\\000'"),
    "Latin-1": ("a line\nSchäfer\n".encode("latin-1"), 2, "iconv -f LATIN1"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), 1, "not UTF-8|NUL"),
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


def test_a_line_that_is_cut_within_a_character_is_text(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "SHARD_BYTES", 100)
    monkeypatch.setattr(_files, "LONGEST_LINE", 7)
    rng = np.random.default_rng(0)
    letters = ["a", "ä", "羊", "🐑"]
    text = "".join(letters[i] for i in rng.integers(0, 4, 1000)).encode()
    (tmp_path / "a.txt").write_bytes(text)
    assert b"".join(read(source(tmp_path / "a.txt", validation=0.0))["train"]) == text


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
