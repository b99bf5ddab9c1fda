"""Studies of tiny runs: what is skipped, continued, failed, interrupted and killed."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path

import pytest
from tiny_runs import Tiny, assert_same_run, final_state

from sparsepretrain.errors import INTERRUPTED, PREEMPTED
from sparsepretrain.studies import engine
from sparsepretrain.studies.engine import Cell, Stopped, Study
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.trainer import train

QUIET = ("eval.batches=0", "checkpoint.every=0", "log.layers_every=0")
ENDLESS = ("steps=100000", *QUIET)


def cells(tiny: Tiny, labels: str, *overrides: str, stop_after: int | None = None) -> list[Cell]:
    """A cell per letter, each with a run of its own."""
    return [Cell(x, tiny.load(f"name={x}", *overrides), stop_after) for x in labels]


def study(chosen: Sequence[Cell], *, jobs: int = 1) -> str:
    screen = io.StringIO()
    with Study("study", Console(screen), jobs=jobs) as running:
        running.run(chosen)
    return screen.getvalue()


def trained_here(tiny: Tiny, cell: Cell, end: int) -> Path:
    """The same run in this process, without an interruption, elsewhere."""
    plain = cell.run.plain
    run = tiny.load(*ENDLESS, f"runs_dir='{tiny.root / 'here'}'", f"name={plain['name']}")
    assert train(run, Console(io.StringIO()), stop_after=end) == 0
    return Path(Cell("", run).directory.path)


def when_training(chosen: Sequence[Cell], act: Callable[[], None]) -> threading.Thread:
    """Call ``act`` once every one of these cells has recorded a few steps."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for cell in chosen:
                cell.look()
            if all(cell.line.get("step", 0) >= 3 for cell in chosen):
                return act()
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def test_cells_are_runs_and_finished_ones_are_skipped(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny.train("name=a", f"runs_dir='{tiny.root / 'here'}'")
    (a,) = cells(tiny, "a")
    screen = study([a])
    assert (a.state, a.exit_code, a.error) == ("finished", 0, "")
    assert_same_run(a.directory.path, expected.directory)
    assert "a: to run, 6 steps; prints to" in screen and screen.endswith("a: finished\n")
    printed = a.directory.console_log.read_text()
    assert "step 6/6" in printed and "validation loss" in printed
    assert a.row()[:3] == ["a", "finished", "6/6"] and a.row()[-1] == ""
    # the server may be forked: its imports started no thread
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert len(os.listdir(f"/proc/{server}/task")) == 1

    monkeypatch.setattr(engine, "start_child", None)
    (again,) = cells(tiny, "a")
    assert study([again]) == f"a: {a.directory} is finished (6 steps): nothing to do\n"
    assert again.state == "finished" and again.row() == a.row()


def test_a_partial_run_continues_and_stop_after_cuts_it(tiny: Tiny) -> None:
    (a,) = cells(tiny, "a", *ENDLESS)
    assert train(a.run, Console(io.StringIO()), stop_after=3) == 0
    assert a.left == "from step 3"
    (a,) = cells(tiny, "a", *ENDLESS, stop_after=5)
    assert "a: from step 3, 5 steps" in study([a])
    assert a.state == "partial" and a.left == "partial", "the words of a report"
    assert a.row()[2] == f"5/{a.run.steps}"
    assert_same_run(a.directory.path, trained_here(tiny, a, 5))


def test_resume_never_starts_anew(tiny: Tiny) -> None:
    for _ in range(2):
        (a,) = cells(tiny, "a", *QUIET, "resume=never")
        study([a])
        assert a.state == "finished"
    assert a.directory.path.with_name(f"{a.directory.path.name}.old-1").is_dir()
    assert "the earlier run is kept" in a.directory.console_log.read_text()


def test_a_failing_cell_is_a_row_and_the_others_go_on(tiny: Tiny) -> None:
    a, b, c = [
        *cells(tiny, "a", "optim.lr=1e30"),
        *cells(tiny, "b", "data.files=['/nowhere/*.txt']"),
        *cells(tiny, "c"),
    ]
    screen = study([a, b, c])
    assert [(x.state, x.exit_code) for x in (a, b, c)] == [
        ("failed", 5),
        ("failed", 3),
        ("finished", 0),
    ]
    assert a.error.startswith("diverged: step ") and "the loss is nan" in a.error
    assert b.error.startswith("data error: ") and "/nowhere" in b.error
    assert f"warning: a failed (exit code 5: {a.error}); the others go on" in screen
    assert a.row()[-1] == f"exit code 5: {a.error}"
    # it is tried again by the next call, from its last checkpoint
    (a,) = cells(tiny, "a", "optim.lr=1e30")
    assert "nothing to do" not in study([a]) and a.exit_code == 5


def test_what_python_says_of_an_unexpected_error_is_in_the_row(tiny: Tiny) -> None:
    (a,) = cells(tiny, "a")
    a.directory.path.mkdir(parents=True)
    (a.directory.path / "metrics.jsonl").mkdir()
    study([a])
    assert a.state == "failed" and a.exit_code and a.error


def test_what_the_parent_is_refused_is_a_row_too(tiny: Tiny) -> None:
    (a,) = cells(tiny, "a")
    with a.directory.claim():
        screen = study([a])
    assert a.exit_code == 2 and "config error: another process is training" in screen
    (tiny.root / "b").write_text("")
    (b,) = cells(tiny, "b", f"runs_dir='{tiny.root / 'b'}'")
    assert "is not writable" in study([b]) and b.error.endswith("set runs_dir=DIR")


def test_interrupted_with_two_at_a_time_and_continued(tiny: Tiny) -> None:
    a, b, c = cells(tiny, "abc", *ENDLESS)
    watcher = when_training([a, b], lambda: signal_self(signal.SIGINT))
    with pytest.raises(Stopped) as stopped:
        study([a, b, c], jobs=2)
    watcher.join()
    assert stopped.value.exit_code == INTERRUPTED
    assert [x.state for x in (a, b, c)] == ["stopped", "stopped", "waiting"]
    assert not multiprocessing.active_children() and not c.directory.path.exists()
    saved = final_state(a.directory.path)["step"]
    assert saved >= 3 and a.left == f"from step {saved}"
    (a,) = cells(tiny, "a", *ENDLESS, stop_after=saved + 2)
    study([a])
    assert_same_run(a.directory.path, trained_here(tiny, a, saved + 2))


@pytest.mark.fault
def test_terminated_by_a_scheduler(tiny: Tiny) -> None:
    (a,) = cells(tiny, "a", *ENDLESS)
    watcher = when_training([a], lambda: signal_self(signal.SIGTERM))
    with pytest.raises(Stopped) as stopped:
        study([a])
    watcher.join()
    assert stopped.value.exit_code == PREEMPTED and a.left.startswith("from step ")


@pytest.mark.fault
def test_a_second_interrupt_ends_a_study_whose_run_hangs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "GRACE_SECONDS", 0.2)
    (a,) = cells(tiny, "a", *ENDLESS)

    def interrupt_twice() -> None:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        signal_self(signal.SIGINT)
        time.sleep(1.0)
        signal_self(signal.SIGINT)

    watcher = when_training([a], interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        study([a])
    watcher.join()
    assert a.state == "stopped" and not multiprocessing.active_children()


@pytest.mark.fault
def test_kill_9_is_a_failed_row_that_the_next_call_continues(tiny: Tiny) -> None:
    a, b = [*cells(tiny, "a", "checkpoint.every=2", *ENDLESS[:2]), *cells(tiny, "b")]

    def kill() -> None:
        (child,) = multiprocessing.active_children()
        child.kill()

    watcher = when_training([a], kill)
    study([a, b])
    watcher.join()
    assert (a.state, a.exit_code, a.error) == ("failed", -9, "killed by SIGKILL")
    assert b.state == "finished"
    saved = int(a.left.removeprefix("from step "))
    (a,) = cells(tiny, "a", "checkpoint.every=2", *ENDLESS[:2], stop_after=saved + 2)
    assert f"a: from step {saved}" in study([a]) and a.state == "partial"


@pytest.mark.slow
def test_cells_of_one_run_follow_one_another(tiny: Tiny) -> None:
    first, second = [*cells(tiny, "a", *QUIET, stop_after=2), *cells(tiny, "a", *QUIET)]
    study([first, second], jobs=2)
    assert [x.state for x in (first, second)] == ["partial", "finished"]
    assert second.line["step"] == 6


def test_the_table_on_a_terminal(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    with Study("pair", Console(screen, live=True)) as running:
        running.run(cells(tiny, "a", "optim.lr=1e30"))
        running.run(cells(tiny, "b"))
    text = screen.getvalue()
    last = text[text.rindex("pair: ") :]
    assert "1 failed, 1 finished" in last and "6/6" in last and "exit code 5: diverged" in last
    assert "warning: a failed" in text and "prints to" not in text


def test_the_time_left_counts_what_no_step_takes(tiny: Tiny) -> None:
    first, *others = cells(tiny, "abc")
    first.state, first.pace, first.line = "finished", 0.5, {"step": 6}
    running = Study("x", Console(io.StringIO()), jobs=2)
    running.cells, running._beside = [first, *others], [8.0, 12.0]
    assert running._title() == "x: 1 finished, 2 waiting, ETA 0:13"  # (12 · 0.5 + 2 · 10) / 2


@pytest.mark.fault
def test_kill_9_of_the_fork_server(tiny: Tiny) -> None:
    (a,) = cells(tiny, "a", *ENDLESS)

    def kill() -> None:
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]

    watcher = when_training([a], kill)
    study([a])
    watcher.join()
    assert (a.state, a.exit_code) == ("failed", engine.LOST)
    (a,) = cells(tiny, "a", *ENDLESS, stop_after=2)
    study([a])
    assert a.state == "partial", "a new server was started, and the lock is free"


COMMAND = ("tune-decay", "--grid", "1e-3,1e-1", "--points", "2", "--steps", "50000", "name=x")


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_command_and_its_group(tiny: Tiny, number: int) -> None:
    """SIGINT and SIGTERM reach the group, as from a terminal; children outlive no parent."""
    overrides = [*tiny.overrides(*ENDLESS, "optim.lr=1e-2", "schedule.warmup=0"), "name=x"]
    command = [sys.executable, "-m", "sparsepretrain", *COMMAND, *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    record = None
    deadline = time.monotonic() + 120
    while record is None and time.monotonic() < deadline:
        time.sleep(0.1)
        record = next(tiny.root.glob("runs/tune_x/*/metrics.jsonl"), None)
    assert record is not None
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == {2: 130, 15: 143, 9: -9}[number], output
    while not list(record.parent.glob("checkpoints/step_*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(record.parent.glob("checkpoints/step_*")), "saved, whoever died"
    time.sleep(1.0)
    size = record.stat().st_size
    time.sleep(0.5)
    assert record.stat().st_size == size, "nobody trains"
