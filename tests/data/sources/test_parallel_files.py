"""Sentence pairs of the user, and what can be wrong with them."""

import json
import sys

import pyarrow
import pytest
from pyarrow import parquet

from sparsepretrain.data import hub, source
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.sources import hf_pairs
from sparsepretrain.errors import ConfigError, DataError

PLAIN = {"tokenizer": "bytes", "vocab_size": None, "validation": None}


@pytest.fixture
def files(tmp_path):
    """Writes two files of lines and returns their names."""

    def write(*columns, name="train"):
        paths = [tmp_path / f"{name}.{i}" for i in range(len(columns))]
        for path, text in zip(paths, columns, strict=True):
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [str(path) for path in paths]

    return write


def nothing_prepared(cache):
    return not cache.exists() or not [p for p in cache.iterdir() if p.is_dir()]


@pytest.mark.parametrize(("shard_pairs", "workers"), [(3, 2), (16384, 1)])
def test_two_files_become_pairs(options, files, monkeypatch, shard_pairs, workers, pair_texts):
    monkeypatch.setattr(source, "SHARD_PAIRS", shard_pairs)
    expected = [(f"sentence {i} é", f"Satz {i} ß " * i + "x") for i in range(10)]
    lines = ("\n".join(side) for side in zip(*expected, strict=True))
    held_out = files("a\r\nb\r\n", "c\nd\n", name="validation")
    changes = PLAIN | {"train": files(*lines), "validation": held_out}
    data = prepare(options("parallel_files", **changes), workers=workers)
    assert pair_texts(data, "train") == expected
    assert pair_texts(data, "validation") == [("a", "c"), ("b", "d")]
    assert set(data.tokens) == {"train", "validation"}


def test_one_file_of_two_splits_is_refused(options, files):
    changes = PLAIN | {"train": files("a\n", "b\n"), "test": files("a\n", "b\n")}
    with pytest.raises(DataError, match=r"data\.test: .*train\.0 .*data\.train"):
        prepare(options("parallel_files", **changes), workers=1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("a\nb\nc\n", "x\ny\n"), r"data\.train: .*train\.0 has 3 lines, .*train\.1 has 2"),
        (("a\n", "x\ny\nz\n"), r"data\.train: .*train\.0 has 1 lines, .*train\.1 has 3"),
        (("a\n\nc\n", "x\ny\nz\n"), r"train\.0, line 2: empty sentence"),
        (("a\nb\n", "x\n  \n"), r"train\.1, line 2: empty sentence"),
        ((b"a\nb\xff\n", "x\ny\n"), r"train\.0, line 2: not UTF-8 text"),
        (("a\nb\0c\n", "x\ny\n"), r"train\.0, line 2: contains a NUL byte"),
        (("", ""), r"data\.train: .*train\.0 has no lines"),
        (("a\rb\rc\r", "x\ny\nz\n"), r"train\.0: its lines end in carriage returns .*tr '\\r'"),
        (("a\nb\n", "x\ry"), r"train\.1: its lines end in carriage returns"),
        (("a\rb\r\n", "x\ry\n"), r"train\.0: its lines end in carriage returns"),
        (("a\rb\rc\nd\n", "x\ny\n"), r"train\.0: its lines end in carriage returns"),
        (("a\n".encode("utf-16"), "x\n"), r"train\.0: expected UTF-8 text, got UTF-16: "),
        (("a b c\n".encode("utf-16-le"), "x\n"), r"train\.0: .* got UTF-16LE: .*iconv"),
        (("羊\n".encode("gb18030"), "x\n"), r"train\.0, line 1: not UTF-8 .*iconv -f ENCODING"),
        ((b"PK\x03\x04\xff\n", "x\n"), r"train\.0 is a zip archive"),
    ],
)
def test_bad_lines_are_named_and_nothing_is_prepared(options, files, cache, columns, message):
    with pytest.raises(DataError, match=message) as caught:
        prepare(options("parallel_files", **PLAIN | {"train": files(*columns)}), workers=1)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    assert nothing_prepared(cache)


def test_a_carriage_return_within_a_sentence_ends_no_line(options, files, pair_texts):
    """As in corpora of the web, whose sentences correspond by line feeds."""
    sides = files("a\rb\nc\r\n\rd\r\r\n", "x\ny\nz\n")
    data = prepare(options("parallel_files", **PLAIN | {"train": sides}), workers=1)
    assert pair_texts(data, "train") == [("a\rb", "x"), ("c", "y"), ("d", "z")]


@pytest.fixture
def wmt(tmp_path, monkeypatch):
    """A local directory in the format of the hub's WMT corpora."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    root = tmp_path / "wmt"
    root.mkdir()
    for split, size in (("train", 30), ("validation", 4), ("test", 3)):
        pairs = [{"de": f"{split} {i} ä", "en": f"{split} {i}"} for i in range(size)]
        pairs[1]["de"] = ""  # as in WMT's crawled text
        rows = "".join(json.dumps({"translation": pair}) + "\n" for pair in pairs)
        (root / f"{split}.jsonl").write_text(rows)
    about = {"subset": None, "size_gb": None, "tokenizer": "bytes", "vocab_size": None}
    return about | {"path": str(root)}


def test_hub_corpus_becomes_pairs(options, wmt, monkeypatch, pair_texts):
    monkeypatch.setattr(hf_pairs.HfPairs, "shard_rows", 7)
    data = prepare(options("wmt14_ende", **wmt), workers=1)
    kept = [i for i in range(30) if i != 1]
    assert pair_texts(data, "train") == [(f"train {i}", f"train {i} ä") for i in kept]
    assert pair_texts(data, "test") == [(f"test {i}", f"test {i} ä") for i in (0, 2)]
    back = prepare(options("wmt14_ende", **wmt, languages=["de", "en"], test=None), workers=1)
    assert pair_texts(back, "validation")[0] == ("validation 0 ä", "validation 0")
    assert "test" not in back.tokens


def test_columns_named_by_language_become_pairs(options, wmt, tmp_path, pair_texts):
    root = tmp_path / "columns"
    root.mkdir()
    (root / "train.jsonl").write_text(json.dumps({"en": "one", "de": "eins"}) + "\n")
    changes = wmt | {"path": str(root), "validation": None, "test": None}
    data = prepare(options("wmt14_ende", **changes), workers=1)
    assert pair_texts(data, "train") == [("one", "eins")]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_local_rows_become_pairs(options, tmp_path, monkeypatch, pair_texts, nested, suffix):
    monkeypatch.setitem(sys.modules, "datasets", None)
    pairs = [{"en": f"sentence {i} é", "de": f"Satz {i}"} for i in range(9)]
    pairs[3]["de"] = None
    rows = [{"translation": pair} for pair in pairs] if nested else pairs
    changes = {"tokenizer": "bytes", "vocab_size": None, "test": None}
    for split, part in (("train", rows[:6]), ("validation", rows[6:])):
        file = tmp_path / f"{split}[1].{suffix}"
        if suffix == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(part), file, row_group_size=2)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in part))
        changes[split] = str(file)
    data = load(options("wmt14_ende", **changes))  # offline: no `prepare` needed
    expected = [(p["en"], p["de"]) for p in pairs]
    assert pair_texts(data, "train") == [*expected[:3], *expected[4:6]]
    assert pair_texts(data, "validation") == expected[6:]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"en": "a"}, r"line 2: no column 'de' \(it has 'en'\)"),
        ({"translation": {"en": "a", "fr": "b"}}, r"line 2: no column 'de' \(it has 'en', 'fr'\)"),
        ({"translation": "a"}, "line 2: column 'translation' holds str, not a text per language"),
        ({"en": "a", "de": 1}, "line 2: column 'de' holds int, not text"),
    ],
)
def test_unsuitable_local_pairs_are_named(options, tmp_path, cache, row, message):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"en": "a", "de": "b"}) + "\n" + json.dumps(row) + "\n")
    changes = PLAIN | {"train": str(file), "test": None}
    with pytest.raises(DataError, match=message) as caught:
        prepare(options("wmt14_ende", **changes), workers=1)
    assert str(file) in str(caught.value) and nothing_prepared(cache)


def test_a_local_file_and_a_split_of_the_hub_do_not_mix(options):
    with pytest.raises(ConfigError, match=r"data\.test 'test' is not a \.jsonl.*data\.test=null"):
        options("wmt14_ende", **PLAIN | {"train": "a.jsonl"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"languages": ["en", "fr"]}, r"data\.languages: .*'fr' \(it has de, en\)"),
        ({"train": "dev"}, r"datasets cannot load .*dev"),
    ],
)
def test_missing_language_or_split_is_refused(options, wmt, cache, changes, message):
    with pytest.raises(DataError, match=message):
        prepare(options("wmt14_ende", **wmt | changes), workers=1)
    assert nothing_prepared(cache)
