"""Stopping and continuing is invisible: same record, same bits."""

import contextlib
import os
import shutil
import signal
from contextlib import nullcontext

import pytest
import torch

from sparsepretrain.data import tokenizer
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import assembly, loop, trainer, validation
from support.tiny_runs import assert_equal_bits, assert_same_run, final_state, interrupted, metrics


@pytest.fixture
def plain(tiny):
    """``plain(*overrides)``: a run of the same settings that nothing interrupts."""
    return lambda *overrides: tiny.train(*overrides, f"runs_dir={tiny.root / 'plain'}").directory


# sparsity/test_conformance.py resumes every method; whole runs of two suffice here
@pytest.mark.parametrize("method", ["dense", "sste"])
@pytest.mark.parametrize("stops", [(3,), pytest.param((1, 3, 5), marks=pytest.mark.slow)], ids=str)
def test_resume_is_bit_exact(tiny, plain, stop_after, method, stops):
    overrides = (f"sparsity={method}", "batch.micro=2")
    whole = plain(*overrides)
    assert len(metrics(whole)) == 6 + 3
    assert_same_run(whole, interrupted(tiny, stop_after, stops, *overrides))


def slow(*overrides):
    return pytest.param(overrides, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "overrides",
    [
        slow("model.dropout=0.2"),
        slow("precision=fp16", "precision.init_scale=1e30"),
        ("precision=fp16", "precision.growth_interval=2", "model.dropout=0.1"),
        ("precision=bf16", "sparsity.beta_update=step", "sparsity.mvue=weight"),
        slow("precision=fp8_sim"),
        (
            "precision=fp8_sim",
            "precision.recipe=reference",
            "precision.dtype=fp16",
            "batch.micro=2",
        ),
        slow("sparsity=srste", "sparsity.decay_on=weight", "optim=sgd"),
        slow("sparsity.window.start=0.3", "sparsity.window.stop=0.7"),
        ("activation_checkpointing=true", "model.dropout=0.2"),
        ("ema=0.9", "batch.micro=2", "eval.every=1"),
        slow("task.sequence_length=10", "batch.micro=1", "model.bias=true"),
        ("checkpoint.every=0", "eval.every=0"),
        slow("checkpoint.keep_last=1", "checkpoint.every=1", "eval.every=1"),
        slow("log.every=4", "log.layers_every=0"),
    ],
    ids=" ".join,
)
def test_resume_of_variants_is_bit_exact(tiny, plain, stop_after, overrides):
    assert_same_run(plain(*overrides), interrupted(tiny, stop_after, (3,), *overrides))


def test_resume_is_bit_exact_across_epochs(tiny, plain, stop_after, tmp_path):
    text = tmp_path / "one.txt"
    text.write_text("".join(f"{i:03} " for i in range(60)))  # 10 windows: 2.5 steps per epoch
    overrides = (f"data.files=['{text}']", "steps=8")
    assert_same_run(plain(*overrides), interrupted(tiny, stop_after, (2, 6), *overrides))


@pytest.mark.parametrize("forgotten", ["draws", "sparsifier", "scaler"])
def test_forgotten_state_changes_the_run(tiny, plain, stop_after, monkeypatch, forgotten):
    """Negative control: leaving a part out must be noticed by the comparison above."""
    overrides = ("precision=fp16", "precision.growth_interval=2", "model.dropout=0.3")
    whole = plain(*overrides)
    if forgotten == "draws":
        monkeypatch.setattr(loop, "seed_draws", lambda seed, step, micro: None)
    elif forgotten == "sparsifier":
        monkeypatch.setattr(Sparsifier, "load_state_dict", lambda self, state: None)
        monkeypatch.setattr(ModelState, "sync", lambda self, always=False: None)
    else:
        monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, state: None)
    again = interrupted(tiny, stop_after, (3,), *overrides)
    with pytest.raises(AssertionError):
        assert_equal_bits(final_state(whole), final_state(again))


def test_forgotten_previous_mask_changes_the_record(tiny, plain, stop_after, monkeypatch):
    whole, load = plain(), torch.nn.Module.load_state_dict
    stop_after(3)
    tiny.train()
    stop_after(-1)

    def forget(self, state, **options):
        return load(self, {k: v * (PREVIOUS_MASK not in k) for k, v in state.items()}, **options)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", forget)
    assert metrics(whole) != metrics(tiny.train().directory)


def test_missing_record_lines_warn_once(tiny, stop_after):
    stop_after(4)
    file = tiny.train().directory / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]))
    stop_after(5)
    assert f"has 2 of the {len(lines)} lines" in tiny.train().output
    stop_after(-1)
    assert "lines that it had" not in tiny.train().output, "told once"


def test_resume_from_a_named_checkpoint_restores_its_record(tiny, plain, stop_after):
    stop_after(5)
    first = tiny.train().directory
    stop_after(-1)
    source = first / "checkpoints" / "step_00000004"
    again = tiny.train("name=other", f"resume='{source}'")
    assert again.code == 0 and "lines that it had" not in again.output
    assert_same_run(plain(), again.directory)


def test_a_run_can_be_continued_in_fp16_whose_loss_scale_it_did_not_have(tiny):
    source = tiny.train("steps=2", "precision=fp32").directory
    again = tiny.train("name=other", "precision=fp16", f"resume='{source}'")
    assert again.code == 0 and "precision" in again.output


@pytest.mark.parametrize("words", [("eval.batches=5",), ("eval.batches=5", "ema=0.9")])
def test_signal_in_an_evaluation_is_bit_exact(tiny, plain, monkeypatch, words):
    """The evaluation is left, the step saved, and the evaluation repeated on resume."""
    whole, original, calls = plain(*words), validation.evaluate, []

    def evaluate(t, *args, **options):
        calls.append(t.step)
        if len(calls) in (1, 3):  # at steps 0 and 4
            os.kill(os.getpid(), signal.SIGTERM)
        return original(t, *args, **options)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    codes, handler = [], signal.getsignal(signal.SIGTERM)
    while not codes or codes[-1]:
        outcome = tiny.train(*words)
        codes.append(outcome.code)
        assert len(codes) < 9
    assert codes == [143, 143, 0], calls
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_same_run(whole, outcome.directory)
    assert "train loss" in outcome.output


PREPARING = {
    "tokenizer": (tokenizer, "train_bpe"),
    "data": (CausalLM, "open_data"),
    "model": (assembly, "build_model"),
    "masks": (assembly, "sparsify_model"),
    "claim": (trainer, "choose_checkpoint"),
    "files": (trainer, "_write_origin"),
}
"""Name -> what a start calls, before its first step."""


@pytest.mark.parametrize("moment", [*PREPARING, "swallowed"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_a_signal_before_the_first_step_ends_at_once(tiny, monkeypatch, moment, number, code):
    """Also if a library makes nothing of the interrupt; no directory is left without a run."""
    owner, name = PREPARING.get(moment, PREPARING["data"])
    original, went_on = getattr(owner, name), []

    def called(*args, **kwargs):
        with contextlib.suppress(KeyboardInterrupt) if moment == "swallowed" else nullcontext():
            os.kill(os.getpid(), number)
            went_on.append(name)
        return original(*args, **kwargs)

    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tiny.root / "cache"))  # nothing is prepared
    words = ("data.tokenizer=bpe", "data.vocab_size=300", "model.vocab_size=300")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, called)
        outcome = tiny.train(*words)
    assert outcome.code == code and not went_on
    assert outcome.output.count("stopped by a signal before a step was taken") == 1
    assert outcome.directory.exists() == (moment in ("files", "swallowed"))
    assert tiny.train(*words).code == 0


def test_second_interrupt_is_immediate(tiny, monkeypatch):
    original = loop.train_step

    def train_step(t):
        values = original(t)
        for _ in range(2 * (t.step == 3)):
            os.kill(os.getpid(), signal.SIGINT)
        return values

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(KeyboardInterrupt):
        tiny.train()
    assert final_state(tiny.directory())["step"] == 2
    monkeypatch.setattr(loop, "train_step", original)
    assert "(step 2)" in tiny.train().output


def test_finished_run_is_unchanged_and_resume_never_keeps_it(tiny):
    first = tiny.train()
    files = {p: p.stat().st_mtime_ns for p in first.directory.rglob("*")}
    again = tiny.train()
    assert again.code == 0 and "finished (6 steps)" in again.output
    assert {p: p.stat().st_mtime_ns for p in first.directory.rglob("*")} == files
    old = (first.directory / "metrics.jsonl").read_text()
    second = tiny.train("resume=never")
    third = tiny.train("resume=never")
    assert second.directory == third.directory == first.directory
    kept = first.directory.with_name(first.directory.name + ".old-1")
    assert (kept / "metrics.jsonl").read_text() == old
    assert (kept / "checkpoints" / "step_00000006").is_dir()
    assert str(kept) in second.output
    assert first.directory.with_name(first.directory.name + ".old-2").is_dir()
    assert_same_run(kept, first.directory)


def test_a_run_that_was_resumed_from_another_goes_on_without_it(tiny, plain, stop_after):
    stop_after(3)
    source = tiny.train().directory
    words = ("name=other", f"resume='{source}'")
    stop_after(5)
    assert tiny.train(*words).code == 143
    shutil.rmtree(source)
    stop_after(-1)
    outcome = tiny.train(*words)
    assert outcome.code == 0 and "has checkpoints of its own" in outcome.output
    assert_same_run(plain(), outcome.directory)
    assert "is finished" in tiny.train(*words).output


def test_the_record_of_a_finished_run_outlives_its_checkpoints(tiny):
    run = tiny.train().directory
    record = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    outcome = tiny.train()
    kept = run.with_name(f"{run.name}.old-1")
    assert outcome.code == 0 and f"its record is kept in {kept}" in outcome.output
    assert (kept / "metrics.jsonl").read_bytes() == record
    assert metrics(run) == metrics(kept)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tiny, monkeypatch):
    step, calls = loop.train_step, []

    def fail(session):
        calls.append(session.step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(session)

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny.train("checkpoint.every=0")
    outcome = tiny.train("checkpoint.every=0")
    assert outcome.code == 0 and "is kept in" not in outcome.output
    assert [path.name for path in outcome.directory.parent.iterdir()] == [outcome.directory.name]
