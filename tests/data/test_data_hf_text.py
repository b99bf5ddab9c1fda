import json
import sys
import time

import numpy as np
import pytest

from sparsepretrain.data import hub, load, prepare
from sparsepretrain.errors import DataError

datasets = pytest.importorskip("datasets")

LOCAL = {"path": "json", "subset": None, "tokenizer": "bytes", "size_gb": None}


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(hub, "_reachable", lambda: False)


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    texts = [f"document {i} says é" for i in range(200)] + ["", None]
    file.write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in texts))
    return file


@pytest.mark.parametrize("workers", [1, 2])
def test_local_rows_are_split_by_document_as_nanogpt_does(options, rows, monkeypatch, workers):
    from sparsepretrain.data.sources import hf_text

    monkeypatch.setattr(hf_text.HfText, "shard_rows", 30)
    changes = LOCAL | {"data_files": [str(rows)], "validation": 0.1}
    if workers == 2:
        changes |= {"tokenizer": "bpe", "vocab_size": 300}
    chosen = options("openwebtext", **changes)
    seen = []
    data = prepare(chosen, workers=workers, on_progress=seen.append)
    assert seen[-1].phase == "writing"
    end = data.end_of_text
    got = {}
    for split, tokens in data.tokens.items():
        pieces = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
        got[split] = [data.decode(piece[:-1]) for piece in pieces]
    reference = datasets.load_dataset("json", data_files=[str(rows)], split="train")
    reference = reference.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    assert got["validation"] == [t for t in reference["test"]["text"] if t]
    assert got["train"] == [t for t in reference["train"]["text"] if t]
    assert load(chosen).fingerprint == data.fingerprint


def test_unprepared_data_names_command_and_alternative(options):
    begin = time.perf_counter()
    with pytest.raises(DataError) as caught:
        load(options("openwebtext"))
    assert time.perf_counter() - begin < 1
    for words in ("`sparsepretrain prepare data=openwebtext`", "55 GB", "data=python_source"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("config", ["openwebtext", "c4"])
def test_without_a_network_preparing_fails_at_once(options, cache, config):
    begin = time.perf_counter()
    with pytest.raises(DataError) as caught:
        prepare(options(config))
    assert time.perf_counter() - begin < 5
    message = str(caught.value)
    assert message.startswith(f"{config} needs the network: ") and "\n" not in message
    assert "data=python_source" in message
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]


def test_hub_tokenizer_without_a_network_is_an_error(options, rows, cache):
    changes = LOCAL | {"data_files": [str(rows)], "tokenizer": "gpt2"}
    with pytest.raises(DataError, match=r"data.tokenizer: .*'gpt2'"):
        prepare(options("openwebtext", **changes))
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]


def test_missing_package_is_named(options, rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'sparsepretrain\[hf\]'"):
        prepare(options("openwebtext", **LOCAL, data_files=[str(rows)]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text_column": "body"}, "no column 'body' (it has text, n)"),
        ({"text_column": "n"}, "'n' holds int, not text"),
        ({"split": "dev"}, "datasets cannot load data.path=json: "),
        ({"data_files": ["absent/*.json"]}, "data.data_files: no file matches absent/*.json"),
    ],
)
def test_bad_data_sets_are_refused(options, rows, changes, expected):
    with pytest.raises(DataError) as caught:
        prepare(options("openwebtext", **(LOCAL | {"data_files": [str(rows)]} | changes)))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_too_few_documents_are_refused(options, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"text": "alone"}\n')
    with pytest.raises(DataError, match="has 1 documents: too few"):
        prepare(options("openwebtext", **LOCAL, data_files=[str(file)]))


def test_library_settings_are_restored(options, rows, monkeypatch):
    import huggingface_hub

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
    prepare(options("openwebtext", **LOCAL, data_files=[str(rows)]))
    assert state() == before


def test_any_answer_of_the_hub_means_reachable(monkeypatch):
    import huggingface_hub

    class Session:
        def __init__(self, error):
            self.error = error

        def head(self, url, timeout):
            if self.error:
                raise self.error

    monkeypatch.undo()
    for error, expected in ((None, True), (RuntimeError("no route"), False)):
        monkeypatch.setattr(huggingface_hub, "get_session", lambda e=error: Session(e))
        assert hub._reachable() is expected
