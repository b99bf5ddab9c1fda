"""``prepare`` reports the amounts of every kind of data."""

import json

import pytest

from sparsepretrain.cli import main

PAIRS = ("data.train_pairs=40", "data.validation_pairs=0", "data.test_pairs=3")
NO_OTHERS = ("data.validation=[]", "data.test=[]")


@pytest.mark.parametrize(
    ("words", "report"),
    [
        (("data=cldr_ende", "data.tokenizer=bytes", "data.vocab_size=256", *PAIRS), "43 pairs"),
        (("data=digits",), "1.80k images"),
        (("data=glue_mrpc", "data.train=['{}']", *NO_OTHERS), "8 examples"),
    ],
)
def test_prepare_counts_units_of_every_kind(tmp_path, capsys, words, report):
    rows = ({"sentence1": "a", "sentence2": "b", "label": i % 2, "idx": i} for i in range(8))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word.format(tmp_path / "rows.jsonl") for word in words]
    assert main(["prepare", *words, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{report} (train " in out and f"{report.split()[1]}/s" in out


def test_options_of_the_data_are_checked(capsys):
    assert main(["prepare", "data=cldr_ende", "data.seed=many", "data.szie=3", "sed=1"]) == 2
    err = capsys.readouterr().err
    assert "data.seed" in err and "'data.szie'" in err and "'sed'" in err


def test_prepare_ignores_the_vocabulary_of_the_model(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("words and more words " * 50)
    (tmp_path / "b.txt").write_text("other words and fewer " * 50)
    files = (f"data.files=['{tmp_path}/*.txt']", "data.tokenizer=bpe", "data.vocab_size=300")
    assert main(["prepare", "data=text_files", *files]) == 0
    assert " tokens (train " in capsys.readouterr().out
    manifests = [json.loads(f.read_text()) for f in (tmp_path / "cache").glob("*/manifest.json")]
    assert manifests[0]["vocab_size"] == 300
