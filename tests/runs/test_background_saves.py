"""``checkpoint.background``: the state of a step is written while training goes on."""

import os
import signal
import threading
import time

import pytest
import safetensors.torch
import torch

from sparsepretrain.errors import CheckpointError, DivergedError
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.checkpoint import Checkpoint, Retention
from sparsepretrain.runs.writer import Writer
from sparsepretrain.training import loop
from support.tiny_runs import assert_equal_bits, assert_same_run, metrics

BACKGROUND = "checkpoint.background=true"
FULL = safetensors.SafetensorError("I/O error: No space left on device (os error 28)")


class Gate:
    """Holds saves back in the thread of the writer until it is opened."""

    def __init__(self, monkeypatch):
        self.entered, self.opened = threading.Event(), threading.Event()
        original = checkpoint.save

        def held(*args, **kwargs):
            self.entered.set()
            assert self.opened.wait(120)
            return original(*args, **kwargs)

        monkeypatch.setattr(checkpoint, "save", held)


def state():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=draw)
    model = {
        "w": weight, "tied": weight, "transposed": weight.t(), "row": weight[2],
        "empty": weight[:0], "expanded": weight[0, 0].expand(3),
        "parameter": torch.nn.Parameter(weight.clone()),
    }  # fmt: skip
    return {"step": 1, "model": model, "values": [1, {"a": (2.5, None)}], "flips": {"sums": [3]}}


def write(directory, parts, *, background):
    writer = Writer(directory, background=background)
    writer.save(1, parts, config="a: 1\n", keep=lambda: Retention(1))
    writer.close(pytest.fail)
    return {p.name: p.read_bytes() for p in (directory / "step_00000001").iterdir()}


def test_background_save_writes_the_same_bytes(tmp_path):
    now = write(tmp_path / "now", state(), background=False)
    assert now == write(tmp_path / "later", state(), background=True)
    assert len(now) == 4 and b"tied" not in now["shard-00000-model.safetensors"][8:]


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "not copied"])
def test_later_changes_of_the_state_are_not_saved(tmp_path, monkeypatch, copied):
    """Without the copy (negative control) it would be."""
    now = checkpoint.save
    if not copied:
        monkeypatch.setattr(Writer, "_snapshot", lambda self, parts: parts)
    gate, live = Gate(monkeypatch), state()
    writer = Writer(tmp_path / "later", background=True)
    for step in (1, 2):  # the second time into the memory of the first
        live["step"] = step
        path = now(tmp_path / "now", step, live, config="a: 1\n", keep=Retention(2))
        writer.save(step, live, config="a: 1\n", keep=lambda: Retention(2))
        with torch.no_grad():
            live["model"]["w"].add_(1.0)
        live["values"][1]["a"] = step
        live["values"].append(step)
        live["flips"]["sums"][0] += 1
        gate.opened.set()
        writer.join()
        gate.opened.clear()
        expected = Checkpoint(path).parts()
        saved = Checkpoint(tmp_path / "later" / path.name).parts()
        if copied:
            assert_equal_bits(saved, expected)
        else:
            assert all(saved[key] != expected[key] for key in ("values", "flips"))
            assert not torch.equal(saved["model"]["w"], expected["model"]["w"])
    writer.close(pytest.fail)


def test_memory_of_copies_is_reused(tmp_path):
    writer, live, places = Writer(tmp_path, background=True), state(), []
    for step in (1, 2):
        writer.save(step, live, config="a: 1\n", keep=lambda: Retention(1))
        places.append({key: copy.data_ptr() for key, copy in writer._copies.items()})
    writer.close(pytest.fail)
    assert places[0] == places[1] and len(places[0]) == 6


def files(directory):
    """Bytes of what two equal runs have in common."""
    found, own = directory.glob("checkpoints/*/*"), ("config.yaml", "manifest.json")
    return {f"{f.parent.name}/{f.name}": f.read_bytes() for f in found if f.name not in own}


def test_a_run_on_a_slow_disk_is_bit_equal(tiny, monkeypatch):
    """One save at a time, while steps are taken; what is kept is the same."""
    words = ("ema=0.9", "checkpoint.keep_every=4", "checkpoint.keep_best=1", "eval.every=2")
    expected = tiny.train(*words, "runs_dir=" + str(tiny.root / "plain")).directory
    save, train_step, running, steps, during = checkpoint.save, loop.train_step, [], [], []

    def slow(*args, **kwargs):
        assert not running
        running.append(1)
        before = len(steps)
        time.sleep(0.1)
        path = save(*args, **kwargs)
        during.append(len(steps) - before)
        running.pop()
        return path

    def counted(t):
        steps.append(t.step)
        return train_step(t)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(loop, "train_step", counted)
    outcome = tiny.train(*words, BACKGROUND)
    assert outcome.code == 0 and len(during) == 3 and sum(during) > 0
    assert outcome.directory.name == expected.name, "no part of a run's identity"
    assert_same_run(expected, outcome.directory)
    assert len(files(expected)) >= 4 * 2 and files(outcome.directory) == files(expected)
    assert all(Checkpoint(p).problem() is None for p in (expected / "checkpoints").iterdir())


def failing(monkeypatch, error, *, call):
    """The ``call``-th file of tensors (two a save) cannot be written."""
    original, calls = safetensors.torch.save_file, []

    def save_file(tensors, file, *header):
        calls.append(file)
        if len(calls) == call:
            raise error
        original(tensors, file, *header)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)


@pytest.mark.parametrize(
    ("call", "steps", "last", "error"),
    [(2, 400, [], FULL), (4, 6, [5], OSError(30, "Read-only file system"))],
    ids=["in training", "at the end, read-only"],
)
def test_what_cannot_be_written_stops_the_run(tiny, monkeypatch, error, call, steps, last):
    words = ("eval.every=0", "checkpoint.every=5", f"steps={steps}")
    told = []
    for mode in ("checkpoint.background=false", BACKGROUND):
        with monkeypatch.context() as patch:
            failing(patch, error, call=call)
            with pytest.raises(CheckpointError, match="cannot write checkpoint") as caught:
                tiny.train(*words, mode)
        assert caught.value.exit_code == 4
        told.append(str(caught.value))
        directory = tiny.directory(*words)
        left = [p.name for p in (directory / "checkpoints").iterdir()]
        assert left == [checkpoint.step_name(step) for step in last]
        assert max(line["step"] for line in metrics(directory)) < 400
        if mode != BACKGROUND:
            os.rename(directory.parent, tiny.root / "before")
    assert told[0] == told[1] and "\n" not in told[0]
    if last:
        again = tiny.train(*words, BACKGROUND)
        assert again.code == 0 and f"(step {last[0]})" in again.output


@pytest.mark.parametrize("fails", [False, True], ids=["written", "failing"])
def test_a_guard_stop_waits_for_the_save(tiny, monkeypatch, fails):
    """The stop is what is told; a save that fails meanwhile is a warning."""
    gate = Gate(monkeypatch)
    if fails:
        failing(monkeypatch, FULL, call=1)
    train_step = loop.train_step

    def diverging(t):
        if t.step == 3:
            assert gate.entered.wait(120)
            threading.Timer(0.05, gate.opened.set).start()
            with torch.no_grad():
                next(t.model.parameters()).fill_(float("nan"))
        return train_step(t)

    monkeypatch.setattr(loop, "train_step", diverging)
    with pytest.raises(DivergedError, match=r"step 4: .*nothing was updated"):
        tiny.train(BACKGROUND, "eval.every=0")
    left = list((tiny.directory("eval.every=0") / "checkpoints").iterdir())
    assert [p.name for p in left] == ([] if fails else ["step_00000002"])
    assert all(Checkpoint(p).problem() is None for p in left)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
@pytest.mark.parametrize(
    "moment", ["_sum", *(pytest.param(m, marks=pytest.mark.fault) for m in ("save", "_prune"))]
)
def test_a_signal_during_a_save(tiny, monkeypatch, moment, number, code):
    """The save is finished, then that of the step at which the run stops."""
    words = ("steps=16", "checkpoint.every=4", "eval.every=6")
    expected = tiny.train(*words, "runs_dir=" + str(tiny.root / "plain")).directory
    original, calls = getattr(checkpoint, moment), []

    def signaled(*args, **kwargs):
        calls.append(threading.current_thread())
        if len(calls) == 2:
            assert calls[1] is not threading.main_thread()
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, signaled)
        stopped = tiny.train(*words, BACKGROUND)
    assert stopped.code == code and "checkpoint saved" in stopped.output
    last = metrics(stopped.directory)[-1]["step"]
    assert last < 16
    newest = sorted((stopped.directory / "checkpoints").iterdir())[-1]
    assert newest.name == checkpoint.step_name(last)
    assert_same_run(expected, tiny.train(*words, BACKGROUND).directory)
