"""Decay searches on tiny runs: segments, ratios, interruption, and the command."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Tiny, assert_equal_bits, assert_same_run, final_state, metrics

from sparsepretrain import cli, config
from sparsepretrain.config import freeze
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies import decay, engine
from sparsepretrain.studies.decay import RESULT, DecaySearch, tune_decay
from sparsepretrain.studies.engine import CellError, Stopped
from sparsepretrain.studies.overview import show_cells
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.trainer import train

# a high learning rate, so that masks flip within a few steps of a tiny model
RUN = ("schedule.warmup=8", "steps=16", "optim.lr=1e-2", "checkpoint.every=0")
TSRSTE = (*RUN, "sparsity=tsrste", "sparsity.refresh=2", "sparsity.mvue=none")
SGD = ("optim=sgd", "optim.lr=1.0")  # Adam tolerates any decay
GRID = (1e-3, 1e-2, 1e-1)


def plan(
    tiny: Tiny, *more: str, grid: tuple[float, ...] = GRID, interval: tuple[float, float]
) -> DecaySearch:
    return DecaySearch(tiny.load(*(more or TSRSTE)), grid, interval, 8)


def tune(
    search: DecaySearch, out: Path, overrides: tuple[str, ...] = TSRSTE
) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    return tune_decay(search, out, overrides, [], Console(screen)), screen.getvalue()


@pytest.mark.parametrize("method", [pytest.param("dense", marks=pytest.mark.slow), "tsrste"])
def test_segment_is_the_bit_exact_start_of_the_run(tiny: Tiny, method: str) -> None:
    chosen = [f"sparsity={method}", *(TSRSTE[5:] if method == "tsrste" else ())]
    overrides = (*RUN, *chosen, "checkpoint.every=2", "eval.batches=0")
    whole = tiny.train(*overrides, "name=whole")
    run = tiny.load(*overrides, "name=cut")
    directory, screen = freeze.run_directory(run), io.StringIO()
    assert train(run, Console(screen), stop_after=5) == 0
    assert metrics(directory) == metrics(whole.directory)[:5], "rates and phases of all 16 steps"
    assert sorted(p.name for p in directory.glob("checkpoints/*"))[-1] == "step_00000005"
    for end in (5, 2):  # nothing to do
        assert train(run, Console(screen), stop_after=end) == 0
        assert f"is partial (step {end} of {run.steps})" in screen.getvalue()
    assert len(metrics(directory)) == 5
    assert train(run, Console(screen)) == 0
    assert_same_run(directory, whole.directory)


def test_segments_share_initial_weights_data_and_masks(tiny: Tiny) -> None:
    search = plan(tiny, interval=(0.6, 0.95))
    segments = search.cells[:2]
    dense, other = [build_session(s.run, Console(io.StringIO())) for s in segments]
    weights = dict(other.model.named_parameters())
    assert all(torch.equal(weights[name], w) for name, w in dense.model.named_parameters())
    for step in (0, 7):
        assert_equal_bits(*(t.task.batch("train", step, range(4), 4) for t in (dense, other)))
    assert_equal_bits(dense.sparsifier.masks(), other.sparsifier.masks())


@pytest.mark.parametrize("method", [pytest.param("tsrste", marks=pytest.mark.slow), "srste"])
def test_ratio_falls_with_decay_and_the_printed_command_trains(
    tiny: Tiny, tmp_path: Path, in_process: object, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    overrides = TSRSTE if method == "tsrste" else (*RUN, "sparsity=srste")
    search, out = plan(tiny, *overrides, interval=(0.05, 0.95)), tmp_path / "out"
    outcome, screen = tune(search, out, (*tiny.overrides(), *overrides, "sparsity.decay=5"))
    result = json.loads((out / RESULT).read_text())
    assert result == outcome
    rows = {row["decay"]: row for row in result["runs"]}
    assert list(rows) == list(GRID)
    weak, medium, strong = (rows[decay]["mu"] for decay in GRID)
    assert weak > medium - 0.02 and medium > strong + 0.05, "one flip in 4,000 entries is noise"
    for row in rows.values():
        flips = [m["flip_rate"] for m in metrics(Path(row["directory"])) if "flip_rate" in m]
        assert row["flip_rate"] == pytest.approx(sum(flips[-3:]) / 3)
        assert row["mu"] == row["flip_rate"] / result["dense"]["flip_rate"]
        assert f"{row['mu']:.3f}" in screen and f"{row['loss']:.4f}" in screen
    chosen = outcome["chosen"]
    assert rows[chosen]["verdict"] == "feasible" and "chosen" in screen

    words = shlex.split(outcome["message"])
    assert words[:2] == ["sparsepretrain", "train"] and words[-1] == f"sparsity.decay={chosen!r}"
    by_hand = tiny.load(*overrides, f"sparsity.decay={chosen!r}")
    assert freeze.run_directory(config.load(words[2:])) == freeze.run_directory(by_hand)

    # a second call reuses the runs
    monkeypatch.setattr(engine, "start_child", None)
    again, screen = tune(search, out, (*tiny.overrides(), *overrides, "sparsity.decay=5"))
    assert again == outcome and screen.count("is partial (step 8 of ") == 1 + len(rows)


@pytest.mark.fault
def test_signal_stops_the_search_and_it_continues_bit_exactly(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, grid=(1e-3, 1e-1), interval=(0.01, 5.0))
    dense = search.cells[0]

    def terminate() -> None:
        while not dense.directory.record_file.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=terminate)
    watcher.start()
    with pytest.raises(Stopped) as stopped:
        tune(search, tmp_path / "out")
    watcher.join()
    assert stopped.value.exit_code == 143 and not (tmp_path / "out" / RESULT).exists()
    continued, screen = tune(search, tmp_path / "out")
    assert "dense: to run" not in screen and "λ = 0.001: to run" in screen
    state = final_state(dense.directory.path)
    dense.directory.path.rename(dense.directory.path.with_name("stopped"))
    assert tune(search, tmp_path / "out")[0] == continued
    assert_equal_bits(final_state(dense.directory.path), state)


def test_partial_segment_continues(tiny: Tiny, tmp_path: Path, in_process: object) -> None:
    search = plan(tiny, grid=(1e-3,), interval=(0.01, 5.0))
    assert train(search.cells[0].run, Console(io.StringIO()), stop_after=3) == 0
    screen = io.StringIO()
    show_cells("search", search.cells, Console(screen))
    assert "from step 3" in screen.getvalue() and "2 of 2 to run or continue" in screen.getvalue()
    assert "dense: from step 3, 8 steps" in tune(search, tmp_path / "out")[1]


def test_search_without_flips_is_an_error(tiny: Tiny, tmp_path: Path, in_process: object) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*file/out .*--out DIR"):
        tune(plan(tiny, interval=(0.6, 0.95)), tmp_path / "file" / "out")
    assert not (tiny.root / "runs").exists()
    few = (*TSRSTE, "optim.lr=1e-12", "sparsity.refresh=8")
    with pytest.raises(ConfigError, match="no mask flips at the end of the dense run"):
        tune(plan(tiny, *few, interval=(0.6, 0.95)), tmp_path)


@pytest.mark.slow
def test_diverged_segment_is_a_failed_row(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, *TSRSTE, *SGD, grid=(1e-3, 1e30), interval=(0.01, 5.0))
    result, screen = tune(search, tmp_path)
    assert result["chosen"] == 1e-3 and "warning: λ = 1e+30 failed (exit code 5: diverged" in screen
    assert [row["decay"] for row in result["runs"]] == [1e-3]
    (row,) = result["failed"]
    assert (row["decay"], row["exit_code"]) == (1e30, 5) and "step " in row["error"]
    with pytest.raises(CellError, match=r"λ = 1e\+20 failed: diverged: .* see .*console.log") as no:
        tune(plan(tiny, *TSRSTE, *SGD, grid=(1e20, 1e30), interval=(0.6, 0.95)), tmp_path)
    assert no.value.exit_code == 5


def test_command_searches_and_exits_with_2_without_a_feasible_decay(
    tiny: Tiny, in_process: object, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("schedule.warmup=4", "steps=8", *TSRSTE[-2:], "optim.lr=1e-2")
    words = ["tune-decay", *tiny.overrides(*small), "--grid", "1e-3,1e-1", "--points", "2"]
    assert cli.main([*words, "--interval", "0.01,5"]) == 0
    *_, report, title, command = capsys.readouterr().out.splitlines()
    assert report.startswith("sparsepretrain report ") and report.count("tune_gpt2_nano") == 3
    assert title.startswith("to train with λ = ")
    assert cli.main([*shlex.split(command)[1:], "--cfg", "job"]) == 0
    assert cli.main([*words, "--dry-run"]) == 0
    assert "0 of 3 to run or continue" in capsys.readouterr().out
    assert cli.main([*words, "--interval", "0.001,0.002"]) == 2
    out, err = capsys.readouterr()
    assert "is partial (step 4 of 8)" in out and "warning: μ is noisy: 2 mask comparisons" in out
    assert "--grid" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["sparsity=sste"], "config error: sparsity=sste"),
        (["schedule=constant", "schedule.warmup=0"], "config error: --steps must be"),
        (["--steps", "0"], "usage error: argument --steps"),
        (["--points", "1"], "usage error: argument --points"),
        (["--grid", "1e-3,1e-6"], "usage error: argument --grid"),
        (["--grid", "a,b"], "usage error: argument --grid"),
        (["--interval", "0.5,inf"], "usage error: argument --interval"),
        (["--gird", "1,2"], "usage error: unknown flag '--gird'"),
    ],
)
def test_bad_arguments_are_one_line(
    argv: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune-decay", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"sparsepretrain: {line}") and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())


def test_flags_reach_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def tune_decay(*args: Any) -> dict[str, Any]:
        seen.append(args)
        return {"chosen": 1e-4, "message": "train", "dense": {"directory": "d"}, "runs": []}

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
