"""Labels of classes by name and by index, numbers to predict, and texts that cannot be a pair.

The kind: a value of the file that may be the name of a class or its index. Members: truth values
in any spelling, numbers as names (permuted, shifted, negative, with a fraction), names without
numbers, some numbers among names, values that no float holds.
"""

import json
from dataclasses import replace
from functools import cache as cached

import pytest

from sparsepretrain import registry
from sparsepretrain.config import compose, strict
from sparsepretrain.data.formats import records
from sparsepretrain.data.preparation import prepare
from sparsepretrain.errors import ConfigError, DataError


@cached
def shipped(config):
    return compose([f"data={config}"])["data"]


def build(config, **changes):
    """Options of a shipped YAML, its defaults included, with some keys changed."""
    plain = shipped(config) | changes
    return strict.build(registry.get("source", plain["source"]).Options, plain, "data")


@pytest.fixture
def written(tmp_path):
    """``written(rows, labels=…)``: options of a source whose train split has the rows."""

    def write(rows, **changes):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"train": [str(file)], "validation": [], "texts": ["text"]} | changes
        return build("labelled_files", **settings)

    return write


@pytest.fixture
def classes(written):
    """``classes(values, names)``: indices of the classes that are stored for labels."""

    def store(values, names):
        rows = [{"text": f"text {i}", "label": value} for i, value in enumerate(values)]
        data = prepare(written(rows, labels=names), workers=1)
        return [record["label"] for record in records(data, "train")]

    return store


@pytest.mark.parametrize(
    ("names", "values", "expected"),
    [
        (["true", "false"], [True, False], [0, 1]),
        (["false", "true"], [True, False, 1, 0], [1, 0, 1, 0]),
        (["True", "False"], [True, False, "True"], [0, 1, 0]),
        (["FALSE", "TRUE"], [True, False], [1, 0]),
        (["maybe", "true", "false"], [True, False, "maybe"], [1, 2, 0]),
        (["True", "true", "false"], [True, "True"], [1, 0]),
        (["no", "yes"], [True, False, 1], [1, 0, 1]),
        (["yes", "no"], [True, False, 1, "yes"], [0, 1, 1, 0]),
        (["No", "unsure", "Yes"], [True, False], [2, 0]),
        (["1", "0"], [0, 1, "0", 1.0, False], [1, 0, 1, 0, 1]),
        (["1", "2", "3", "4", "5"], [1, 2, 3, 4], [0, 1, 2, 3]),
        (["-1", "1"], [-1, 1, -1.0], [0, 1, 0]),
        (["-1", "0", "1"], [-1, 0, 1], [0, 1, 2]),
        (["0.5", "0.1"], [0.1, 0.5], [1, 0]),
        (["01", "02"], [1, 2], [0, 1]),
        (["01", "1"], [1, "01"], [1, 0]),
        (["10", "positive"], [10, "positive"], [0, 1]),
        (["0", "1", "other"], [2, 0, 1.0], [2, 0, 1]),
        (["negative", "positive"], [1, 0, "positive", 1.0], [1, 0, 1, 1]),
    ],
)
def test_the_name_of_a_class_goes_before_its_index(classes, names, values, expected):
    assert classes(values, names) == expected


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (["true", "false"], 0, "label 0 is no name in data.labels, and no index"),
        (["true", "maybe"], False, "label False is neither"),
        (["ham", "spam"], True, "label True is a truth value, and none of ham, spam is"),
        (["yes", "maybe"], False, "label False is neither"),
        (["1", "2"], 0, "label 0 is no name in data.labels, and no index"),
        (["1", "2"], False, "label False is no name|label 0 is no name"),
        (["positive", "0"], 1, "label 1 is no name in data.labels, and no index"),
        (["01", "001"], 1, "label 1 may be '01' and '001' of data.labels"),
        (["1", "2"], -1, r"column 'label' holds no label \(-1\)"),
        (["a", "b"], 10**400, "label 10+… is neither"),
        (["1", "2"], 10**400, "label 10+… is no name"),
        (["a", "b"], float("inf"), "label inf is neither"),
        (["1", "2"], -float("inf"), "label -inf is neither"),
        (["1", "2"], 1.5, "label 1.5 is neither"),
        (["1", "2"], [1], r"label \[1\] is neither"),
        (["1", "2"], "1.0", "label '1.0' is neither"),
        ([], 10**400, "label 10+… is not a number within fp32"),
        ([], -(10**400), "label -10+… is not a number within fp32"),
        ([], float("inf"), "label inf is not a number"),
        ([], 1e39, r"label 1e\+39 is not a number within fp32"),
        ([], "1", "label '1' is not a number"),
    ],
)
def test_labels_of_no_class_are_refused_with_file_and_line(classes, cache, names, value, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: ({message})") as caught:
        classes([names[0] if names else 1.0, value], names)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not list(cache.glob("*/manifest.json"))


def test_numbers_to_predict_are_floats(classes):
    assert classes([3, 0.5, -1, 3.4e38], []) == [3.0, 0.5, -1.0, 3.4e38]


def test_names_of_classes_that_repeat_are_refused(written):
    with pytest.raises(ConfigError, match=r"data\.labels must name each class once, got 'a' twice"):
        written([], labels=["a", "b", "a"])


def test_data_prepared_when_names_were_indices_are_not_used_again(written):
    chosen = written([{"text": "a", "label": 1}])

    def state(*names):
        return registry.get("source", "labelled_texts")(replace(chosen, labels=names)).state()

    assert state("0", "1", "2") == state("a", "b", "c")
    assert state("1", "2", "3") == state("true", "false") != state("a", "b", "c")


SPAN = {"question": "q", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}}


@pytest.mark.parametrize("column", ["one", "two", "question", "context"])
def test_texts_with_a_nul_character_are_refused_with_file_and_line(tmp_path, cache, column):
    file = tmp_path / "rows.jsonl"
    row = {"one": "a", "two": "b", "label": 0, **SPAN}
    bad = row | {column: row[column] + "\0c"}
    file.write_text(json.dumps(row) + "\n" + json.dumps(bad) + "\n")
    files = {"train": [str(file)], "validation": []}
    if column in SPAN:
        chosen = build("squad", **files)
    else:
        chosen = build("labelled_files", **files, texts=["one", "two"])
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: column '{column}' has a NUL"):
        prepare(chosen, workers=1)
    assert not list(cache.glob("*/manifest.json"))


def problems(config, **changes):
    """Messages of a configuration."""
    try:
        build(config, **changes)
    except ConfigError as error:
        return error.messages
    return []


LOCAL = {"train": ["a.jsonl"], "validation": ["b.jsonl"], "test": []}
"""Files of the three splits."""


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("config", ["labelled_files", "glue_cola", "squad"])
@pytest.mark.parametrize("entry", ["t.csv", "train.tsv*", "data/rows", "a.JSONL", "t.jsonl.zip"])
@pytest.mark.parametrize("others", ["files", "nothing known"])
def test_files_of_an_unknown_format_are_named(config, split, entry, others):
    changes = LOCAL if others == "files" else {key: [entry] for key in LOCAL}
    messages = problems(config, **changes | {split: [entry]})
    (message,) = [m for m in messages if m.startswith(f"data.{split} ")]
    assert f"{entry!r} is not a .jsonl, " in message
    assert message.endswith(": convert it, or rename it if it is one")
    assert not any("hub repository" in each for each in messages)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_hub_split_among_files_is_named(split):
    (message,) = problems("glue_cola", **LOCAL | {split: ["train[:10%]"]})
    assert f"give files for data.{split} too" in message
    assert (f"data.{split}=[]" in message) is (split != "train")


@pytest.mark.parametrize("entry", ["train", "train[:10%]", "train+test", "train[10%:20%]", "v1.2"])
def test_splits_of_the_hub_are_no_files(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / entry).mkdir()
    assert not problems("glue_cola", train=[entry], validation=[entry])
    assert not problems("wmt14_ende", train=entry)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("local", [True, False])
def test_pairs_of_an_unknown_format_are_named(split, local):
    files = {"train": "a.jsonl", "validation": None, "test": None} if local else {}
    (message,) = [
        m
        for m in problems("wmt14_ende", **files | {split: "t.csv"})
        if m.startswith(f"data.{split} ")
    ]
    assert "'t.csv' is not a .jsonl, " in message and "convert it" in message
    assert "too" not in message
