"""Every row of the table of exit codes in docs/troubleshooting.md, executed."""

import dataclasses
import fcntl
import functools
import json
import re
import signal

import pytest
import safetensors.torch
import torch

from sparsepretrain.cli import main
from sparsepretrain.cli import train as verb
from sparsepretrain.errors import INTERRUPTED, PREEMPTED, SparsePretrainError
from sparsepretrain.files import write_atomic
from sparsepretrain.runs.ownership import Owner
from sparsepretrain.studies.submission import Detached, Submission
from sparsepretrain.training import loop
from support import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Exit codes")[2].partition("\n## ")[0]
ROWS = [(int(code), text) for code, text in re.findall(r"^\| (\d+) \| `([^`]+)` \|", SECTION, re.M)]


@pytest.fixture
def run(tiny, monkeypatch, capfd):
    """``run(*overrides)``: exit code, and all that ``train`` printed."""
    monkeypatch.setattr(verb, "illustrate", lambda directory: None)

    def run(*overrides):
        capfd.readouterr()
        code = main(["train", *tiny.overrides(*overrides)])
        return code, "".join(capfd.readouterr())

    return run


def finished(tiny, run, **_):
    run()
    return run()


def damaged(tiny, run, steps=(6,), **_):
    run()
    for step in steps:
        file = tiny.directory() / "checkpoints" / f"step_{step:08d}" / "state.json"
        file.write_bytes(file.read_bytes()[:-9])
    return run()


def tracker(tiny, run, **_):
    directory = tiny.directory("tracker.mode=offline")
    directory.mkdir(parents=True)
    (directory / "wandb").write_text("a file, not a directory")
    return run("tracker.mode=offline")


def plugin(tiny, run, tmp_path, **_):
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "from sparsepretrain.registry import register\n"
        "from sparsepretrain.sparsity.methods.ste import STE\n"
        "@register('method', 'mine')\n"
        "class Mine(STE):\n"
        "    def phase_of(self, step):\n"
        "        sys.exit('no')\n"
    )
    (tmp_path / "my" / "sparsity").mkdir(parents=True)
    (tmp_path / "my" / "sparsity" / "mine.yaml").write_text("name: mine\n")
    words = (f"plugins=[{tmp_path / 'mine.py'}]", "--config-dir", f"{tmp_path / 'my'}")
    return run("sparsity=mine", *words)


def failed_requirement(tmp_path, capfd, **_):
    safetensors.torch.save_file({"0.weight": torch.ones(8, 8)}, tmp_path / "x.safetensors")
    words = [f"{tmp_path / 'x.safetensors'}", "--require", "2:4", "--out", f"{tmp_path}"]
    return main(["audit", *words]), "".join(capfd.readouterr())


def claimed(tiny, run, **_):
    directory = tiny.directory()
    directory.mkdir(parents=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return run()


def taken_over(tiny, run, monkeypatch, **_):
    original = loop.train_step

    def train_step(t):
        values = original(t)
        if t.step == 3:
            other = dataclasses.replace(Owner.here(), machine="another")
            write_atomic(tiny.directory() / ".owner", json.dumps(dataclasses.asdict(other)))
        return values

    monkeypatch.setattr(loop, "train_step", train_step)
    return run()


def other_data(tiny, run, stop_after, tmp_path, **_):
    file = tmp_path / "text.txt"
    file.write_text("one sheep, two goats\n" * 200)
    stop_after(3)
    run(f"data.files=['{file}']")
    stop_after(-1)
    file.write_text("one goat, two sheep\n" * 200)
    return run(f"data.files=['{file}']")


def other_source(tiny, run, **_):
    run()
    source = tiny.directory() / "checkpoints" / "step_00000006"
    words = (f"init.path='{source}'", "seed=1")
    run(*words)
    manifest = source / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    return run(*words)


def disk_full(tiny, run, monkeypatch, **_):
    def full(tensors, file, *header):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    return run()


def detached(tiny, run, monkeypatch, **_):
    def detach(self, cells):
        raise Detached(INTERRUPTED)

    monkeypatch.setattr(Submission, "run", detach)
    return run("-m", "hydra/launcher=submitit_local")


def stopped(number, *, tiny, run, stop_after, **_):
    stop_after(3, number)
    return run()


DIVERGES = ("optim=sgd", "optim.lr=1e30", "schedule=constant", "schedule.warmup=0", "clip=null")
CASES = {
    (0, "is finished"): finished,
    (0, "trying the one before it"): damaged,
    (0, "metrics.jsonl stays complete"): tracker,
    (1, "ended the command"): plugin,
    (1, "require 2:4"): failed_requirement,
    (2, "did you mean"): lambda run, **_: run("stesp=3"),
    (2, "another process is training"): claimed,
    (2, "another process took over"): taken_over,
    (3, "data error"): lambda run, **_: run("data.files=[/nothing/*.txt]"),
    (4, "trained on other data"): other_data,
    (4, "has changed since"): other_source,
    (4, "is whole"): functools.partial(damaged, steps=(4, 6)),
    (4, "disk full"): disk_full,
    (5, "nothing was updated"): lambda run, **_: run(*DIVERGES),
    (130, "stopped by a signal"): functools.partial(stopped, signal.SIGINT),
    (130, "the jobs go on"): detached,
    (143, "stopped by a signal"): functools.partial(stopped, signal.SIGTERM),
}


def test_every_exit_code_has_a_case():
    codes = {0, 1, INTERRUPTED, PREEMPTED}
    codes |= {cls.exit_code for cls in SparsePretrainError.__subclasses__()}
    assert list(CASES) == ROWS and codes == {code for code, _ in ROWS}


@pytest.mark.parametrize(("code", "text"), CASES, ids=[f"{c} {t}" for c, t in CASES])
def test_exit_code_and_message_of_every_row(
    tiny, run, stop_after, monkeypatch, tmp_path, capfd, code, text
):
    given = {"tiny": tiny, "run": run, "stop_after": stop_after, "capfd": capfd}
    got, out = CASES[code, text](**given, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert (got, text in out) == (code, True), out
    assert "Traceback" not in out
