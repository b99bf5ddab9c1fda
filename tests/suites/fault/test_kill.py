"""Real processes that are killed, interrupted and preempted go on as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import SUPPORT
from support.tiny_runs import METHODS, Tiny, assert_same_run, final_state, metrics

KILLED = -signal.SIGKILL


class Forks:
    """Talks to run_forks.py."""

    def __init__(self, cache: Path) -> None:
        command = [sys.executable, str(SUPPORT / "run_forks.py")]
        env = {**os.environ, "SPARSEPRETRAIN_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(SUPPORT.parent), env.get("PYTHONPATH", "")])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, **pipes)

    def run(self, tiny, *overrides, at=None, **job):
        assert self.process.stdin and self.process.stdout
        job["argv"] = ["train", *tiny.overrides(*overrides)]
        job["directory"] = str(tiny.directory(*overrides))
        self.process.stdin.write(json.dumps({"at": at, **job}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("cache"))
    yield forks
    forks.process.stdin.close()
    forks.process.wait(timeout=120)


LONG = ("steps=30", "checkpoint.every=4", "eval.every=7", "batch.micro=2")


@pytest.fixture(scope="module")
def uninterrupted_run(forks, tmp_path_factory, small_corpus):
    """The directory of a run of :data:`LONG`, shared by tests of the default method."""
    tiny = Tiny(tmp_path_factory.mktemp("uninterrupted"), small_corpus)
    return finish(forks, tiny, *LONG)


def finish(forks, tiny, *overrides):
    done = forks.run(tiny, *overrides)
    assert done["code"] == 0, done
    return tiny.directory(*overrides)


def uninterrupted(forks, tiny, *overrides):
    return finish(forks, tiny, *overrides, "runs_dir=" + str(tiny.root / "plain"))


# one method is enough for every change: make test-fault kills runs of each
@pytest.mark.parametrize(
    "method", [m if m == "sste" else pytest.param(m, marks=pytest.mark.fault) for m in METHODS]
)
def test_kill_9_in_the_middle(forks, tiny, method, record_property, uninterrupted_run):
    """Three kills within one run, each after more lines of the record than the one before."""
    overrides = (f"sparsity={method}", *LONG)
    default = method == "sste"
    expected = uninterrupted_run if default else uninterrupted(forks, tiny, *overrides)
    assert len(metrics(expected)) == 30 + 6
    for line in (7, 19, 30):
        result = forks.run(tiny, *overrides, at={"line": line})
        assert result["code"] == KILLED, result
    last = forks.run(tiny, *overrides)
    assert last["code"] == 0 and "continuing from" in last["out"], last
    record_property("injected", 3)
    assert_same_run(expected, tiny.directory(*overrides))


@pytest.mark.fault
def test_signals_save_and_continue(forks, tiny, uninterrupted_run):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        words = (*LONG, "runs_dir=" + str(tiny.root / f"stopped{code}"))
        result = forks.run(tiny, *words, at={"line": 9}, signals=[number])
        assert result["code"] == code and "checkpoint saved" in result["out"], result
        directory = tiny.directory(*words)
        recorded, saved = metrics(directory)[-1]["step"], final_state(directory)["step"]
        assert 7 <= saved == recorded < 30
        assert_same_run(uninterrupted_run, finish(forks, tiny, *words))


@pytest.mark.fault
@pytest.mark.parametrize("method", METHODS)
def test_kill_9_at_random_moments(forks, tiny, method, record_property):
    """R1: five runs per method with three kills each."""
    overrides = (f"sparsity={method}", *LONG, "model.dropout=0.1")
    expected = uninterrupted(forks, tiny, *overrides)
    seed = random.randrange(2**32)
    moments, kills = random.Random(seed), 0
    for run in range(5):
        runs_dir = "runs_dir=" + str(tiny.root / f"run{run}")
        for _ in range(3):
            at, delay = {"line": moments.randrange(37)}, moments.uniform(0, 0.1)
            result = forks.run(tiny, *overrides, runs_dir, at=at, delay=delay)
            assert result["code"] in (0, KILLED), (seed, result)
            kills += result["code"] == KILLED
        assert_same_run(expected, finish(forks, tiny, *overrides, runs_dir))
    assert kills >= 5
    record_property("injected", kills)


def kill_at_every_operation(forks, tiny, overrides, *more, **at):
    """Kill a run before each file operation in turn; return the number of kills."""
    expected = uninterrupted(forks, tiny, *overrides)
    last, before = {4: (4, 3), 9: (9, 6)}[int(overrides[0].removeprefix("steps="))]
    for call in range(1, 500):
        words = (*overrides, *more, "runs_dir=" + str(tiny.root / f"run{call}"))
        result = forks.run(tiny, *words, at={"call": call, **at})
        directory = tiny.directory(*words)
        if result["code"] == KILLED:
            assert forks.run(tiny, *words)["code"] == 0, call
        assert_same_run(expected, directory)
        left = sorted(int(p.name[5:]) for p in (directory / "checkpoints").iterdir())
        # killed between the last save and the removal of the one before, that one stays
        assert left in ([last], [before, last]), call
        assert not list(directory.rglob("*.tmp")), call
        if result["code"] != KILLED:
            break
    assert result["code"] == 0
    return call - 1


@pytest.mark.fault
@pytest.mark.timeout(1500)  # one run per file operation: minutes
def test_kill_9_before_every_file_operation(forks, tiny, record_property):
    """R2: at each point of each save, and of the start and the end."""
    overrides = ("steps=4", "checkpoint.every=1", "checkpoint.keep_last=1", "log.masks_every=2")
    kills = kill_at_every_operation(forks, tiny, overrides)
    assert kills >= 60
    record_property("injected", kills)


@pytest.mark.fault
@pytest.mark.timeout(1500)  # one run per file operation: minutes
def test_kill_9_before_every_file_operation_of_a_background_save(forks, tiny, record_property):
    """R2: at each point of each save, wherever training is meanwhile."""
    overrides = ("steps=9", "checkpoint.every=3", "checkpoint.keep_last=1")
    background = "checkpoint.background=true"
    kills = kill_at_every_operation(forks, tiny, overrides, background, thread="checkpoint")
    assert kills >= 30
    record_property("injected", kills)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_signals_at_any_time(forks, tiny, number, code, record_property):
    """R14: during start-up, training and evaluation."""
    overrides = (*LONG, "eval.batches=40", "eval.every=3")
    expected = uninterrupted(forks, tiny, *overrides)
    seed = random.randrange(2**32)
    moments, stops = random.Random(seed), 0
    for run in range(4):
        runs_dir = "runs_dir=" + str(tiny.root / f"run{run}")
        for k in range(8):
            at = {"seconds": moments.uniform(0.0, 2.0)} if k % 2 else {"line": 4 * k + run}
            result = forks.run(tiny, *overrides, runs_dir, at=at, signals=[number])
            # before the handler is there, the default one of SIGTERM ends the process
            assert result["code"] in (0, code, -number), (seed, result)
            assert "Traceback" not in result["out"], (seed, result)
            stops += "checkpoint saved" in result["out"]
        assert_same_run(expected, finish(forks, tiny, *overrides, runs_dir))
    assert stops
    record_property("injected", stops)


@pytest.mark.fault
@pytest.mark.parametrize("background", ["false", "true"])
def test_interrupted_twice(forks, tiny, background, uninterrupted_run):
    """R15: the second SIGINT ends the process at once, and nothing is lost."""
    words = (*LONG, f"checkpoint.background={background}")
    twice = {"signals": [signal.SIGINT, signal.SIGINT], "gap": 0.002}
    for line in (3, 8, 15, 20, 25):
        result = forks.run(tiny, *words, at={"line": line}, **twice)
        assert result["code"] == 130, result
        assert "Traceback" not in result["out"]
    assert_same_run(uninterrupted_run, finish(forks, tiny, *words))


@pytest.mark.fault
def test_time_from_a_kill_to_the_next_step(tiny, record_property):
    """R42: of the command, libraries included; masks are those of before, never drawn anew."""
    # compared every seventh step: killed in between, a mask is older than the weights
    words = ("sparsity=tsrste", "sparsity.refresh=7", "steps=200", "checkpoint.every=4")
    record = tiny.directory(*words) / "metrics.jsonl"

    def reached(step):
        lines = record.read_bytes().splitlines() if record.exists() else []
        return len(lines) > 1 and json.loads(lines[-2])["step"] >= step

    command = [sys.executable, "-m", "sparsepretrain", "train", *tiny.overrides(*words)]
    seconds, before = [], 20
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def wait_for(step):
        while not reached(step):
            assert process.poll() is None
            time.sleep(0.005)

    for _ in range(3):
        wait_for(before)
        process.kill()
        process.wait()
        killed, last = time.monotonic(), metrics(record.parent)[-1]["step"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(last + 1)
        seconds.append(time.monotonic() - killed)
        before = last + 20
    assert process.wait() == 0
    expected = tiny.train(*words, f"runs_dir='{tiny.root / 'plain'}'").directory
    assert_same_run(expected, record.parent)
    record_property("injected", len(seconds))
    record_property("reported", f"{sorted(seconds)[1]:.1f} s (median)")


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_signal_to_the_command(tiny, number):
    """The installed command, from its start on; importing torch included."""
    command = [sys.executable, "-m", "sparsepretrain", "train", *tiny.overrides("steps=100000")]
    # a shell lets its background jobs ignore SIGINT, and children inherit this
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for seconds in (1.5, 3.0, 8.0):
        process = subprocess.Popen(command, **options)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
        expected = {signal.SIGTERM: (143, -15), signal.SIGINT: (130,)}[number]
        assert process.returncode in expected, (seconds, err)
        assert "Traceback" not in err
        assert len(err.splitlines()) <= 1
