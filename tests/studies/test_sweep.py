"""``sparsepretrain sweep``: words, runs, searches, and jobs of a cluster."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparsepretrain import cli
from sparsepretrain.runs.directory import find_runs
from sparsepretrain.studies import engine, slurm
from sparsepretrain.studies.sweep import Range, read_axes


def axes(*words: str, search: bool = False) -> Any:
    return read_axes(words, [], search=search)


def test_words_become_values_and_seeds():
    found = axes(
        "sparsity=ste,srste", "seed=0..2", "optim.lr=1e-3,2e-3", "steps=range(4,9,2)",
        "sparsity.targets=[ffn,attention]", "model=glob(gpt2_1*)", "name2='a b',c", "batch.size=4",
    )  # fmt: skip
    assert found.seeds == [0, 1, 2]
    assert found.values == {
        "sparsity": ["ste", "srste"], "optim.lr": ["0.001", "0.002"], "steps": ["4", "6", "8"],
        "model": ["gpt2_124m", "gpt2_1558m"], "name2": ["'a b'", "c"],
    }  # fmt: skip
    assert found.fixed == ["sparsity.targets=[ffn,attention]", "batch.size=4"]
    assert axes("seed=3,5,3").seeds == [3, 5] and axes("seed=4").seeds == [4]
    assert axes("model.n_layer=1..3").values == {"model.n_layer": ["1", "2", "3"]}


def test_search_words_become_ranges():
    words = ("optim.lr=1e-4..1e-2", "model.n_layer=1..3", "ema=interval(0,1)", "seed=0..1")
    found = axes(*words, search=True)
    assert found.ranges == {
        "optim.lr": Range(1e-4, 1e-2, log=True, whole=False),
        "model.n_layer": Range(1, 3, log=False, whole=True),
        "ema": Range(0, 1, log=False, whole=False),
    }
    assert found.seeds == [0, 1]
    assert axes("a=tag(log,interval(1,2))", search=True).ranges["a"].log


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optim.lr=1e-4..1e-2"], "config error: optim.lr=0.0001..0.01, logarithmic is a range to"),
        (["seed=4..1"], "config error: seed=4..1: the end of a range must be above its start"),
        (["name=a,b"], "config error: name="),
        (["sparsity=glob(z*)"], "config error: sparsity=glob(z*) matches no option of sparsity"),
        (["--search", "3"], "config error: a search needs a range (optim.lr=1e-4..1e-2)"),
        (["--search", "3", "--commands", "seed=1", "optim.lr=1..2"], "usage error: --commands"),
        (["--name", "a/b"], "config error: --name must be a plain directory name, got 'a/b'"),
        (["steps=1,x"], "config error: steps=x: steps must be an integer, got 'x'"),
        (["sparsity=[ste,sste"], "config error: run: override 'sparsity=[ste,sste' cannot be read"),
        (["optim.lt=1,2"], "config error: optim.lt=1, optim.lt=2: unknown key 'optim.lt'"),
        ([], "config error: a sweep needs several values"),
        (["seed=range(0,1000000000)"], "config error: a sweep takes at most 10,000 runs"),
        (["seed=0..999", "optim.lr=1,2,3,4,5,6,7,8,9,10,11"], "config error: a sweep takes at"),
        (["--slurm", "gpus"], "usage error: argument --slurm: must be KEY=VALUE,KEY=VALUE"),
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
    assert {Path(word) for word in command[2:]} == runs
    names = sorted(f"{p.parent.name} {p.name[-2:]}" for p in runs)
    assert names == [f"sparsity_{m} s{s}" for m in ("dense", "ste") for s in (1, 2)]
    assert {p.parent.parent.name for p in runs} == {"pair"}
    assert cli.main(["sweep", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("from step 1") == 4


def test_search_continues_and_prints_the_best_value(tiny, in_process, monkeypatch, capsys):
    words = ["sweep", *tiny.overrides("optim.lr=1e-6..1e-1", "steps=2"), "--search"]
    assert cli.main([*words, "5", "--dry-run"]) == 0
    assert "search: 5 trials like this, optim.lr in 1e-06..0.1, log" in capsys.readouterr().out
    work, calls = engine.StudyCell.work, 0

    def stop(cell: engine.StudyCell) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return work(cell)

    monkeypatch.setattr(engine.StudyCell, "work", stop)
    assert cli.main([*words, "3"]) == 130
    assert cli.main([*words, "3"]) == 0
    assert calls == 4, "only the second trial starts over"
    out = capsys.readouterr().out
    command = shlex.split(out[out.index("to train with the best values:") :].splitlines()[1])
    rate = next(float(w.partition("=")[2]) for w in command if w.startswith("optim.lr="))
    runs = find_runs([tiny.root / "runs"])
    losses = {run.config()["optim"]["lr"]: run.record()[-1]["loss"] for run in runs}
    assert len(losses) == 3 and losses[rate] == min(losses.values())
    # all trials are done; a search for another metric has its own trials
    assert cli.main([*words, "3"]) == 0 and calls == 4
    assert cli.main([*words, "1", "--metric", "bleu"]) == 2
    assert "no trial has validation bleu" in capsys.readouterr().err


def test_slurm_jobs_run_shell_lines(tiny, capsys):
    words = ["sweep", *tiny.overrides("sparsity=ste,dense"), "--slurm", "partition=gpu"]
    if not os.environ.get("SLURM_CLUSTER_NAME"):
        assert cli.main(words) == 2
        assert "--slurm: Could not detect" in capsys.readouterr().err
    slurm.Line()(f"echo $((1 + 1)) > {tiny.root}/two")
    assert (tiny.root / "two").read_text() == "2\n"
    with pytest.raises(subprocess.CalledProcessError):
        slurm.Line()("exit 3")


def test_sbatch_gets_the_options(tiny, tmp_path, monkeypatch, capsys):
    for name, text in (("srun", ""), ("sbatch", f"cp $1 {tmp_path}/seen; echo job 12")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = {"partition": "gpu", "gpus": "1", "time": "2:00:00", "jobs": "2"}
    jobs = slurm.submit("x", ["true", "true", "true"], settings, tmp_path / "out")
    assert [job.job_id for job in jobs] == ["12_0", "12_1", "12_2"]
    script = (tmp_path / "seen").read_text()
    for line in ("--partition=gpu", "--gpus=1", "--time=2:00:00", "--array=0-2%2"):
        assert f"#SBATCH {line}\n" in script
    slurm.submit("x", ["true"], {}, tmp_path / "out")
    assert "--time" not in (tmp_path / "seen").read_text()
    words = ["sweep", *tiny.overrides("sparsity=ste,dense"), "--slurm", "partition=gpu"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "job 12_0: " in out and "dense, seed 0; prints to " in out
