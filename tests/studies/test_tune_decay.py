"""Decay searches on tiny runs: segments, ratios, interruption, and the files they leave."""

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

from sparsepretrain import config, kernels
from sparsepretrain.config import freeze
from sparsepretrain.errors import ConfigError
from sparsepretrain.reports import decay_report
from sparsepretrain.studies import engine
from sparsepretrain.studies.decay import RESULT, Search, tune_decay
from sparsepretrain.studies.engine import CellError, Stopped
from sparsepretrain.studies.overview import show_cells
from sparsepretrain.tracking.console import Console
from sparsepretrain.training import loop
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.trainer import train

# a high learning rate, so that masks flip in a few steps of a tiny model
RUN = ("schedule.warmup=8", "steps=16", "optim.lr=1e-2", "checkpoint.every=0")
TSRSTE = (*RUN, "sparsity=tsrste", "sparsity.refresh=2", "sparsity.mvue=none")
SGD = ("optim=sgd", "optim.lr=1.0")  # Adam bears any decay
GRID = (1e-3, 1e-2, 1e-1)


def plan(
    tiny: Tiny, *more: str, grid: tuple[float, ...] = GRID, interval: tuple[float, float]
) -> Search:
    run = tiny.load(*(more or TSRSTE))
    return Search(run, grid, interval, 8)


def tune(
    search: Search, out: Path, overrides: tuple[str, ...] = TSRSTE
) -> tuple[dict[str, Any], str]:
    screen = io.StringIO()
    return tune_decay(search, out, overrides, [], Console(screen)), screen.getvalue()


@pytest.mark.parametrize("method", [pytest.param("dense", marks=pytest.mark.slow), "tsrste"])
def test_a_segment_is_the_start_of_the_run(tiny: Tiny, method: str) -> None:
    chosen = [f"sparsity={method}", *(TSRSTE[5:] if method == "tsrste" else ())]
    overrides = (*RUN, *chosen, "checkpoint.every=2", "eval.batches=0")
    whole = tiny.train(*overrides, "name=whole")
    run = tiny.load(*overrides, "name=cut")
    directory, screen = freeze.run_directory(run), io.StringIO()
    assert train(run, Console(screen), stop_after=5) == 0
    assert metrics(directory) == metrics(whole.directory)[:5], "rates and phases of all 16 steps"
    assert "steps 0 to 5" in screen.getvalue() and "step 5/5" in screen.getvalue()
    assert sorted(p.name for p in directory.glob("checkpoints/*"))[-1] == "step_00000005"
    for end in (5, 4, 2):  # shorter than what is there: nothing to do
        assert train(run, Console(screen), stop_after=end) == 0
        assert f"is partial (step {end} of {run.steps})" in screen.getvalue()
    assert len(metrics(directory)) == 5
    assert train(run, Console(screen)) == 0
    assert_same_run(directory, whole.directory)


def test_all_segments_start_equal_and_see_the_same_data(tiny: Tiny) -> None:
    search = plan(tiny, interval=(0.6, 0.95))
    segments = [search.reference(), *map(search.sparse, GRID[:2])]
    dense, *sparse = [build_session(s.run, Console(io.StringIO())) for s in segments]
    for other in sparse:
        weights, reference = dict(other.model.named_parameters()), dense.model.named_parameters()
        assert all(torch.equal(weights[name], value) for name, value in reference)
        for step in (0, 7):
            batches = [t.task.batch("train", step, range(4), 4) for t in (dense, other)]
            assert_equal_bits(*batches)
        assert other.sparsifier.masks().keys() == dense.sparsifier.masks().keys()
    for name, mask in dense.sparsifier.masks().items():
        assert all(torch.equal(mask, other.sparsifier.masks()[name]) for other in sparse)


def test_dense_flips_are_those_of_transposable_masks_at_each_refresh(tiny: Tiny) -> None:
    t = build_session(plan(tiny, interval=(0.6, 0.95)).reference().run, Console(io.StringIO()))
    layers = t.sparsifier.layers
    before = {name: kernels.transposable_mask(v.weight) for name, v in layers.items()}
    seen = []
    for _ in range(5):
        loop.train_step(t)
        rate = t.sparsifier.metrics().get("flip_rate")
        assert (rate is None) == (t.step % 2 == 1)
        if rate is None:
            continue
        after = {name: kernels.transposable_mask(v.weight) for name, v in layers.items()}
        flips = sum(int(kernels.flip_count(before[k], after[k])) for k in before)
        assert rate == flips / sum(mask.numel() for mask in after.values())
        before = after
        seen.append(rate)
    assert len(seen) == 2 and min(seen) > 0


@pytest.mark.parametrize("method", [pytest.param("tsrste", marks=pytest.mark.slow), "srste"])
def test_the_ratio_falls_and_the_printed_command_trains(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
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

    # a second call reads what is there
    monkeypatch.setattr(engine, "start_child", None)
    again, screen = tune(search, out, (*tiny.overrides(), *overrides, "sparsity.decay=5"))
    assert again == outcome and screen.count("is partial (step 8 of ") == 1 + len(rows)
    assert decay_report(result, out).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_no_feasible_decay_is_said_and_recorded(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, grid=(1e-7, 1e-6), interval=(0.1, 0.2))
    result, screen = tune(search, tmp_path)
    assert result["chosen"] is None and "raise the end of --grid" in result["message"]
    assert {row["verdict"] for row in result["runs"]} == {"too small"}
    assert "too small" in screen and decay_report(result, tmp_path).is_file()


@pytest.mark.fault
def test_a_signal_stops_the_search_and_nothing_is_lost(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, grid=(1e-3, 1e-1), interval=(0.01, 5.0))
    dense = search.reference()

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


def test_a_partial_segment_is_planned_and_continued(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, grid=(1e-3,), interval=(0.01, 5.0))
    assert train(search.reference().run, Console(io.StringIO()), stop_after=3) == 0
    screen = io.StringIO()
    show_cells("search", search.cells, Console(screen))
    assert "from step 3" in screen.getvalue() and "2 of 2 to run or continue" in screen.getvalue()
    assert "dense: from step 3, 8 steps" in tune(search, tmp_path / "out")[1]


@pytest.mark.slow
def test_few_comparisons_are_warned_of(tiny: Tiny, tmp_path: Path) -> None:
    overrides = (*TSRSTE, "sparsity.refresh=8")
    search = plan(tiny, *overrides, grid=(1e-3,), interval=(0.01, 5.0))
    outcome, screen = tune(search, tmp_path)
    assert outcome["chosen"] == 1e-3
    assert "warning: μ rests on a single comparison" in screen and "sparsity.refresh" in screen
    few = plan(tiny, *TSRSTE, "sparsity.refresh=4", interval=(0.6, 0.95))
    assert few.doubt.startswith("μ rests on 2 comparisons of masks")


def test_a_frozen_reference_is_an_error(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, *TSRSTE, "optim.lr=1e-12", interval=(0.6, 0.95))
    with pytest.raises(ConfigError, match="no mask flips at the end of the dense run"):
        tune(search, tmp_path)


@pytest.mark.slow
def test_a_diverged_segment_is_a_failed_row(tiny: Tiny, tmp_path: Path) -> None:
    search = plan(tiny, *TSRSTE, *SGD, grid=(1e-3, 1e30), interval=(0.01, 5.0))
    result, screen = tune(search, tmp_path)
    assert result["chosen"] == 1e-3 and "warning: λ = 1e+30 failed (exit code 5: diverged" in screen
    assert [row["decay"] for row in result["runs"]] == [1e-3]
    (row,) = result["failed"]
    assert (row["decay"], row["exit_code"]) == (1e30, 5) and "step " in row["error"]
    assert decay_report(result, tmp_path).is_file()


@pytest.mark.slow
def test_without_a_single_ratio_there_is_an_error(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(CellError, match=r"λ = 1e\+20 failed: diverged: .* see .*console.log") as no:
        tune(plan(tiny, *TSRSTE, *SGD, grid=(1e20, 1e30), interval=(0.6, 0.95)), tmp_path)
    assert no.value.exit_code == 5
    with pytest.raises(CellError, match="dense failed: diverged: ") as no:
        tune(plan(tiny, *TSRSTE, "optim.lr=1e30", interval=(0.6, 0.95)), tmp_path)
    assert no.value.exit_code == 5


def test_an_unwritable_directory_is_found_before_training(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*file/out .*--out DIR"):
        tune(plan(tiny, interval=(0.6, 0.95)), tmp_path / "file" / "out")
    assert not (tiny.root / "runs").exists()
