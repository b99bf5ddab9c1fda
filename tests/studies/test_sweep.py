"""``sparsepretrain sweep``: words, runs, and a search."""

import math
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from sparsepretrain import cli
from sparsepretrain.errors import DivergedError
from sparsepretrain.runs.directory import find_runs
from sparsepretrain.studies.sweep import read_axes
from support import ROOT

EXAMPLE = ROOT / "docs/examples/search.py"


def axes(*words: str) -> Any:
    return read_axes(words)


def test_words_become_values_and_seeds():
    found = axes(
        "sparsity=ste,srste", "seed=0..2", "optim.lr=1e-3,2e-3", "steps=range(4,9,2)",
        "sparsity.targets=[ffn,attention]", "name2='a b',c", "batch.size=4",
    )  # fmt: skip
    assert found.seeds == [0, 1, 2]
    assert found.values == {
        "sparsity": ["ste", "srste"], "optim.lr": ["0.001", "0.002"], "steps": ["4", "6", "8"],
        "name2": ["'a b'", "c"],
    }  # fmt: skip
    assert found.fixed == ["sparsity.targets=[ffn,attention]", "batch.size=4"]
    assert axes("seed=3,5,3").seeds == [3, 5] and axes("seed=4").seeds == [4]
    assert axes("model.n_layer=1..3").values == {"model.n_layer": ["1", "2", "3"]}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optim.lr=1e-4..1e-2"], "config error: run: optim.lr must be a number, got '1e-4..1e-2'"),
        (["optim.lr=interval(0,1)"], "config error: optim.lr=interval(0,1): expected values"),
        (["seed=4..1"], "config error: seed=4..1: the end of a range must not be below its"),
        (["name=a,b"], "config error: name="),
        (["sparsity=glob(s*)"], "config error: sparsity=glob(s*): expected values"),
        (["--name", "a/b"], "config error: --name must be a plain directory name, got 'a/b'"),
        (["steps=1,x"], "config error: steps=x: steps must be an integer, got 'x'"),
        (["sparsity=[ste,sste"], "config error: run: override 'sparsity=[ste,sste' cannot be read"),
        (["optim.lt=1,2"], "config error: optim.lt=1, optim.lt=2: unknown key 'optim.lt'"),
        ([], "config error: a sweep needs several values"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(words, line, tmp_path, capsys):
    assert cli.main(["sweep", *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"sparsepretrain: {line}") and err.count("\n") == 1 and not out, err
    assert not list(tmp_path.iterdir())


def test_sweep_prints_its_report_command(tiny, in_process, capsys):
    words = [*tiny.overrides("sparsity=dense,ste", "seed=1,2"), "--name", "pair"]
    assert cli.main(["sweep", *words, "--stop-after", "1"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    command = shlex.split(last)
    assert command[:2] == ["sparsepretrain", "report"]
    runs = {run.path for run in find_runs([tiny.root / "runs"])}
    assert {run.path for run in find_runs([Path(word) for word in command[2:]])} == runs
    names = sorted(f"{p.parent.name} {p.name[-2:]}" for p in runs)
    assert names == [f"sparsity_{m} s{s}" for m in ("dense", "ste") for s in (1, 2)]
    assert {p.parent.parent.name for p in runs} == {"pair"}
    assert cli.main(["sweep", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("from step 1") == 4


def test_search_example_returns_the_mean_of_both_seeds(tiny, monkeypatch):
    calls = []

    def call(command: list[str]) -> int:
        calls.append(command)
        return cli.main(command[3:]) if len(calls) < 3 else DivergedError.exit_code

    words = tiny.overrides("steps=2", "eval.batches=1")
    monkeypatch.setattr(sys, "argv", ["search.py", *(w for w in words if "runs_dir" not in w)])
    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.chdir(tiny.root)
    find = runpy.run_path(str(EXAMPLE))["validation_loss"]
    found = find(optuna.trial.FixedTrial({"optim.lr": 1e-3, "sparsity": "ste"}))
    runs = find_runs([tiny.root / "runs/search"])
    assert {run.config()["optim"]["lr"] for run in runs} == {1e-3}
    losses = [run.record()[-1]["loss"] for run in runs]
    assert len(losses) == 2 and found == pytest.approx(sum(losses) / 2)
    assert find(optuna.trial.FixedTrial({"optim.lr": 1e-2, "sparsity": "ste"})) == math.inf
