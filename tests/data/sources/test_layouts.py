"""Files of another layout than expected: the message names file, line and remedy."""

import json

import datasets
import pytest
import torch
import transformers

from sparsepretrain import registry
from sparsepretrain.cli import main
from sparsepretrain.config import compose
from sparsepretrain.config.strict import build
from sparsepretrain.data.encoding import FileCodec
from sparsepretrain.data.formats import Images
from sparsepretrain.data.preparation import load
from sparsepretrain.errors import DataError

ROWS = [{"text": f"row {i}"} for i in range(4)]
LINES = "\n".join(map(json.dumps, ROWS))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21461\nsize 12345\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


def options(*overrides):
    plain = compose(list(overrides))["data"]
    return build(registry.get("source", plain["source"]).Options, plain, "data")


def read(*overrides):
    """Prepare the data of a configuration."""
    return load(options(*overrides))


def documents(file, *overrides):
    return read("data=document_files", f"data.data_files=['{file}']", *overrides)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps({"data": ROWS}), "no column 'text' (it has 'data')"),
        (json.dumps({"text": ["a", "b"]}), "column 'text' holds list, not text"),
        (json.dumps({"0": ROWS[0], "1": ROWS[1]}), "no column 'text' (it has '0', '1')"),
        ('{"text": "a"}{"text": "b"}', "Extra data at character 14"),
        (LINES.replace("\n", "\r"), "lines end in carriage returns (old Mac)"),
        (json.dumps({"rows": {"text": "a"}}), "no column 'text' (it has 'rows')"),
    ],
    ids=["wrapped", "columns", "index", "two objects", "carriage returns", "nested"],
)
def test_one_row_of_another_layout_is_named(tmp_path, content, problem):
    file = tmp_path / "a.json"
    file.write_text(content, newline="")
    with pytest.raises(DataError) as caught:
        documents(file)
    text = str(caught.value)
    assert f"{file}, line 1" in text and problem in text
    assert "expected one JSON object per line" in text and "too few" not in text


def test_one_good_row_is_too_few(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(DataError, match="has 1 documents: too few"):
        documents(tmp_path / "a.jsonl")


def test_carriage_returns_are_named_in_records_too(tmp_path):
    lines = '{"text": "a", "label": 0}\r{"text": "b", "label": 1}\r'
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(lines, newline="")
    words = [f"data.{s}=['{tmp_path}/{n}.jsonl']" for s, n in (("train", "a"), ("validation", "b"))]
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: .*old Mac"):
        read("data=labelled_files", *words, "data.texts=[text]")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data set and a dictionary of data sets, as ``save_to_disk`` writes them."""
    root = tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(root / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(root / "several")
    return root


@pytest.mark.parametrize(
    ("entry", "call"),
    [
        ("one", "one').to_parquet"),
        ("several", 'several\')["train"].to_parquet'),
        ("one/*.arrow", "one').to_parquet"),
        ("several/**", 'several\')["train"].to_parquet'),
    ],
)
def test_a_saved_dataset_says_how_to_write_it(saved, entry, call):
    for words in ([], ["data.path=parquet"]):
        with pytest.raises(DataError, match=r"load_from_disk") as caught:
            documents(saved / entry, *words)
        assert call in str(caught.value)
    with pytest.raises(DataError, match=r"load_from_disk"):
        read("data=text_files", f"data.files=['{saved / entry}']")


@pytest.mark.parametrize("kind", ["document_files", "parquet", "text_files"])
def test_the_hint_for_a_directory_fits_the_source(tmp_path, kind):
    suffix = {"document_files": ".jsonl", "parquet": ".parquet", "text_files": ".txt"}[kind]
    with pytest.raises(DataError, match=rf"use {tmp_path}/\*\*/\*\{suffix}\)"):
        if kind == "text_files":
            read("data=text_files", f"data.files=['{tmp_path}']")
        else:
            path = "json" if kind == "document_files" else kind
            documents(tmp_path, f"data.path={path}")


def test_a_directory_named_like_a_file_has_a_hint_of_its_format(tmp_path):
    (tmp_path / "part.parquet").mkdir()  # as Spark writes it
    words = (f"data.train=['{tmp_path}/part.parquet']", "data.validation=[b.jsonl]")
    with pytest.raises(DataError, match=r"use .*part\.parquet/\*\*/\*\.parquet"):
        read("data=labelled_files", *words)
    with pytest.raises(DataError, match=r"use .*part\.parquet/\*\*/\*\.parquet"):
        read("data=wmt14_ende", f"data.train='{tmp_path}/part.parquet'", "data.validation=b.jsonl",
             "data.test=null")  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("data=labelled_files", "data.train=[a.jsonl]", "data.validation=[b.jsonl, a.jsonl]"),
        ("data=glue_mrpc", "data.validation=[train]"),
        ("data=squad", "data.test=[validation]"),
        ("data=wmt14_ende", "data.validation=train"),
        ("data=wikitext2", "data.validation=train"),
        ("data=cifar10", "data.validation=train"),
        ("data=image_folder", "data.validation=train"),
        ("data=parallel_files", "data.train=[a.en, a.de]", "data.validation=[a.en, b.de]"),
        ("data=document_files", "data.path=csv", "data.data_files={train: [a.csv]}",
         "data.validation=train"),
    ],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_no_two_splits_share_their_data(words):
    with pytest.raises(DataError, match=r"data\.(validation|test): .* is also one of data\.\w+"):
        read(*words)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.txt.gz"])
def test_pointers_of_git_lfs_are_no_data(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(POINTER)
    with pytest.raises(DataError, match="is a Git LFS pointer") as caught:
        if ".txt" in name:
            read("data=text_files", f"data.files=['{file}']")
        else:
            documents(file, f"data.path={'parquet' if name.endswith('parquet') else 'json'}")
    assert str(file) in str(caught.value) and "git lfs pull" in str(caught.value)


def test_pointers_of_git_lfs_are_no_pairs_and_no_tokenizer(tmp_path):
    for name in ("a.en", "a.de", "tokenizer.json"):
        (tmp_path / name).write_bytes(POINTER)
    pair = f"['{tmp_path}/a.en', '{tmp_path}/a.de']"
    with pytest.raises(DataError, match=r"a\.en is a Git LFS pointer"):
        read("data=parallel_files", f"data.train={pair}", "data.validation=null", "data.test=null")
    with pytest.raises(DataError, match="Git LFS pointer"):
        FileCodec(tmp_path / "tokenizer.json")


def test_pointers_of_git_lfs_are_no_images(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.png").write_bytes(POINTER)
    chosen = options("data=image_folder", f"data.root='{tmp_path}'")
    with pytest.raises(DataError, match=r"train/cat/a\.png is a Git LFS pointer"):
        Images(chosen, load(chosen), "train", 1).image(0)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_pointers_of_git_lfs_are_no_weights(tmp_path, capsys, name):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    if name == "pytorch_model.bin":
        (tmp_path / "hf/model.safetensors").unlink()
    (tmp_path / "hf" / name).write_bytes(POINTER)
    (tmp_path / "a.txt").write_text("one sheep\n" * 200)
    words = ["task=causal_lm", "data=text_files", f"data.files=['{tmp_path}/a.txt']", "steps=1"]
    words += ["task.sequence_length=16", "parallel.device=cpu", f"runs_dir='{tmp_path}/runs'"]
    capsys.readouterr()
    assert main(["finetune", str(tmp_path / "hf"), *words]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"hf/{name} is a Git LFS pointer" in line
