"""Rows of local JSON and Parquet files."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from sparsepretrain.data import preparation
from sparsepretrain.data.preparation import prepare
from sparsepretrain.data.sources import _rows
from sparsepretrain.errors import DataError

ROWS = [{"text": f"row {i} é", "n": i} for i in range(50)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(path, kind="json", **options):
    return [row for piece in _rows.cut(str(path), kind) for row in piece.read(**options)]


@pytest.mark.parametrize(
    ("content", "first"),
    [
        (LINES, 1),
        (b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"), 1),
        (LINES[:-1], 1),
        (b"\n  \n" + LINES.replace(b"}\n", b"}\n\n"), 3),
        (gzip.compress(LINES), 1),
        (gzip.compress(LINES[:99]) + gzip.compress(LINES[99:]), 1),
        (bz2.compress(LINES), 1),
        (lzma.compress(LINES), 1),
        (json.dumps(ROWS, indent=1).encode(), None),
        (b"\xef\xbb\xbf" + gzip.decompress(gzip.compress(json.dumps(ROWS).encode())), None),
    ],
    ids=["plain", "bom", "end", "blank", "gzip", "members", "bzip2", "xz", "array", "bom_array"],
)
@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_every_form_of_json_has_the_same_rows(tmp_path, monkeypatch, content, first, size):
    monkeypatch.setattr(_rows, "SHARD_BYTES", size)
    file = tmp_path / "rows"  # the content decides, as for links into the cache of the hub
    file.write_bytes(content)
    places, rows = zip(*read(file), strict=True)
    assert list(rows) == ROWS
    assert sum(piece.rows for piece in _rows.cut(str(file), "json")) == len(ROWS)
    assert places[0] == (f"{file}, row 0" if first is None else f"{file}, line {first}")


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(st.sampled_from([b"", b"  ", b'{"a": 1}', b'{"a": "' + b"x" * 40 + b'"}'])),
    size=st.integers(1, 60),
)
def test_pieces_are_the_rows_with_their_lines(tmp_path_factory, lines, size):
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    expected = [(f"{file}, line {i}", json.loads(x)) for i, x in enumerate(lines, 1) if x.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_rows, "SHARD_BYTES", size)
        pieces = _rows.cut(str(file), "json")
    assert [row for piece in pieces for row in piece.read()] == expected
    for piece in pieces:
        found = list(piece.read())
        assert len(found) == piece.rows
        assert list(piece.read(wanted=lambda index: index % 2 == 1)) == found[1::2]


def test_parquet_is_read_by_row_groups(tmp_path):
    file = tmp_path / "rows[1].parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=20)
    assert [piece.rows for piece in _rows.cut(str(file), "parquet")] == [20, 20, 10]
    found = read(file, "parquet")
    assert found == [(f"{file}, row {i}", row) for i, row in enumerate(ROWS)]
    odd = read(file, "parquet", columns=["n"], wanted=lambda index: index % 2 == 1)
    assert [row for _, row in odd] == [{"n": i} for i in range(1, 50, 2)]
    with pytest.raises(DataError, match=r"no column 'body' \(it has 'text', 'n'\)"):
        read(file, "parquet", columns=["body"])


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (LINES + b'{"text": \n' + LINES, "json", ", line 51: expected one JSON object per line: "),
        (LINES + b"\n\n7\n", "json", ", line 53: expected a JSON object, got int"),
        (LINES + b'{"text": "\xff"}', "json", ", line 51: not UTF-8 text"),
        (gzip.compress(LINES + b"[]\n"), "json", ", line 51: expected a JSON object, got list"),
        (gzip.compress(LINES)[:-20], "json", " is damaged: "),
        (gzip.compress(LINES)[:40] + b"x" * 40, "json", " is damaged: "),
        (lzma.compress(LINES)[:-40], "json", " is damaged: "),
        (b"\x28\xb5\x2f\xfd" + LINES, "json", " is damaged: zstd"),
        (b"[" + LINES, "json", ": expected one JSON object per line, or a JSON array of objects: "),
        (b"[" * 99999, "json", ": expected one JSON object per line, or a JSON array of objects: "),
        (LINES.decode().encode("utf-16"), "json", ": expected UTF-8 text, got UTF-16: "),
        (LINES.decode().encode("utf-16-le"), "json", ": expected UTF-8 text, got UTF-16LE: "),
        (LINES.decode().encode("utf-32"), "json", ": expected UTF-8 text, got UTF-32: "),
        (b"PK\x03\x04" + LINES, "json", " is a zip archive "),
        (gzip.compress(b"PK\x03\x04" + LINES), "json", " is a zip archive "),
        (gzip.compress(gzip.compress(LINES)), "json", " is gzip within gzip: "),
        (b"PAR1" + LINES, "json", " is a Parquet file: name it .parquet"),
        (LINES, "parquet", " cannot be read as Parquet: "),
        (b"", "parquet", " cannot be read as Parquet: "),
    ],
    # gzip writes the time into its data, and pytest puts bytes into names: workers of one run,
    # which collect in different seconds, would disagree about the tests
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
def test_the_file_and_line_of_a_problem_are_named(tmp_path, content, kind, message):
    file = tmp_path / "rows"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(file, kind)
    assert str(caught.value).startswith(f"{file}{message}") and "\n" not in str(caught.value)


def test_a_file_that_shrinks_is_an_error(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(LINES)
    (piece,) = _rows.cut(str(file), "json")
    file.write_bytes(LINES[:99])
    with pytest.raises(DataError, match=r"line 4|changed while it was read"):
        list(piece.read())


def test_a_large_compressed_file_is_tokenized_in_batches(options, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH", 100)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    sizes, original = [], preparation.open_codec

    def opened(file):
        codec = original(file)
        encode = codec.encode
        codec.encode = lambda texts: sizes.append(sum(map(len, texts))) or encode(texts)
        return codec

    monkeypatch.setattr(preparation, "open_codec", opened)
    changes = {"path": "json", "data_files": [str(tmp_path / "a.jsonl.gz")], "tokenizer": "bytes"}
    data = prepare(options("openwebtext", **changes, validation=0.0))
    assert data.documents("train") == 50 and len(sizes) > 3 and max(sizes) < 120


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "id"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="2 columns are called 'text'"):
        read(tmp_path / "rows.parquet", "parquet", columns=["text"])
    ((_, row),) = read(tmp_path / "rows.parquet", "parquet", columns=["id"])
    assert row == {"id": "c"}
