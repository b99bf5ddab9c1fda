"""Records: local files, errors with file and line, stand-in data."""

import json
import math
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from sparsepretrain import registry
from sparsepretrain.config import compose
from sparsepretrain.config.strict import build
from sparsepretrain.data.formats import records
from sparsepretrain.data.preparation import load
from sparsepretrain.errors import ConfigError, DataError
from support.finetune_cases import sentences, write_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


def options(*overrides: str):
    plain = compose(["finetune=glue/mrpc", "model=pretrained", *overrides])["data"]
    return build(registry.get("source", plain["source"]).Options, plain, "data")


def files(root: Path, rows: list, *more: str):
    file = write_rows(root / "rows.jsonl", rows)
    return options(f"data.train=['{file}']", "data.validation=[]", *more)


def test_jsonl_and_parquet_hold_the_same(tmp_path):
    rows = sentences(6)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first = load(files(tmp_path, rows))
    second = load(options(f"data.train=['{tmp_path}/*.parquet']", "data.validation=[]"))
    found = records(first, "train")
    assert found == records(second, "train") and len(found) == 6
    assert found[0] == {"texts": ["0 sheep", "0 sheep"], "label": 1, "part": 0}
    assert first.fingerprint == second.fingerprint


def test_links_and_names_with_brackets_are_the_files_that_they_name(tmp_path):
    one, two = sentences(2)
    write_rows(tmp_path / "part1.jsonl", [one])
    named = write_rows(tmp_path / "part[1].jsonl", [two])
    write_rows(tmp_path / "blob", [two, two])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "blob")  # as in the cache of the hub
    for file, count in ((named, 1), (tmp_path / "link.jsonl", 2)):
        found = records(load(options(f"data.train=['{file}']", "data.validation=[]")), "train")
        assert [record["texts"] for record in found] == [
            [two["sentence1"], two["sentence2"]]
        ] * count


def test_a_file_that_is_found_twice_is_read_once(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", sentences(4))
    (tmp_path / "latest.jsonl").symlink_to(file)
    deeper = f"data.train=['{tmp_path}/**/**/*.jsonl']"
    for entries in (f"['{tmp_path}/*.jsonl']", f"['{file}','{tmp_path}/*.jsonl']"):
        found = records(load(options(f"data.train={entries}", "data.validation=[]")), "train")
        assert len(found) == 4
    assert len(records(load(options(deeper, "data.validation=[]")), "train")) == 4
    (tmp_path / "other").mkdir()
    other = write_rows(tmp_path / "other" / "train.jsonl", sentences(2))
    words = [f"data.train=['{other}']", f"data.validation=['{file}','{tmp_path}/*.jsonl']"]
    with pytest.raises(DataError, match=r"data\.validation: .*rows.jsonl is in entries 1 and 2"):
        load(options(*words))


def test_a_key_may_appear_late_in_a_large_file(tmp_path):
    (row,) = sentences(1)
    rows = [{**row, "sentence1": "a" * 4096}] * 2700
    found = records(load(files(tmp_path, [*rows, {**row, "note": "late"}])), "train")
    assert len(found) == 2701


def test_labels_by_name_and_numbers(tmp_path):
    names = ["not_equivalent", "equivalent"]
    named = [{**row, "label": names[row["label"]]} for row in sentences(4)]
    assert [r["label"] for r in records(load(files(tmp_path, named)), "train")] == [1, 0, 1, 0]
    rows = [{"sentence1": "a", "sentence2": "b", "label": 3}]
    found = records(load(files(tmp_path, rows, "data=glue_stsb")), "train")
    assert found[0]["label"] == 3.0


def test_integral_floats_are_labels(tmp_path):
    """pandas writes a column of integers as floats if one row has no value."""
    rows = [{**row, "label": float(row["label"])} for row in sentences(4)]
    assert [r["label"] for r in records(load(files(tmp_path, rows)), "train")] == [1, 0, 1, 0]


def test_mnli_parts_are_numbered(tmp_path):
    rows = [{"premise": "a", "hypothesis": "b", "label": 2}]
    zero, one, two = (write_rows(tmp_path / f"{n}.jsonl", rows) for n in "abc")
    words = [f"data.train=['{zero}']", f"data.validation=['{one}','{two}']"]
    found = records(load(options("finetune=glue/mnli", *words)), "validation")
    assert [record["part"] for record in found] == [0, 1]


ROW = {"sentence1": "a", "sentence2": "b", "label": 1}
ANSWERS = {"text": ["b c"], "answer_start": [2]}
SPAN = {"question": "q", "context": "a b c", "answers": ANSWERS}


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("glue/mrpc", {"sentence1": "a", "sentence2": "b"}, "no column 'label' (it has"),
        ("glue/mrpc", {**ROW, "label": None}, "no label (None)"),
        ("glue/mrpc", {**ROW, "label": -1}, "no label (-1)"),
        ("glue/mrpc", {**ROW, "label": 2}, "label 2"),
        ("glue/mrpc", {**ROW, "label": 0.5}, "label 0.5"),
        ("glue/mrpc", {**ROW, "label": 2.0}, "label 2 "),
        ("glue/mrpc", {**ROW, "label": math.nan}, "holds no label (NaN)"),
        ("glue/stsb", {**ROW, "label": math.nan}, "holds no label (NaN)"),
        ("glue/mrpc", {**ROW, "label": "maybe"}, "label 'maybe'"),
        ("glue/mrpc", {**ROW, "sentence2": None}, "column 'sentence2' holds NoneType, not text"),
        ("glue/mrpc", {**ROW, "sentence2": 5}, "column 'sentence2' holds int, not text"),
        ("glue/mrpc", {**ROW, "sentence2": "\ud83d"}, "'sentence2' is not Unicode text"),
        ("glue/stsb", {**ROW, "label": "high"}, "label 'high' is not a number"),
        ("squad", {**SPAN, "context": "a c b"}, "'b c'"),
        ("squad", {**SPAN, "answers": {"text": ["b"]}}, "answer_start"),
        ("squad", {**SPAN, "answers": {"text": [], "answer_start": []}}, "holds no answer"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, capfd, task, row, message):
    file = write_rows(tmp_path / "bad.jsonl", [SPAN if task == "squad" else ROW, row])
    with pytest.raises(DataError) as caught:
        load(options(f"finetune={task}", f"data.train=['{file}']", "data.validation=[]"))
    assert str(caught.value).startswith(f"{file}, line 2: ") and message in str(caught.value)
    assert not [d for d in (tmp_path / "cache").iterdir() if (d / "manifest.json").exists()]


def test_unreadable_files_are_named(tmp_path, capfd):
    file = tmp_path / "rows.jsonl"
    words = [f"data.train=['{file}']", "data.validation=[]"]
    good = json.dumps(ROW).encode()
    for content, place in (
        (b'{"sentence1"\n', ", line 1: expected one JSON object per line"),
        (good + b"\n\n[2]\n", ", line 3: expected a JSON object, got list"),
        (good + b"\n\xff\xfe", ", line 2: not UTF-8 text"),
        (b"[%b, 5]" % good, ", row 1: expected a JSON object, got int"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load(options(*words))
        assert str(caught.value).startswith(f"{file}{place}") and "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data\.validation: .*rows\.jsonl .*data\.train"):
        load(options(f"data.train=['{file}']", f"data.validation=['{tmp_path}/*.jsonl']"))
    with pytest.raises(DataError, match="no file matches"):
        load(options("data.train=[nothing.jsonl]", "data.validation=[]"))
    with pytest.raises(ConfigError, match=r"data\.validation"):
        options(f"data.train=['{file}']")
    with pytest.raises(DataError, match="run `sparsepretrain prepare"):
        load(options())


CODE = '''
def first(alpha, beta):
    """Add two things."""
    return alpha + beta

class Thing:
    def second(self):
        """Say its name."""
        if self:
            return self.name
        return None

    def third(self):
        return (
            1)

def fourth(): return 4

def fifth(gamma):
    """Negate."""
    return -gamma
'''


def stand_in(root: Path) -> dict[str, list]:
    code = root / "code"
    code.mkdir(exist_ok=True)
    for i in range(8):
        (code / f"m{i}.py").write_text(CODE.replace("first", f"first{i}"))
    (code / "broken.py").write_text("def f(:\n")
    data = load(options("data=python_qa", f"data.roots=['{code}']", "data.validation=0.3"))
    return {split: records(data, split) for split in ("train", "validation")}


def test_python_answers_are_spans_of_their_context(tmp_path):
    found = stand_in(tmp_path)
    asked = [{row["question"] for row in rows} for rows in found.values()]
    asked = [{question for question in questions if "first" in question} for questions in asked]
    assert all(asked) and not asked[0] & asked[1]
    rows = found["train"] + found["validation"]
    for row in rows:
        (answer, start), name = row["answers"][0], row["question"].split()[2]
        assert row["context"][start : start + len(answer)] == answer
        asked = f"def {name}("
        assert start == row["context"].index(asked) and answer.startswith(asked)
    assert {row["answers"][0][1] > 0 for row in rows} == {True, False}, (
        "both functions are asked for"
    )
