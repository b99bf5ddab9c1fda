"""Studies of tiny runs: skipped, continued, failed, interrupted and killed cells."""

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

from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.errors import INTERRUPTED
from sparsepretrain.studies import engine, progress
from sparsepretrain.studies.engine import Study
from sparsepretrain.studies.progress import Stopped, StudyCell
from sparsepretrain.training.trainer import train
from support.tiny_runs import Tiny, assert_same_run, final_state

QUIET = ("eval.batches=0", "checkpoint.every=0", "log.layers_every=0")
ENDLESS = ("steps=100000", *QUIET)


def cells(
    tiny: Tiny, labels: str, *overrides: str, stop_after: int | None = None
) -> list[StudyCell]:
    """Return a cell per letter, each with its own run."""
    return [StudyCell(x, tiny.load(f"name={x}", *overrides), stop_after) for x in labels]


def study(chosen: Sequence[StudyCell], *, jobs: int = 1) -> str:
    screen = io.StringIO()
    with Study("study", Console(screen), jobs=jobs) as running:
        running.run(chosen)
    return screen.getvalue()


def trained_here(tiny: Tiny, cell: StudyCell, end: int) -> Path:
    """Train the run of a cell in this process, in another directory."""
    plain = cell.run.plain
    run = tiny.load(*ENDLESS, f"runs_dir='{tiny.root / 'here'}'", f"name={plain['name']}")
    assert train(run, Console(io.StringIO()), stop_after=end) == 0
    return Path(StudyCell("", run).directory.path)


def when_training(chosen: Sequence[StudyCell], act: Callable[[], None]) -> threading.Thread:
    """Call ``act`` once every cell has recorded a few steps."""

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


def test_child_trains_an_ordinary_run_and_finished_cells_are_skipped(
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
    # forking the server is safe: its imports started no thread
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert len(os.listdir(f"/proc/{server}/task")) == 1

    monkeypatch.setattr(engine, "start_child", None)
    (again,) = cells(tiny, "a")
    assert study([again]) == f"a: {a.directory} is finished (6 steps): nothing to do\n"
    assert again.state == "finished"


def test_directory_of_a_cell_is_derived_once(
    tiny: Tiny, in_process: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the hash of the configuration: 27 % of a core for 400 waiting cells."""
    derived = []

    class Counted(progress.RunDirectory):
        @classmethod
        def of(cls, config: object) -> progress.RunDirectory:
            derived.append(config)
            return progress.RunDirectory(freeze.run_directory(config))  # type: ignore[arg-type]

    monkeypatch.setattr(progress, "RunDirectory", Counted)
    chosen = cells(tiny, "abcd", "steps=1", *QUIET)
    study(chosen)
    assert all(cell.state == "finished" for cell in chosen) and len(derived) == 4


def test_partial_cell_continues_bit_exactly(tiny: Tiny, in_process: object) -> None:
    (a,) = cells(tiny, "a", *ENDLESS)
    assert train(a.run, Console(io.StringIO()), stop_after=3) == 0
    assert a.left == "from step 3"
    (a,) = cells(tiny, "a", *ENDLESS, stop_after=5)
    assert "a: from step 3, 5 steps" in study([a])
    assert a.state == "partial" and a.left == "partial"
    assert_same_run(a.directory.path, trained_here(tiny, a, 5))
    (a,) = cells(tiny, "a", *ENDLESS, "resume=never", stop_after=1)
    study([a])
    assert a.directory.path.with_name(f"{a.directory.path.name}.old-1").is_dir()


def test_failing_cells_are_rows_and_the_others_go_on(
    tiny: Tiny, in_process: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    diverged, missing, broken, busy, unwritable, whole = chosen = [
        *cells(tiny, "a", "optim.lr=1e30"),
        *cells(tiny, "b", "data.files=['/nowhere/*.txt']"),
        *cells(tiny, "cd"),
        *cells(tiny, "e", f"runs_dir='{tiny.root / 'file'}'"),
        *cells(tiny, "f"),
    ]
    broken.directory.path.mkdir(parents=True)
    (broken.directory.path / "metrics.jsonl").mkdir()
    (tiny.root / "file").write_text("")
    screen = io.StringIO()
    with busy.directory.claim(), Study("six", Console(screen, live=True)) as running:
        running.run(chosen)
    assert [x.exit_code for x in chosen[:-1]] == [5, 3, 2, 2, 2]
    assert diverged.error.startswith("diverged: step ") and "the loss is nan" in diverged.error
    assert missing.error.startswith("data error: ") and "/nowhere" in missing.error
    assert "another process is training" in busy.error and "set runs_dir=DIR" in unwritable.error
    assert whole.state == "finished"
    text = screen.getvalue()
    last = text[text.rindex("six: ") :]
    assert "5 failed, 1 finished" in last and "6/6" in last and "exit code 5: diverged" in last
    # the next call tries failed cells again, from the last checkpoint
    (again,) = cells(tiny, "a", "optim.lr=1e30")
    assert "warning: a failed" in study([again]) and again.exit_code == 5


def test_interrupted_cells_save_and_continue_bit_exactly(tiny: Tiny) -> None:
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
def test_second_interrupt_kills_a_hanging_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_killed_child_is_a_failed_row_and_continues(tiny: Tiny) -> None:
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
def test_cells_of_one_run_are_run_in_turn(tiny: Tiny) -> None:
    first, second = [*cells(tiny, "a", *QUIET, stop_after=2), *cells(tiny, "a", *QUIET)]
    study([first, second], jobs=2)
    assert [x.state for x in (first, second)] == ["partial", "finished"]
    assert second.line["step"] == 6


COMMAND = ("train", "-m", "name=x", "sparsity=ste,srste")


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_children_save_and_end_with_the_command(tiny: Tiny, number: int) -> None:
    """SIGINT and SIGTERM reach the group, as from a terminal; children end with the parent."""
    overrides = tiny.overrides(*ENDLESS)
    command = [sys.executable, "-m", "sparsepretrain", *COMMAND, *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    record = None
    deadline = time.monotonic() + 120
    while record is None and time.monotonic() < deadline:
        time.sleep(0.1)
        record = next(tiny.root.glob("runs/x/*/*/metrics.jsonl"), None)
    assert record is not None
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == {2: 130, 15: 143, 9: -9}[number], output
    while not list(record.parent.glob("checkpoints/step_*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(record.parent.glob("checkpoints/step_*")), "a checkpoint is saved"
    time.sleep(1.0)
    size = record.stat().st_size
    time.sleep(0.5)
    assert record.stat().st_size == size, "training has ended"


BLAS_THREADS = """
import os, sys
from sparsepretrain.studies.child import start_child

def work(console):
    import numpy as np
    np.ones((512, 512)) @ np.ones((512, 512))
    return len(os.listdir("/proc/self/task"))

if __name__ == "__main__":
    about = {"family": "gpt2", "command": ("train",), "log": os.devnull, "environment": {}}
    child = start_child(work, jobs=os.cpu_count(), **about)
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.slow
def test_cells_divide_the_threads_of_numpy(tmp_path: Path) -> None:
    """Idle threads of OpenBLAS spin: two regression runs on two cores took 35 s instead of 15 s."""
    script = tmp_path / "blas_threads.py"
    script.write_text(BLAS_THREADS)
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    free = {key: value for key, value in os.environ.items() if key not in limits}
    # the main thread, and the one that watches the parent
    assert subprocess.run([sys.executable, str(script)], env=free).returncode == 2
