"""Text of the hub and of local rows, and splits named by the options."""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from sparsepretrain.data import hub
from sparsepretrain.data.order import windows
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.sources import _rows, hf_text
from sparsepretrain.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")

LOCAL = {"path": "json", "subset": None, "tokenizer": "bytes", "size_gb": None}
TEXT = ["", " = Sheep = \n", "", " Sheep 0 eat 1 grass . \n", "no line end", ""]
SPLITS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(hub, "_reachable", lambda: False)


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    texts = [f"document {i} says é" for i in range(200)] + ["", None]
    file.write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in texts))
    return file


@pytest.fixture
def mirror(tmp_path):
    """A local clone of a dataset with three splits, as the hub has WikiText."""
    root, name = tmp_path / "wikitext", "wikitext-2-raw-v1"
    (root / name).mkdir(parents=True)
    files, listed = {}, f"configs:\n- config_name: {name}\n  data_files:\n"
    for split in SPLITS:
        files[split] = root / name / f"{split}-00000-of-00001.parquet"
        texts = [text.replace("Sheep", f"Sheep of {split}") for text in TEXT] * 3
        datasets.Dataset.from_dict({"text": texts}).to_parquet(files[split])
        listed += f"  - split: {split}\n    path: {name}/{split}-*\n"
    (root / "README.md").write_text(f"---\n{listed}---\n")
    return root, files


def texts_of(data):
    return {split: data.decode(tokens) for split, tokens in data.tokens.items()}


def lines_of(split):
    lines = "\n = Sheep = \n\n Sheep 0 eat 1 grass . \nno line end\n\n" * 3
    return lines.replace("Sheep", f"Sheep of {split}")


def assert_nothing_prepared(cache):
    assert not list(cache.glob("*/manifest.json"))


def documents_of(data):
    found = {}
    for split, tokens in data.tokens.items():
        pieces = np.split(tokens, np.flatnonzero(tokens == data.end_of_text) + 1)[:-1]
        found[split] = [data.decode(piece[:-1]) for piece in pieces]
    return found


def test_files_of_a_repository_are_read_instead_of_all(options, rows, tmp_path):
    """As data=c4_shard reads one of the 1,024 files of C4."""
    clone = tmp_path / "clone"
    (clone / "en").mkdir(parents=True)
    rows.rename(clone / "en" / "first.jsonl")
    (clone / "en" / "second.jsonl").write_text('{"text": "other", "n": 2}\n' * 9)
    changes = {"path": str(clone), "data_files": ["en/first.jsonl"], "validation": 0.1}
    found = documents_of(prepare(options("c4_shard", **LOCAL | changes | {"tokenizer": "bytes"})))
    texts = [*found["train"], *found["validation"]]
    assert sorted(texts) == sorted(f"document {i} says é" for i in range(200))
    with pytest.raises(DataError, match="datasets cannot load"):
        prepare(options("c4_shard", **LOCAL | changes | {"data_files": ["en/absent.jsonl"]}))


@pytest.mark.parametrize("local", [True, False])
def test_documents_are_split_as_nanogpt_does(options, rows, tmp_path, monkeypatch, local):
    monkeypatch.setattr(hf_text.HfText, "shard_rows", 30)
    monkeypatch.setattr(_rows, "SHARD_BYTES", 999)
    changes = {"validation": 0.1, "tokenizer": "bpe", "vocab_size": 300}
    if local:  # the rows keep their order
        changes["data_files"] = [str(rows)]
    else:  # a directory as the hub has it
        clone = tmp_path / "clone"
        clone.mkdir()
        rows.rename(clone / "train.jsonl")
        rows, changes["path"] = clone / "train.jsonl", str(clone)
    chosen = options("openwebtext", **LOCAL | changes)
    data = prepare(chosen, workers=2)
    found = documents_of(data)
    reference = datasets.load_dataset("json", data_files=[str(rows)], split="train")
    reference = reference.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    expected = {"train": reference["train"]["text"], "validation": reference["test"]["text"]}
    for split, texts in expected.items():
        texts = [text for text in texts if text]
        if local:
            texts.sort(key=lambda text: int(text.split()[1]))
        assert found[split] == texts
    assert load(chosen).fingerprint == data.fingerprint


@pytest.mark.parametrize("name", ["a [v2].txt", "a*b.txt", "what?.txt", "[].txt"])
@pytest.mark.parametrize("directory", ["plain", "d [v2]"])
def test_wildcards_in_names_of_files_are_characters(options, tmp_path, name, directory):
    (tmp_path / directory).mkdir()
    (tmp_path / directory / name).write_text("one two\nthree four\n")
    file = str(tmp_path / directory / name)
    chosen = options("wikitext2", **LOCAL | {"path": "text", "data_files": [file]})
    chosen.validation, chosen.test = 0.5, None
    assert "three four" in "".join(texts_of(prepare(chosen)).values())


@pytest.mark.parametrize("source", ["wikitext2", "wmt14_ende", "cifar10"])
def test_directories_that_datasets_takes_for_patterns_are_refused(options, mirror, source):
    place = mirror[0].rename(mirror[0].with_name("wikitext [v2]"))
    with pytest.raises(DataError, match=r"data\.path: datasets takes .*\[v2\] for a pattern"):
        prepare(options(source, path=str(place)))


def test_local_clone_has_the_splits_of_the_hub(options, mirror, monkeypatch):
    monkeypatch.setattr(hf_text.HfText, "shard_rows", 4)
    chosen = options("wikitext2", path=str(mirror[0]), tokenizer="bytes")
    data = prepare(chosen)
    assert texts_of(data) == {split: lines_of(split) for split in SPLITS}
    count = len(data.tokens["test"])
    assert windows(data, "test", count - 1, 0).count == 1
    with pytest.raises(DataError, match=rf"test.bin has {count} tokens"):
        windows(data, "test", count, 0)


def test_files_of_each_split_are_lines_or_documents(options, mirror):
    files = {split: [str(file)] for split, file in mirror[1].items()}
    changes = {"path": "parquet", "subset": None, "tokenizer": "bytes", "data_files": files}
    data = prepare(options("wikitext2", **changes))
    assert texts_of(data) == {split: lines_of(split) for split in SPLITS}
    data = prepare(options("wikitext2", **changes, rows="documents", test=None))
    ended = "\0".join([t for t in TEXT if t] * 3).replace("Sheep", "Sheep of train") + "\0"
    assert set(data.tokens) == {"train", "validation"} and texts_of(data)["train"] == ended


def test_validation_fraction_leaves_the_test_split(options, tmp_path):
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in ("train", "test")}
    for split, count in (("train", 30), ("test", 5)):
        rows = (json.dumps({"text": f"{split} {i}"}) + "\n" for i in range(count))
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    changes = LOCAL | {"data_files": files, "test": "test", "validation": 0.1}
    data = prepare(options("openwebtext", **changes))
    ends = {split: int((tokens == 0).sum()) for split, tokens in data.tokens.items()}
    assert ends == {"train": 27, "validation": 3, "test": 5}
    assert texts_of(data)["test"] == "".join(f"test {i}\0" for i in range(5))


def test_unprepared_data_names_command_and_alternative(options):
    with pytest.raises(DataError) as caught:
        load(options("openwebtext"))
    for words in ("`sparsepretrain prepare data=openwebtext`", "55 GB", "data=python_source"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("config", ["openwebtext", "c4"])
def test_preparing_without_network_fails_at_once(options, cache, config):
    begin = time.perf_counter()
    with pytest.raises(DataError) as caught:
        prepare(options(config))
    assert time.perf_counter() - begin < 60  # 0.1 s here; retries take minutes
    message = str(caught.value)
    assert message.startswith(f"{config} needs the network: ") and "\n" not in message
    assert "data=python_source" in message
    assert_nothing_prepared(cache)


def test_a_missing_package_is_named_and_local_json_needs_none(options, rows, mirror, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    files = [str(mirror[1]["train"])]
    parquet = options("openwebtext", **LOCAL | {"path": "parquet", "data_files": files})
    assert load(parquet).documents("train") > 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for chosen, extra in (
        (options("openwebtext"), "hf"),
        (options("openwebtext", **LOCAL | {"path": "text", "data_files": [str(rows)]}), "hf"),
        (replace(parquet, name="again", seed=1), "parquet"),
    ):
        with pytest.raises(DataError, match=rf"pip install 'sparsepretrain\[{extra}\]'"):
            prepare(chosen)
    assert load(options("openwebtext", **LOCAL, data_files=[str(rows)])).documents("train") > 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text_column": "body"}, "rows.jsonl, line 1: no column 'body' (it has 'text', 'n')"),
        ({"text_column": "n"}, "'n' holds int, not text"),
        ({"split": "dev"}, "data.split: data.data_files has no 'dev' (it has train)"),
        ({"validation": "dev"}, "data.validation: data.data_files has no 'dev' (it has train)"),
        ({"path": "csv", "split": "dev"}, "datasets cannot load data.path=csv: "),
        ({"data_files": ["absent/*.json"]}, "data.data_files: no file matches absent/*.json"),
        ({"tokenizer": "gpt2"}, "data.tokenizer: cannot read gpt2 from the hub"),
        ({"split": "train[:1]"}, "data_files has no 'train[:1]'"),
        ({"path": "text", "split": "train[:1]"}, "has 1 documents: too few"),
    ],
)
def test_unsuitable_data_is_refused(options, rows, cache, changes, expected):
    with pytest.raises(DataError) as caught:
        prepare(options("openwebtext", **(LOCAL | {"data_files": [str(rows)]} | changes)))
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert_nothing_prepared(cache)


def test_library_settings_are_restored(options, mirror, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

    def state():
        return (
            datasets.is_progress_bar_enabled(),
            datasets.logging.get_verbosity(),
            huggingface_hub.logging.get_verbosity(),
            huggingface_hub.constants.HF_HUB_OFFLINE,
            datasets.config.HF_HUB_OFFLINE,
        )

    before = state()
    prepare(options("wikitext2", path=str(mirror[0]), tokenizer="bytes"))
    assert state() == before


@pytest.mark.parametrize(("error", "reachable"), [(None, True), (RuntimeError("no route"), False)])
def test_any_answer_of_the_hub_means_reachable(monkeypatch, error, reachable):
    class Session:
        def head(self, url, timeout):
            if error:
                raise error

    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    assert hub._reachable() is reachable


def test_text_files_of_each_split(options, tmp_path):
    for split in SPLITS:
        for i in range(2):
            (tmp_path / f"{split}{i}.txt").write_text(f"{split} {i}\n")
    files = {"train": ["train0"], "validation": ["validation*"], "test": ["test0", "test*"]}
    files = {split: [f"{tmp_path}/{name}.txt" for name in names] for split, names in files.items()}
    chosen = options("text_files", files=files.pop("train"), **files)
    data = prepare(chosen)
    assert texts_of(data)["train"] == "train 0\n\0"  # a single training file is not cut
    for split in SPLITS[1:]:
        texts = texts_of(data)[split].split("\0")
        assert sorted(texts) == ["", f"{split} 0\n", f"{split} 1\n"]
    (tmp_path / "test1.txt").write_text("changed\n")
    assert prepare(chosen).fingerprint != data.fingerprint


V = ["v.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"test": ["train0.txt"]},
            "data.test: {0}/train0.txt is also one of data.files: name other data",
        ),
        ({"validation": ["gone*"]}, "data.validation: no file matches {0}/gone*"),
        (
            {"validation": V, "test": V},
            "data.test: {0}/v.txt is also one of data.validation: name other data",
        ),
    ],
)
def test_overlapping_splits_are_refused(options, tmp_path, cache, changes, message):
    for name in ("train0.txt", "v.txt"):
        (tmp_path / name).write_text(f"{name} text")
    changes = {k: [f"{tmp_path}/{name}" for name in v] for k, v in changes.items()}
    with pytest.raises(DataError) as caught:
        prepare(options("text_files", files=[f"{tmp_path}/train*.txt"], **changes))
    assert str(caught.value) == message.format(tmp_path)
    assert_nothing_prepared(cache)


@pytest.mark.parametrize(("path", "file"), [("json", "a.parquet"), ("parquet", "a.jsonl.gz")])
@pytest.mark.parametrize("split", [False, True])
def test_files_of_another_format_are_refused(options, path, file, split):
    files = {"train": [file]} if split else [file]
    with pytest.raises(
        ConfigError, match=rf"data\.path is {path}, and '{file}' is \w+: data.path="
    ):
        options("document_files", path=path, data_files=files)
