"""Whole runs of the translation task: training, resume, and what the record holds."""

import pytest
import torch

from sparsepretrain.training.schedules import resolve_steps
from support.tiny_runs import assert_same_run, final_state, interrupted, metrics
from support.tiny_translation import TinyTranslation

DROPOUT = ("model.dropout=0.2", "model.activation_dropout=0.1", "model.attention_dropout=0.1")


@pytest.fixture
def tiny(tmp_path, prepared_cache, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
    return TinyTranslation(tmp_path, tmp_path)


@pytest.mark.parametrize("method", ["dense", "bimask", "slope"])
def test_methods_train_and_are_evaluated_with_bleu(tiny, method):
    more = ["steps=2", "batch.size=2", "eval.every=0", "sparsity.targets=all"]
    more += ["sparsity.candidates=5"] * (method == "bimask")
    outcome = tiny.train(f"sparsity={method}", *more)
    assert outcome.code == 0, outcome.output
    *lines, last = metrics(outcome.directory)
    assert [line["step"] for line in lines if "split" not in line] == [1, 2]
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
    plain = tiny.train(*overrides, "runs_dir=" + str(tiny.root / "plain")).directory
    again = interrupted(tiny, stop_after, (3,), *overrides)
    assert_same_run(plain, again)
    assert "bleu" in metrics(again)[-1]


def test_loss_falls(tiny):
    outcome = tiny.train("steps=30", "optim.lr=5e-3", "sparsity=sste", "task.bleu=false")
    losses = [line["loss"] for line in metrics(outcome.directory) if "split" not in line]
    assert losses[-1] < 0.9 * losses[0]


def test_weights_are_equal_for_every_micro_batch_size(tiny):
    """Sums over counts: one or four buckets at a time end with the same weights."""
    more = ("sparsity=dense", "optim=sgd", "eval.every=0", "task.bleu=false", "steps=3")
    ends = []
    for micro in (1, 4):
        run = tiny.train(*more, f"batch.micro={micro}", f"runs_dir={tiny.root / str(micro)}")
        ends.append(final_state(run.directory)["model"])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_epochs_are_counted_in_steps_of_the_data(tiny):
    run = resolve_steps(tiny.load("steps=0", "epochs=2.0"))
    task = tiny.build("epochs=null").task
    assert run.steps == run.plain["steps"] == round(2 * task.samples("train") / 4)
