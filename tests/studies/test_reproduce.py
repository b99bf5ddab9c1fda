"""``sparsepretrain reproduce``: checks, runs, failures and stages."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsepretrain import cli
from sparsepretrain.console import Console
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies import engine, progress
from sparsepretrain.studies.cells import Cell, Part, Selection
from sparsepretrain.studies.reproduce import study_of
from sparsepretrain.studies.results import collect
from sparsepretrain.studies.tables import Table
from support.tiny_runs import assert_same_run, metrics


def test_table_runs_stop_early_and_continue(tables, in_process, capsys):
    assert tables("small", "--stop-after", "2", "--seeds", "1") == 0
    out = capsys.readouterr().out
    assert "small: 2 partial" in out and "2/6" in out
    report = shlex.split(out.splitlines()[-1])
    assert report[:3] == ["sparsepretrain", "report", "small"] and report[-1][:9] == "runs_dir="
    assert cli.main([*report[1:], "--out", str(tables.tiny.root / "page")]) == 0
    assert "γ = 0.2" in (tables.tiny.root / "page/small.md").read_text()
    capsys.readouterr()
    assert cli.main([*report[1:], "log.every=7"]) == 2
    assert "no run of small matches" in capsys.readouterr().err
    assert {p.parent.name for p in tables.runs()} == {"dense", "γ_0.2"}

    assert tables("small", "--only", "dense") == 0
    out = capsys.readouterr().out
    assert "dense, seed 0: from step 2, 6 steps" in out and "dense, seed 1: to run" in out
    assert [p.name[-3:] for p in tables.runs()] == ["-s0", "-s1", "-s0"]

    assert tables("small") == 0
    out = capsys.readouterr().out
    assert out.count("nothing to do") == 2 and "4 finished" in out
    # an ordinary run with the same settings has the same bits
    words = [w for w in tables.tiny.overrides("sparsity=dense", "seed=1") if "runs_dir" not in w]
    expected = tables.tiny.train(*words, "name=dense", f"runs_dir={tables.tiny.root}/here")
    assert_same_run(tables.runs()[1], expected.directory)


def test_what_all_runs_lack_is_one_line_before_the_first(tables, in_process, capsys):
    absent = tables.tiny.root / "absent"
    own = [word for word in tables.tiny.overrides()[:-1] if not word.startswith("data")]
    wheels = "python_wheels is not prepared: run `sparsepretrain prepare data=python_wheels`"
    wiki = "wikitext2 is not prepared: run `sparsepretrain prepare data=wikitext2"
    bytes_of_wiki = ["data=wikitext2", "data.tokenizer=bytes"]
    for words, code, why in (
        (["data=python_wheels"], 3, wheels),
        (["data=python_wheels", "hydra/launcher=submitit_local"], 3, wheels),
        (["data=text_files", f"data.files=['{absent}']"], 3, str(absent)),
        (bytes_of_wiki, 3, wiki),
        ([f"init.path='{absent}'", "data=python_wheels"], 4, str(absent)),
    ):
        tables.write("one", nano={"overrides": own})
        assert tables("one", *words) == code
        assert why in said_once(capsys)
        assert not (tables.tiny.root / "runs").exists()
    (tables.tiny.root / "file").touch()
    assert tables("small", f"runs_dir='{tables.tiny.root / 'file'}'") == 2
    assert "set runs_dir=DIR" in said_once(capsys)
    rows = {"dense": ["data=python_wheels"], "b": bytes_of_wiki}
    tables.write("two", nano={"overrides": own}, rows=rows)
    assert tables("two") == 3
    line = said_once(capsys)
    assert line.count(wheels) == line.count(wiki) == 1


def said_once(capsys):
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("sparsepretrain: ") and "to run" not in out
    return line


def test_a_study_continues_without_the_initial_weights(tables, in_process, capsys):
    """They were read once; a run that has not begun needs them."""
    first = tables.tiny.train("sparsity=dense", "name=first").directory
    words = (f"init.path='{first}'", "--only", "dense")
    assert tables("small", "--seeds", "1", "--stop-after", "2", *words) == 0
    first.rename(first.with_name("moved"))
    assert tables("small", "--seeds", "1", *words) == 0
    capsys.readouterr()
    for again in (("--seeds", "2"), ("--seeds", "1", "resume=never")):
        assert tables("small", *again, *words) == 4
        assert str(first) in said_once(capsys)


def test_failing_cell_exits_with_1_and_is_retried(tables, in_process, capsys):
    tables.write(rows={"bad": ["optim.lr=1e30"], "dense": ["sparsity=dense"]})
    assert tables("small", "--seeds", "1") == 1
    out, err = capsys.readouterr()
    assert "warning: bad, seed 0 failed (exit code 5: diverged: step" in out
    assert "1 failed, 1 finished" in out and "sparsepretrain report small" in out
    assert "1 of 2 cells failed (bad, seed 0)" in err
    bad, dense = map(RunDirectory, tables.runs())
    assert bad.failures()["train"]["exit_code"] == 5
    assert bad.failures()["train"]["error"].startswith("diverged: step ")
    assert not dense.failures()
    dense.note_failure("test", 3, "data error: gone")
    dense.note_failure("train", -9, "killed by SIGKILL")
    assert bad.environment()["command"].startswith("sparsepretrain train --config-dir ")
    assert tables("small", "--seeds", "1", "--only", "dense") == 0
    assert list(dense.failures()) == ["test"], "the finished training is no longer a failure"


def test_printed_commands_train_the_same_runs(tables, in_process, capsys):
    words = ("small", "--only", "γ*", "--seeds", "1", "--stop-after", "3")
    assert tables(*words, "--commands") == 0
    out = capsys.readouterr().out
    (line,) = map(shlex.split, out.splitlines())
    assert line[:2] == ["sparsepretrain", "train"] and cli.main(line[1:]) == 0
    capsys.readouterr()
    assert tables(*words) == 0
    assert capsys.readouterr().out.count("nothing to do") == 1
    (run,) = tables.runs()
    assert metrics(run)[-1]["step"] == 3


def test_dry_run_and_list_run_nothing(tables, capsys):
    tables.write(nano={"minutes": 3.0})
    assert tables("small", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.count("to run") == 5 and "4 of 4 to run or continue" in out
    assert "FLOPs" in out
    assert not (tables.tiny.root / "runs").exists()
    assert cli.main(["reproduce", "--list", "--config-dir", str(tables.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("small ")]
    assert line.split() == ["small", "two", "methods", "3", "–"]


def test_parts_run_under_their_own_names(tables, in_process, capsys):
    tables.write("other", rows={"ste": ["sparsity=ste"]}, baseline=None)
    tables.write_file("both", {"title": "both", "parts": ["small", "other", "speed"]})
    tables.write_file("speed", {"title": "speed", "bench": ["python benchmarks/kernels.py"]})
    assert tables("both", "--stop-after", "1", "--seeds", "1") == 0
    out = capsys.readouterr().out
    assert "small + other: 3 partial" in out and "other: ste, seed 0" in out
    assert "speed is measured from a checkout, on a GPU: python benchmarks/kernels.py\n" in out
    assert len(tables.runs("small")) == 2 and len(tables.runs("other")) == 1
    assert tables("both", "--only", "ste", "--dry-run") == 0


BOTH = "config error: dense, γ = 0.2"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["smal"], ["config error: there is no table 'smal' (did you mean 'small'?)"]),
        (["seed=1"], ["usage error: the table comes first"]),
        (["small", "--scale", "paper"], ["config error: table small has no scale 'paper'"]),
        (
            ["small", "--only", "dens"],
            ["config error: --only: no row or cell of small is 'dens' (did you mean"],
        ),
        (["small", "seed=1"], ["config error: a table sets seed and name itself"]),
        (["small", "--seeds", "0"], ["usage error: argument --seeds: expected a number"]),
        (
            ["small", "optim.lt=1", "steps=x"],
            [f"{BOTH}: steps must be an integer", f"{BOTH}: unknown key 'optim.lt'"],
        ),
        # only the built model can tell
        (["small", "sparsity.targets=['*.nope']"], [f"{BOTH}: sparsity.targets"]),
    ],
)
def test_mistakes_are_one_line_each_before_anything_is_written(tables, words, lines, capsys):
    assert tables(*words) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == len(lines), err
    for line, start in zip(err, lines, strict=True):
        assert line.startswith(f"sparsepretrain: {start}"), line
    assert not (tables.tiny.root / "runs").exists()


def run_on(devices, jobs, runs, in_process, monkeypatch):
    """Cells of ``runs``; GPUs of each child, and of all that run when it starts."""
    seen, together = [], []

    def watched(*args, **options):
        seen.append(options["environment"]["CUDA_VISIBLE_DEVICES"].split(","))
        running = [study._used[cell] for cell in study.cells if cell.state == "running"]
        together.append([device for used in running for device in used])
        return in_process(*args, **options)

    monkeypatch.setattr(engine, "start_child", watched)
    monkeypatch.setattr(progress, "_train", lambda *_: 0)
    cells = [engine.StudyCell(run.name, run) for run in runs]
    with engine.Study("x", Console(io.StringIO()), jobs=jobs, devices=devices) as study:
        study.run(cells)
    return cells, seen, together


def test_each_child_gets_the_least_used_gpu(tiny, in_process, monkeypatch):
    runs = [tiny.load(f"name={name}", "parallel.device=auto") for name in "abcd"]
    _, seen, _ = run_on(["3", "MIG-a"], 2, runs, in_process, monkeypatch)
    assert sorted(seen[:2]) == sorted(seen[2:]) == [["3"], ["MIG-a"]]


RANKS = ("parallel=ddp", "batch.micro=1", "parallel.device=auto")
VISIBLE = "sparsepretrain.studies.reproduce.visible_devices"


def test_each_rank_of_running_cells_has_a_gpu_of_its_own(tiny, in_process, monkeypatch):
    words = ["", "parallel.nproc=2", "parallel.nproc=4", "parallel.nproc=2"]
    runs = [tiny.load(f"name=r{i}", *RANKS, *w.split()) for i, w in enumerate(words)]
    devices = ["0", "1", "2", "MIG-a"]
    cells, seen, together = run_on(devices, 4, runs, in_process, monkeypatch)
    assert [cell.state for cell in cells] == ["finished"] * 4
    # 1 GPU, then 2; the cell with 4 and the last one wait until enough of them are free
    assert seen == [["0"], ["1", "2"], devices, ["0", "1"]]
    assert all(len(set(used)) == len(used) for used in together)


def a_part(*runs):
    return [Part("x", Table(title="x"), None, [Cell("x", "", 0, (), run) for run in runs])]


def test_default_jobs_fit_the_gpus(tiny, monkeypatch):
    monkeypatch.setattr(VISIBLE, lambda: list("01234567"))
    console = Console(io.StringIO())
    run = tiny.load(*RANKS, "parallel.nproc=4")
    assert study_of(a_part(run), console).jobs == 2
    assert study_of(a_part(run), console, 1).jobs == 1
    one = [tiny.load("parallel.device=auto"), tiny.load(*RANKS)]
    assert study_of(a_part(*one), console).jobs == 8
    assert study_of(a_part(tiny.load()), console).jobs == 1


def test_too_few_gpus_are_one_line_before_the_first_cell(tables, monkeypatch, capsys):
    monkeypatch.setattr(VISIBLE, lambda: ["0", "1"])
    assert tables("small", *RANKS, "parallel.nproc=4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = "config error: parallel.nproc: expected at most 2 GPUs, got 4; lower it"
    assert line.startswith(f"sparsepretrain: {told}")
    assert not (tables.tiny.root / "runs").exists()


def test_printed_commands_start_several_ranks_with_torchrun(tables, capsys):
    assert tables("small", "--commands", *RANKS, "parallel.nproc=2") == 0
    start = "torchrun --standalone --nproc-per-node=2 -m sparsepretrain train --config-dir "
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith(start) for line in lines)


SHORT = ["steps=2", "batch.size=4", "batch.micro=4"]
STAGES = [{"name": "tuned", "finetune": "causal_lm", "overrides": SHORT}]
STAGES += [{"name": "held_out", "evaluate": "test"}]


def test_stages_follow_each_cell(tables, in_process, capsys):
    tables.write(nano={"stages": STAGES, "seeds": 1})
    words = ("small", "--only", "dense", "--stop-after", "2")
    assert tables(*words, "--commands") == 0
    commands = capsys.readouterr().out
    assert tables(*words) == 1  # text files have no test split
    out = capsys.readouterr().out
    assert "dense, seed 0, tuned: finished" in out and "1 partial, 1 finished, 1 failed" in out
    (dense,) = [run for run in map(RunDirectory, tables.runs()) if run.path.parent.name == "dense"]
    assert list(dense.failures()) == ["held_out"]
    (tuned,) = dense.finetuned("tuned", 2)
    assert tuned.path.parent.name == "dense--tuned" and not dense.finetuned("tuned", 6)
    assert tuned.record()[-1]["step"] == 2 and dense.evaluation("test") is None

    # the shell line finds everything finished and evaluates nothing twice
    stages = [STAGES[0], {"name": "held_out", "evaluate": "validation"}]
    tables.write(nano={"stages": stages, "seeds": 1})
    assert tables(*words) == 0
    assert "tuned: " in (out := capsys.readouterr().out) and out.count("nothing to do") == 2
    line = dense.evaluation("validation")
    assert line is not None and line["step"] == 2 and not dense.failures()
    assert tables(*words) == 0
    assert capsys.readouterr().out.count("nothing to do") == 3
    train, finetune, evaluate = (shlex.split(part) for part in commands.split(" && "))
    assert finetune[:3] == ["sparsepretrain", "finetune", str(dense)]
    assert cli.main(finetune[1:]) == 0 and "nothing to do" in capsys.readouterr().out
    assert cli.main([*evaluate[1:], "split=validation"]) == 0
    assert len(dense.evaluations_file.read_text().splitlines()) == 2
    assert train[:2] == ["sparsepretrain", "train"]


def test_a_stage_evaluates_an_average(tables, in_process, capsys):
    stages = [
        {"name": "last", "evaluate": "validation"},
        {"name": "mean", "evaluate": "validation", "average": 2},
    ]
    metrics = {
        name: {"label": name, "key": "loss", "better": "lower", "stage": name}
        for name in ("last", "mean")
    }
    tables.write(nano={"stages": stages, "seeds": 1}, metrics=metrics)
    words = ("small", "--only", "dense", "checkpoint.keep_last=2", "checkpoint.every=3")
    assert tables(*words, "--commands") == 0
    _, last, mean = (shlex.split(part) for part in capsys.readouterr().out.split(" && "))
    assert "average=2" in mean and not any("average" in word for word in last)
    assert tables(*words) == 0
    (dense,) = map(RunDirectory, tables.runs())
    found = [dense.evaluation("validation"), dense.evaluation("validation", average=2)]
    assert [line["averaged_steps"] for line in found] == [[], [3, 6]]
    values = [line["metrics"]["loss"] for line in found]
    assert values[0] != values[1]
    capsys.readouterr()
    assert tables(*words) == 0 and capsys.readouterr().out.count("nothing to do") == 3
    overrides = [words[3], words[4], f"runs_dir={tables.tiny.root / 'runs'}"]
    asked = Selection(only="dense", overrides=overrides, config_dirs=[tables.root])
    (cell,) = collect("small", "nano", asked).cells
    assert [cell.metrics[name] for name in ("last", "mean")] == values


def test_rows_that_prune_the_runs_of_another_row(tables, in_process, capsys):
    pruned = {"name": "ria", "prune": "ria", "row": "RIA", "pattern": "1:4"}
    pruned["options"] = {"power": 1.0, "permute": False}
    metrics = {"loss": {"label": "loss", "key": "loss", "better": "lower", "stage": "ria"}}
    tables.write(
        rows={"dense": ["sparsity=dense"], "RIA": []},
        nano={"stages": [pruned], "seeds": 1},
        metrics=metrics,
        claims=[{"text": "pruning costs", "kind": "less", "of": ["dense", "RIA"]}],
    )
    assert tables("small", "--commands") == 0
    train, prune = (shlex.split(part) for part in capsys.readouterr().out.split(" && "))
    assert prune[-2:] == ["power=1.0", "permute=false"]
    assert tables("small") == 0
    out = capsys.readouterr().out
    assert "dense, seed 0, ria: to run, after 6 steps; prints to" in out
    assert "dense, seed 0, ria: finished" in out
    (dense,) = map(RunDirectory, tables.runs())
    results = dense.pruning(6, "ria")["perplexity"]
    overrides = [f"runs_dir={tables.tiny.root / 'runs'}"]
    found = collect("small", "nano", Selection(overrides=overrides, config_dirs=[tables.root]))
    values = {cell.row: cell.metrics["loss"] for cell in found.cells}
    expected = {"dense": "before", "RIA": "after"}
    assert values == {row: results[when][0]["loss"] for row, when in expected.items()}
    # the shell line finds everything finished
    assert cli.main(train[1:]) == 0 and cli.main(prune[1:]) == 0
    assert capsys.readouterr().out.count("nothing to do") == 2
    assert tables("small") == 0
    assert capsys.readouterr().out.count("nothing to do") == 2
    assert cli.main(["report", "small", *overrides, "--config-dir", str(tables.root)]) == 0
    page = Path("results/tables/small.md")
    files = [page] if page.is_file() else [*tables.tiny.root.rglob("small.md")]
    assert "| RIA |" in files[0].read_text()


def test_rows_that_fine_tune_the_runs_of_another_row(tables, in_process, capsys):
    words = ["sparsity=ste", "steps=4", "epochs=null", "batch.size=4", "batch.micro=2"]
    tuned = {"name": "ste", "finetune": "causal_lm", "row": "STE", "overrides": words}
    tables.write(
        rows={"dense": ["sparsity=dense"], "STE": []},
        nano={"stages": [tuned], "seeds": 1},
        metrics={"loss": {"label": "loss", "key": "loss", "better": "lower"}},
        claims=[{"text": "retraining helps", "kind": "less", "of": ["STE", "dense"]}],
    )
    assert tables("small", "--commands") == 0
    train, finetune = (shlex.split(part) for part in capsys.readouterr().out.split(" && "))
    overrides = [f"runs_dir={tables.tiny.root / 'runs'}"]
    asked = Selection(overrides=overrides, config_dirs=[tables.root])
    assert cli.main(train[1:]) == 0
    states = {cell.row: cell.state for cell in collect("small", "nano", asked).cells}
    assert states == {"dense": "finished", "STE": "missing"}
    assert cli.main(finetune[1:]) == 0
    capsys.readouterr()
    assert tables("small") == 0
    assert capsys.readouterr().out.count("nothing to do") == 2
    found = {cell.row: cell for cell in collect("small", "nano", asked).cells}
    (dense,) = [run for run in map(RunDirectory, tables.runs()) if "--" not in run.path.parent.name]
    (run,) = dense.finetuned("ste", 6)
    lines = [json.loads(line) for line in run.record_file.read_text().splitlines()]
    last = [line["loss"] for line in lines if "split" in line][-1]
    assert found["STE"].metrics["loss"] == last != found["dense"].metrics["loss"]
    assert (found["STE"].state, found["STE"].steps) == ("finished", 4)
    assert found["STE"].command.startswith("sparsepretrain finetune runs/small/dense/")
    assert "sparsity=ste steps=4" in found["STE"].command
    assert cli.main(["report", "small", *overrides, "--config-dir", str(tables.root)]) == 0
    page = Path("results/tables/small.md")
    files = [page] if page.is_file() else [*tables.tiny.root.rglob("small.md")]
    assert "| STE |" in files[0].read_text()


def test_numbers_of_a_stage_are_those_of_its_settings_and_of_the_last_step(
    tables, in_process, capsys
):
    """Whatever ran under the name of a stage before: other settings, or a shorter run."""
    metrics = {
        name: {"label": name, "key": "loss", "better": "lower", "stage": name}
        for name in ("tuned", "held_out", "ria")
    }
    asked = Selection(
        only="dense",
        overrides=[f"runs_dir={tables.tiny.root / 'runs'}"],
        config_dirs=[tables.root],
    )

    def found(rate, power, *, runs=True, stop=()):
        words = [*SHORT, "optim.lr=1", f"optim.lr={rate}"]  # the last one wins
        stages = [
            {"name": "tuned", "finetune": "causal_lm", "overrides": words},
            {"name": "held_out", "evaluate": "validation"},
            {"name": "ria", "prune": "ria", "options": {"power": power, "permute": False}},
        ]
        tables.write(nano={"stages": stages, "seeds": 1}, metrics=metrics)
        if runs:
            assert tables("small", "--only", "dense", *stop) == 0
            capsys.readouterr()
        (cell,) = collect("small", "nano", asked).cells
        return cell.metrics

    partial = found("1e-3", 1.0, stop=("--stop-after", "2"))
    assert partial == {}, "a partial run has no numbers in a table"
    (dense,) = (run for run in map(RunDirectory, tables.runs()) if run.path.parent.name == "dense")
    lines = dense.evaluations_file.read_text()
    first = found("1e-3", 1.0)
    assert first.keys() == metrics.keys() and dense.pruning(6, "ria") is not None
    assert found("3e-2", 1.0, runs=False).keys() == {"held_out", "ria"}
    assert found("1e-3", 9.0, runs=False).keys() == {"tuned", "held_out"}
    other = found("3e-2", 9.0)
    assert other["held_out"] == first["held_out"] and other["tuned"] != first["tuned"]
    assert dense.pruning(6, "ria")["settings"]["options"]["power"] == 9.0
    assert found("1e-3", 9.0, runs=False) == {**other, "tuned": first["tuned"]}
    dense.evaluations_file.write_text(lines)  # that of the last step failed
    assert found("1e-3", 9.0, runs=False).keys() == {"tuned", "ria"}


def test_a_row_whose_pruning_did_not_run_is_missing(tables, in_process, capsys):
    pruned = {"name": "ria", "prune": "ria", "row": "RIA", "options": {"permute": False}}
    tables.write(
        rows={"dense": ["sparsity=dense"], "RIA": []},
        nano={"stages": [pruned], "seeds": 1},
        metrics={"loss": {"label": "loss", "key": "loss", "better": "lower", "stage": "ria"}},
    )
    asked = Selection(
        overrides=[f"runs_dir={tables.tiny.root / 'runs'}"], config_dirs=[tables.root]
    )
    assert tables("small") == 0
    (dense,) = map(RunDirectory, tables.runs())
    shutil.rmtree(dense.pruned)

    def state():
        return {cell.row: cell.state for cell in collect("small", "nano", asked).cells}

    assert state() == {"dense": "finished", "RIA": "missing"}
    dense.note_failure("ria", 4, "disk full")
    assert state() == {"dense": "finished", "RIA": "failed"}
    assert cli.main(["report", "small", *asked.overrides, "--config-dir", str(tables.root)]) == 0
    text = Path("reports/small/small.md").read_text()
    assert "1 of 2 runs are finished, 1 failed" in text and "```sh\n\n" not in text


def test_impossible_stages_are_refused_before_training(tables, capsys):
    stage = {"name": "mean", "evaluate": "validation", "average": 5}
    for words in (["checkpoint.keep_last=4"], ["checkpoint.keep_last=9", "checkpoint.every=2"]):
        tables.write(nano={"stages": [stage]})
        assert tables("small", "--only", "dense", *words) == 2
        assert "config error: dense: mean: average=5: expected" in capsys.readouterr().err
    tables.write(nano={"stages": [{"name": "x", "finetune": "causal_lm", "average": 2}]})
    assert tables("small") == 2
    assert "average belongs to evaluate" in capsys.readouterr().err
    for stage, line in (
        ({"name": "x", "finetune": "python_qs"}, "x: there is no recipe to fine-tune on"),
        ({"name": "x", "finetune": "causal_lm", "overrides": ["optim.lt=1"]}, "x: unknown key"),
        ({"name": "x", "finetune": "masked_lm"}, "x: task masked_lm does not work with model="),
        ({"name": "x", "prune": "wand"}, "x: unknown pruning 'wand' (did you mean 'wanda'?)"),
        ({"name": "x", "prune": "wanda", "pattern": "2-4"}, "x: pattern: expected N:M"),
        ({"name": "x", "prune": "ria", "options": {"powr": 1}}, "x: unknown key 'powr'"),
    ):
        tables.write(nano={"stages": [stage]})
        assert tables("small", "--only", "dense") == 2
        assert f"config error: dense: {line}" in capsys.readouterr().err
    tables.write(nano={"stages": [{"name": "train", "evaluate": "train"}]})
    assert tables("small") == 2
    assert "must be one of" in capsys.readouterr().err
    assert not (tables.tiny.root / "runs").exists()


@pytest.mark.fault
@pytest.mark.parametrize(("verb", "within"), [("reproduce", True), ("train", False)])
def test_interrupted_and_continued_from_the_shell(tables, verb, within):
    """SIGINT to the process group, as from a terminal: during a run, and as one ends."""
    options = ["eval.batches=0", "checkpoint.every=0", "log.layers_every=0"]
    options.append("steps=100000" if within else "steps=6")
    words = [*tables.words("small", "--seeds", "1"), *options]
    if verb == "train":
        words = ["train", "-m", "name=small", *tables.tiny.overrides(*options, "seed=0,1")]
    command = [sys.executable, "-m", "sparsepretrain", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    awaited = "metrics.jsonl" if within else "checkpoints/step_00000006/manifest.json"
    deadline, found = time.monotonic() + 120, list[Path]()
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = list((tables.tiny.root / "runs/small").glob(f"*/*/{awaited}"))
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 130, output + errors
    assert errors == "sparsepretrain: stopped: the same command continues where this one stopped\n"
    assert output.splitlines()[-1].startswith("sparsepretrain report ")
    place = found[0].parents[0 if within else 2]
    saved = max(int(p.name.removeprefix("step_")) for p in (place / "checkpoints").iterdir())
    end = saved + 2 if within else 6
    command += ["--stop-after", str(end)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    state = "partial" if within else "finished"
    assert f"small: 2 {state}" in done.stdout and "waiting" not in done.stdout
    if within:
        assert "1 stopped, 1 waiting" in output and "stopping: " in output
        assert f"from step {saved}, {end} steps" in done.stdout
    else:
        assert f"{place} is finished (6 steps): nothing to do" in done.stdout
    assert [metrics(run)[-1]["step"] for run in tables.runs()] == [end, end]
    log = RunDirectory(place).console_log.read_text()
    assert log.startswith("$ sparsepretrain train ")


TUNE = {"seeds": [5], "grid": ["optim.lr=1e-3,1e-2,1e30"], "rows": {"γ = 0.2": ["clip=0.5"]}}


@pytest.mark.slow
def test_the_best_setting_of_each_row_is_run_with_the_seeds_of_the_table(
    tables, in_process, capsys
):
    tables.write(nano={"seeds": 2, "tune": TUNE})
    assert tables("small", "--dry-run") == 0
    assert "repeat the command after them" in capsys.readouterr().out
    # the rate of 1e30 diverges: the worst setting, and no failure of the table
    assert tables("small") == 0
    out = capsys.readouterr().out
    assert "1e30, seed 5 failed (exit code 5" in out and "γ = 0.2, seed 1: to run" in out
    judging = [run for run in tables.runs() if run.name[-3:] != "-s5"]
    assert len(judging) == 4 and len(tables.runs()) == 10
    for row in ("dense", "γ_0.2"):
        tried = {run: run for run in tables.runs() if run.parent.name.startswith(f"{row}--")}
        losses = {run: metrics(run)[-1].get("loss") for run in tried}
        finished = {run: loss for run, loss in losses.items() if "1e30" not in run.parent.name}
        best = RunDirectory(min(finished, key=lambda run: finished[run])).config()
        own = [RunDirectory(run).config() for run in judging if run.parent.name == row]
        assert [c["optim"]["lr"] for c in own] == [best["optim"]["lr"]] * 2
        assert [c["clip"] for c in own] == [best["clip"]] * 2

    report = [*shlex.split(out.splitlines()[-1])[1:], "--out", str(tables.tiny.root / "page")]
    assert cli.main(report) == 0
    page = (tables.tiny.root / "page/small.md").read_text()
    assert "3 settings per row, each run with the seed 5" in page
    assert "| dense | `optim.lr=1e-" in page and "inf" in page
    capsys.readouterr()

    # finished runs are kept, and one row at a time gives the same
    assert tables("small", "--only", "dense", "--seeds", "1") == 0
    assert capsys.readouterr().out.count("nothing to do") == 3


@pytest.mark.parametrize(
    ("words", "line"),
    [(["--seeds", "4..6"], "got [5]. Choose others"), (["optim.lr=1e-3"], "tunes this key itself")],
)
def test_tuning_seeds_and_keys_are_those_of_the_table(tables, capsys, words, line):
    tables.write(nano={"seeds": 2, "tune": TUNE})
    assert tables("small", *words) == 2
    assert line in capsys.readouterr().err
