"""Whole runs of the translation task: every method, resume, and what the record holds."""

from __future__ import annotations

import io

import pytest
from tiny_runs import assert_same_run, final_state, metrics
from tiny_translation import TinyTranslation

from sparsepretrain import config, registry
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.plan import dry_run

DROPOUT = ("model.dropout=0.2", "model.activation_dropout=0.1", "model.attention_dropout=0.1")
METHODS = [name for name in registry.names("method") if not name.startswith("mine_")]


@pytest.fixture
def tiny(tmp_path, prepared_cache, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
    return TinyTranslation(tmp_path, tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(tiny, method):
    more = ["steps=2", "batch.size=2", "eval.every=0", "sparsity.targets=all"]
    more += ["sparsity.candidates=5"] * (method == "bimask")
    outcome = tiny.train(f"sparsity={method}", *more)
    assert outcome.code == 0, outcome.output
    lines = metrics(outcome.directory)
    assert [line["step"] for line in lines if "split" not in line] == [1, 2]
    last = lines[-1]
    assert last["split"] == "validation" and last["bleu"] >= 0
    assert last["bleu_signature"].startswith("nrefs:1")
    assert last["perplexity"] > 1 and last["nll"] > 0
    assert last["bleu_signature"] in outcome.output


@pytest.mark.parametrize(
    "overrides",
    [
        ("sparsity=sste", *DROPOUT, "workers=1"),
        ("sparsity=tsrste", *DROPOUT, "batch.micro=1", "sparsity.refresh=2"),
        ("sparsity=srste", "task.max_tokens=400", "task.beam=2"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_resume_is_bit_exact(tiny, stop_after, overrides):
    plain = tiny.train(*overrides, "runs_dir=" + str(tiny.root / "plain"))
    assert plain.code == 0
    for step in (1, 3, 5):
        stop_after(step)
        outcome = tiny.train(*overrides)
        assert outcome.code == 143 and final_state(outcome.directory)["step"] == step
    stop_after(-1)
    again = tiny.train(*overrides)
    assert_same_run(plain.directory, again.directory)
    assert "bleu" in metrics(again.directory)[-1]


def test_workers_make_the_same_batches(tiny):
    alone = tiny.train(*DROPOUT, "runs_dir=" + str(tiny.root / "alone"))
    helped = tiny.train(*DROPOUT, "workers=2")
    assert_same_run(alone.directory, helped.directory)


def test_a_dense_run_does_not_depend_on_the_micro_batches(tiny):
    """Sums over counts: one, two or four buckets at a time end with the same weights."""
    from torch import testing

    more = ("sparsity=dense", "optim=sgd", "eval.every=0", "task.bleu=false", "steps=3")
    ends = []
    for micro in (1, 2, 4):
        run = tiny.train(*more, f"batch.micro={micro}", f"runs_dir={tiny.root / str(micro)}")
        ends.append(final_state(run.directory)["model"])
    for name, value in ends[0].items():
        for other in ends[1:]:
            testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_few_epochs_in_steps(tiny):
    from sparsepretrain.training.schedules import settle

    run = settle(tiny.load("steps=0", "epochs=2.0"))
    task = tiny.build("epochs=null").task
    assert run.steps == run.plain["steps"] == round(2 * task.samples("train") / 4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=transformer_base"], ["60,915,712", "25,165,824 in 24 layers", "8 micro-batches"]),
        (["experiment=nano_translation", "sparsity.targets=all"], ["1,056,768", "in 32 layers"]),
        (["experiment=smoke", "model=transformer_nano"], ["1,056,768", "2 micro-batches"]),
    ],
    ids=lambda value: value[0],
)
def test_dry_runs_need_no_data(overrides, words, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "none"))
    out = io.StringIO()
    dry_run(config.load([*overrides, "tracker.mode=disabled"]), Console(out))
    assert all(word in out.getvalue() for word in words), out.getvalue()
    assert not list(tmp_path.iterdir())


def test_it_learns(tiny):
    outcome = tiny.train("steps=60", "optim.lr=5e-3", "sparsity=sste", "task.bleu=false")
    losses = [line["loss"] for line in metrics(outcome.directory) if "split" not in line]
    assert losses[-1] < 0.8 * losses[0]
