"""``sparsepretrain tune-decay``: flags, help, one-line errors, and a search from the shell."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsepretrain import cli
from sparsepretrain.studies import decay

TINY = ("schedule.warmup=4", "steps=8", "sparsity.refresh=2", "sparsity.mvue=none", "optim.lr=1e-2")


def test_help_documents_every_flag_and_the_rule(capsys):
    assert cli.main(["tune-decay", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--grid LOW,HIGH", "default: 6e-06,0.001", "--points K", "default: 5",
        "--interval LOW,HIGH", "default: 0.6,0.95", "--steps T", "default: schedule.warmup",
        "--out DIR", "--dry-run", "--config-dir", "nearest to the middle", "exit code is 2",
        "sparsity=tsrste",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["sparsity=sste"], "config error: sparsity=sste"),
        (["sparsity.gamma=1"], "config error: unknown key 'sparsity.gamma'"),
        (["schedule=constant", "schedule.warmup=0"], "config error: schedule.warmup=0"),
        (["--steps", "0"], "usage error: argument --steps"),
        (["--steps", "701"], "config error: --steps 701"),
        (["--points", "1"], "usage error: argument --points"),
        (["--grid", "1e-3,1e-6"], "usage error: argument --grid"),
        (["--grid", "1e-3"], "usage error: argument --grid"),
        (["--grid", "a,b"], "usage error: argument --grid"),
        (["--interval", "0,1"], "usage error: argument --interval"),
        (["--interval", "0.5,inf"], "usage error: argument --interval"),
        (["--gird", "1,2"], "usage error: unknown flag '--gird'"),
        (["resume=x"], "config error: resume=x"),
    ],
)
def test_bad_arguments_are_one_line(argv, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune-decay", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"sparsepretrain: {line}") and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())


def test_a_refusal_does_not_wait_for_torch(tmp_path):
    code = (
        "import sys; from sparsepretrain.cli import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "tune-decay", "sparsity=ste"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and "sparsity=ste has no decay" in done.stderr


def test_flags_reach_the_search(monkeypatch, tmp_path):
    seen: list[Any] = []

    def tune_decay(*args: Any) -> dict[str, Any]:
        seen.append(args)
        return {"chosen": 1e-4, "message": "train"}

    monkeypatch.setattr(decay, "tune_decay", tune_decay)
    flags = ["--grid", "1e-5,1e-3", "--points", "3", "--interval", "0.5,0.9", "--steps", "45"]
    words = ["seed=4", *flags, "--out", str(tmp_path), "sparsity.refresh=5"]
    assert cli.main(["tune-decay", *words]) == 0
    search, out, overrides, config_dirs, _ = seen[0]
    assert search.grid == (1e-5, 1e-4, 1e-3) and search.interval == (0.5, 0.9)
    assert (search.steps, search.refresh, search.run.seed) == (45, 5, 4)
    assert (out, config_dirs) == (tmp_path, [])
    assert overrides == ["sparsity=tsrste", "seed=4", "sparsity.refresh=5"]
    assert cli.main(["tune-decay"]) == 0
    search, out, *_ = seen[1]
    assert search.steps == 50 and len(search.grid) == 5
    assert out.parent == Path("runs/tune_gpt2_nano") and out.name.startswith("search-")


def test_search_writes_a_plot_and_prints_the_command(tiny, capsys):
    words = ["tune-decay", *tiny.overrides(*TINY), "--grid", "1e-3,1e-1", "--points", "2"]
    assert cli.main([*words, "--interval", "0.01,5"]) == 0
    captured = capsys.readouterr()
    out = captured.out
    assert out.index("decay search") < out.index("plot: ") < out.index("to train with λ = ")
    assert not captured.err
    picture = Path(out.partition("plot: ")[2].splitlines()[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    command = shlex.split(out.splitlines()[-1])
    assert cli.main([*command[1:], "--cfg", "job"]) == 0

    # planning again finds all of them done
    assert cli.main([*words, "--dry-run"]) == 0
    assert "0 of 3 to run or continue" in capsys.readouterr().out

    # the same runs under a narrow interval: the exit code says that nothing was found
    assert cli.main([*words, "--interval", "0.001,0.002"]) == 2
    captured = capsys.readouterr()
    assert "is partial (step 4 of 8)" in captured.out and "plot: " in captured.out
    assert "--grid" in captured.err
    assert captured.err.startswith("sparsepretrain: config error: ")
    assert captured.err.count("\n") == 1


def test_failed_plot_keeps_the_search_result(tiny, monkeypatch, capsys):
    from sparsepretrain import reports

    def decay_report(result: dict[str, Any], out: Path) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(reports, "decay_report", decay_report)
    found = {"chosen": 1e-4, "message": "the command"}
    monkeypatch.setattr(decay, "tune_decay", lambda *_: found)
    assert cli.main(["tune-decay"]) == 0
    out = capsys.readouterr().out
    assert "warning: no plot: no space" in out and out.endswith("the command\n")
