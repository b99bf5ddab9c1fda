"""Signals at named moments, clocks that jump, data that change: bit-exact, or a clear stop."""

import importlib
import json
import os
import signal
import socket
import time

import pytest
import torch

from sparsepretrain.errors import CheckpointError, DivergedError
from sparsepretrain.runs import checkpoint
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import assembly, loop
from support.tiny_runs import assert_same_run, metrics, write_corpus

WORDS = ("steps=6", "batch.micro=2", "eval.every=3", "checkpoint.every=2")


MOMENTS = {
    "data start-up": (CausalLM, "open_data", 1),
    "building the model": (assembly, "build_model", 1),
    "a micro-batch": (CausalLM, "loss", 5),
    "the optimizer's step": (importlib.import_module("torch.optim.adam"), "adam", 3),
    "an evaluation": (CausalLM, "observe", 2),
    "a save": (checkpoint, "_sum", 6),
    "the end of a save": (checkpoint, "_prune", 2),
    "a line of the record": (loop, "require_finite_weights", 4),
}
"""Name -> what is called then, and in which call the signal comes."""


@pytest.mark.fault
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_a_signal_at_a_named_moment(tiny, monkeypatch, moment, number, code):
    """At most one more step is taken, and the run goes on bit for bit."""
    expected = tiny.train(*WORDS, "runs_dir=" + str(tiny.root / "plain")).directory
    owner, name, call = MOMENTS[moment]
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        stopped = tiny.train(*WORDS)
    assert len(calls) >= call, "the moment came"
    assert stopped.code == code and "stopped by a signal" in stopped.output
    assert_same_run(expected, tiny.train(*WORDS).directory)


def test_a_clock_that_jumps(tiny, stop_after, monkeypatch):
    expected = tiny.train("runs_dir=" + str(tiny.root / "plain")).directory
    stop_after(3)
    tiny.train()
    stop_after(-1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() - 1e8))
    directory = tiny.train().directory
    assert_same_run(expected, directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 600


def test_data_that_change_between_two_starts(tiny, stop_after, tmp_path):
    """Other text is other data: the run stops with its code, and goes on with the old text."""
    corpus = tmp_path / "text"
    corpus.mkdir()
    write_corpus(corpus)
    words = (f"data.files=['{corpus}/*.txt']",)
    stop_after(3)
    assert tiny.train(*words).code == 143
    stop_after(-1)
    before = metrics(tiny.directory(*words))
    file = corpus / "03.txt"
    text = file.read_text()
    file.write_text(text.replace("sheep", "goats"))
    with pytest.raises(CheckpointError, match=r"other data \(fingerprint") as caught:
        tiny.train(*words)
    assert caught.value.exit_code == 4 and "resume=never" in str(caught.value)
    assert metrics(tiny.directory(*words)) == before
    file.write_text(text)
    assert "(step 3)" in tiny.train(*words).output


@pytest.mark.fault
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("rule", ["stop", "skip", "spike"])
def test_one_bad_step(tiny, monkeypatch, rule, value, where):
    """``stop`` ends with code 5 before the step; the others lose this step and nothing else."""
    original, calls = CausalLM.loss, []

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * value

    def loss(self, model, batch):
        total, count = original(self, model, batch)
        calls.append(model.training)
        if model.training and sum(calls) == 4:
            total = total * value if where == "loss" else Bad.apply(total)
        return total, count

    monkeypatch.setattr(CausalLM, "loss", loss)
    words = (f"guard={rule}", "log.every=10")
    if rule == "stop":
        with pytest.raises(DivergedError, match=r"step 4: .*; nothing was updated") as caught:
            tiny.train(*words)
        assert caught.value.exit_code == 5 and "\n" not in str(caught.value)
        return
    outcome = tiny.train(*words)
    lines = {line["step"]: line for line in metrics(outcome.directory) if "split" not in line}
    assert outcome.code == 0 and lines[4]["skipped"] == lines[6]["skipped"] == 1


def test_no_test_reaches_the_network():
    with socket.socket() as outside, pytest.raises(OSError, match="a test connects to"):
        outside.connect(("192.0.2.1", 80))  # reserved for documentation
