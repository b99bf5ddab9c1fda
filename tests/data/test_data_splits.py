"""Splits that the options name: of a data set, or files."""

import json

import numpy as np
import pytest

from sparsepretrain.data import hub, load, prepare
from sparsepretrain.errors import DataError

datasets = pytest.importorskip("datasets")
TEXT = ["", " = Sheep = \n", "", " Sheep 0 eat 1 grass . \n", "no line end", ""]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(hub, "_reachable", lambda: False)


@pytest.fixture
def mirror(tmp_path):
    """A local clone of a data set with three splits, as the hub has WikiText."""
    root = tmp_path / "wikitext"
    files = {}
    for split in ("train", "validation", "test"):
        files[split] = root / "wikitext-2-raw-v1" / f"{split}-00000-of-00001.parquet"
        files[split].parent.mkdir(parents=True, exist_ok=True)
        rows = [text.replace("Sheep", f"Sheep of {split}") for text in TEXT] * 3
        datasets.Dataset.from_dict({"text": rows}).to_parquet(files[split])
    listed = "".join(
        f"  - split: {split}\n    path: wikitext-2-raw-v1/{split}-*\n" for split in files
    )
    (root / "README.md").write_text(
        f"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n{listed}---\n"
    )
    return root, files


def texts(data):
    return {split: data.decode(tokens) for split, tokens in data.tokens.items()}


def expected(split):
    lines = "\n = Sheep = \n\n Sheep 0 eat 1 grass . \nno line end\n\n" * 3
    return lines.replace("Sheep", f"Sheep of {split}")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_local_clone_has_the_splits_of_the_hub(options, mirror, monkeypatch, workers):
    from sparsepretrain.data.sources import hf_text

    monkeypatch.setattr(hf_text.HfText, "shard_rows", 4)
    changes = {"tokenizer": "bytes"}
    if workers == 2:
        changes = {"tokenizer": "bpe", "vocab_size": 300}
    chosen = options("wikitext2", path=str(mirror[0]), **changes)
    assert chosen.subset == "wikitext-2-raw-v1"
    data = prepare(chosen, workers=workers)
    assert texts(data) == {s: expected(s) for s in ("train", "validation", "test")}
    assert load(chosen).fingerprint == data.fingerprint


def test_local_files_of_each_split(options, mirror):
    files = {split: [str(file)] for split, file in mirror[1].items()}
    changes = {"path": "parquet", "subset": None, "tokenizer": "bytes"}
    data = prepare(options("wikitext2", **changes, data_files=files))
    assert texts(data) == {s: expected(s) for s in ("train", "validation", "test")}
    data = prepare(options("wikitext2", **changes, data_files=files, rows="documents", test=None))
    documents = [t for t in TEXT if t]
    assert set(data.tokens) == {"train", "validation"}
    ended = "\0".join(documents * 3).replace("Sheep", "Sheep of train") + "\0"
    assert texts(data)["train"] == ended


def test_validation_fraction_leaves_the_test_split(options, tmp_path):
    files = {}
    for split, count in (("train", 30), ("test", 5)):
        files[split] = [str(tmp_path / f"{split}.jsonl")]
        rows = (json.dumps({"text": f"{split} {i}"}) + "\n" for i in range(count))
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    data = prepare(
        options(
            "openwebtext", path="json", data_files=files, test="test", tokenizer="bytes",
            validation=0.1,
        )
    )  # fmt: skip
    ends = {split: int((tokens == 0).sum()) for split, tokens in data.tokens.items()}
    assert ends == {"train": 27, "validation": 3, "test": 5}
    assert texts(data)["test"] == "".join(f"test {i}\0" for i in range(5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation": "dev"}, "datasets cannot load data.path="),
        ({"test": "tset"}, "datasets cannot load data.path="),
        ({"text_column": "body"}, "data.text_column: wikitext2 has no column 'body'"),
    ],
)
def test_missing_split_or_column_is_refused(options, mirror, cache, changes, words):
    with pytest.raises(DataError) as caught:
        prepare(options("wikitext2", path=str(mirror[0]), tokenizer="bytes", **changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"], "nothing half-prepared"


def test_text_files_of_each_split(options, tmp_path):
    for split in ("train", "validation", "test"):
        for i in range(2):
            (tmp_path / f"{split}{i}.txt").write_text(f"{split} {i}\n")
    chosen = options(
        "text_files",
        files=[f"{tmp_path}/train*.txt"],
        validation=[f"{tmp_path}/validation*.txt"],
        test=[f"{tmp_path}/test0.txt", f"{tmp_path}/test*.txt"],
    )
    data = prepare(chosen)
    for split, text in texts(data).items():
        assert sorted(text.split("\0")) == ["", f"{split} 0\n", f"{split} 1\n"]
    (tmp_path / "test1.txt").write_text("changed\n")
    assert prepare(chosen).fingerprint != data.fingerprint


def test_one_file_for_training_is_not_cut(options, tmp_path):
    (tmp_path / "a").write_text("a\n" * 50)
    (tmp_path / "b").write_text("b\n" * 50)
    data = prepare(options("text_files", files=[f"{tmp_path}/a"], validation=[f"{tmp_path}/b"]))
    assert texts(data) == {"train": "a\n" * 50 + "\0", "validation": "b\n" * 50 + "\0"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test": ["train0.txt"]}, "data.test: {0}/train0.txt is also one of data.files"),
        ({"validation": ["gone*"]}, "data.validation: no file matches {0}/gone*"),
        (
            {"validation": ["v.txt"], "test": ["v.txt"]},
            "data.test: {0}/v.txt is also one of data.validation",
        ),
    ],
)
def test_overlapping_splits_are_refused(options, tmp_path, cache, changes, words):
    for name in ("train0.txt", "v.txt"):
        (tmp_path / name).write_text(f"{name} text")
    changes = {k: [f"{tmp_path}/{name}" for name in v] for k, v in changes.items()}
    with pytest.raises(DataError) as caught:
        prepare(options("text_files", files=[f"{tmp_path}/train*.txt"], **changes))
    assert str(caught.value) == words.format(tmp_path)
    assert not cache.exists() or not list(cache.iterdir())


def test_split_shorter_than_a_window_is_refused(options, mirror):
    from sparsepretrain.data import windows

    data = prepare(options("wikitext2", path=str(mirror[0]), tokenizer="bytes"))
    count = len(data.tokens["test"])
    whole = windows(data, "test", count - 1, 0)
    assert whole.count == 1 and np.array_equal(whole.batch(0, [0], 1)[0], data.tokens["test"])
    with pytest.raises(DataError, match=rf"test.bin has {count} tokens"):
        windows(data, "test", count, 0)
