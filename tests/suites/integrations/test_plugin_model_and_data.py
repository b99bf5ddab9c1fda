"""The example of a model, a source and an optimizer of one's own, from the shell."""

import json

import pytest

from sparsepretrain import cli
from support import ROOT

EXAMPLES = ROOT / "docs" / "examples"
WORDS = [
    "--config-dir", str(EXAMPLES / "my_configs"),
    f"plugins=['{EXAMPLES / 'my_model_and_data.py'}']",
    "model=my_averages", "parallel.device=cpu", "tracker.mode=disabled",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


def test_plugin_model_trains_and_is_evaluated(tmp_path, capsys):
    runs = f"runs_dir='{tmp_path / 'runs'}'"
    assert cli.main(["train", *WORDS, runs, "steps=20", "log.every=1"]) == 0
    out = capsys.readouterr().out
    assert "my_averages" in out
    (record,) = (tmp_path / "runs").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "split" not in line]
    assert losses[-1] < losses[0] and any("flip_rate" in line for line in lines)
    assert cli.main(["eval", str(record.parent), *WORDS[:2], "split=validation"]) == 0
    assert "every one once" in capsys.readouterr().out


def test_plugin_keys_are_checked(capsys):
    assert cli.main(["train", *WORDS, "model.width=0", "data.documents=1", "optim.lrr=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    keys = ("model.width", "data.documents", "'optim.lrr' (did you mean 'optim.lr'?)")
    assert len(lines) == 3 and all(map(str.__contains__, lines, keys))
