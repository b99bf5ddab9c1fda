"""What a run leaves in its directory and on the screen."""

import json
import math

import numpy as np
import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.config import freeze
from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.runs import checkpoint
from sparsepretrain.training.loop import run_steps
from support.tiny_runs import METHODS, Tiny, assert_same_run, metrics


def test_mask_files_equal_the_masks_of_the_weights(tiny):
    outcome = tiny.train("log.masks_every=3", "sparsity=ste", "checkpoint.every=3")
    files = sorted(p.name for p in (outcome.directory / "masks").iterdir())
    assert files == ["step_00000003.npz", "step_00000006.npz"]
    state = checkpoint.Checkpoint(outcome.directory / "checkpoints" / "step_00000003").parts()
    with np.load(outcome.directory / "masks" / "step_00000003.npz") as arrays:
        names = [n for n in arrays if n.startswith("transformer") and not n.endswith(".shape")]
        assert names == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
        for name in names:
            shape = arrays[f"{name}.shape"].tolist()
            mask = kernels.unpack_24(torch.from_numpy(arrays[name]), shape)
            assert (mask.unflatten(1, (-1, 4)).sum(2) == 2).all()
            weight = state["model"][f"{name}.weight"]
            assert list(weight.shape) == shape
            kept = weight.abs().unflatten(1, (-1, 4)).topk(2, dim=2).indices
            expected = torch.zeros(weight.shape, dtype=torch.bool).unflatten(1, (-1, 4))
            assert torch.equal(mask, expected.scatter(2, kept, True).flatten(1))


def test_run_directory_has_configuration_and_environment(tiny):
    outcome = tiny.train()
    assert freeze.from_yaml(outcome.directory / "config.yaml") == tiny.load().plain
    assert "torch" in json.loads((outcome.directory / "environment.json").read_text())["packages"]
    assert not list(outcome.directory.rglob("*.tmp"))


@pytest.mark.parametrize("method", METHODS)
def test_record_and_summary_have_every_line(tiny, method):
    outcome = tiny.train(f"sparsity={method}")
    lines = metrics(outcome.directory)
    training = [line for line in lines if "split" not in line]
    validation = [line for line in lines if "split" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in validation] == [0, 4, 6]
    assert [line["tokens"] for line in training] == [64 * k for k in range(1, 7)]
    for line in training:
        assert {"loss", "lr", "grad_norm", "density", "l1_gap", "flip_rate"} <= set(line)
        assert "mfu_dense" not in line
        assert line["density"] == (1.0 if method == "dense" else 0.5)
        assert ("flip_rate/transformer.h.0.mlp.c_fc" in line) == (line["step"] % 2 == 0)
    proof = "dense weights" if method == "dense" else "2:4 in all 2,048 groups, 50.0% exact zeros"
    assert f"2: {proof}" in outcome.output
    assert f"{validation[0]['loss']:.4f} → {validation[-1]['loss']:.4f}" in outcome.output


def test_flip_rates_are_means_since_the_line_before(tiny):
    """Of all layers since the last line, of each since the last line with layers."""
    options = ("sparsity=ste", "steps=9", "optim.lr=0.01", "eval.batches=0")
    each = metrics(tiny.train(*options, "log.layers_every=1").directory)
    some = metrics(tiny.train(*options, "log.every=4", "log.layers_every=6").directory)
    layer = "flip_rate/transformer.h.0.mlp.c_fc"
    rates, of_layer = [x["flip_rate"] for x in each], [x[layer] for x in each]
    assert len(set(rates)) > 5 and rates == [x["flip_rate_last"] for x in each]
    spans = {1: (0, 1), 4: (1, 4), 6: (4, 6), 8: (6, 8), 9: (8, 9)}
    assert [line["step"] for line in some] == list(spans)
    for line in some:
        first, end = spans[line["step"]]
        assert line["flip_rate"] == pytest.approx(np.mean(rates[first:end]), rel=1e-12)
        assert line["flip_rate_last"] == rates[end - 1]
        assert (layer in line) == (line["step"] == 6)
    assert some[2][layer] == pytest.approx(np.mean(of_layer[:6]), rel=1e-12)


def test_flip_rates_of_refreshed_masks_are_logged_at_refreshes(tiny):
    options = ("sparsity=tsrste", "sparsity.refresh=3", "sparsity.dense_tail=0.0", "steps=8")
    options = (*options, "optim.lr=0.01", "log.every=4", "eval.batches=0")
    lines = metrics(tiny.train(*options).directory)
    flips = [(x["step"], x["flip_interval"]) for x in lines if "flip_rate" in x]
    assert flips == [(3, 3.0), (6, 3.0)]
    assert all(x["flip_rate"] == x["flip_rate_last"] > 0 for x in lines if "flip_rate" in x)


@pytest.mark.parametrize(
    ("method", "phase", "words"),
    [
        ("tsrste", "dense_tail=0.5", "since step 3 (dense_tail)"),
        ("tsrste", "window.stop=0.5", "since step 3 (window.stop)"),
        ("ste", "window.stop=0.67", "since step 4 (window.stop)"),
    ],
)
def test_a_dense_phase_at_the_end_is_explained(tiny, method, phase, words):
    outcome = tiny.train(f"sparsity={method}", f"sparsity.{phase}")
    assert outcome.code == 0 and f"2: dense weights {words}" in outcome.output


@pytest.mark.parametrize(("method", "name"), [("dense", "dense"), ("sdgp", "sdgp 2:4")])
def test_summary_of_dense_training_names_no_pattern(tiny, method, name):
    lines = tiny.train(f"sparsity={method}").output.splitlines()
    (line,) = [line for line in lines if "parameters" in line]
    assert f"parameters, {name} on 2 layers" in line


def test_weights_outside_the_pattern_are_an_error(tiny, monkeypatch):
    right = kernels.soft_prune
    monkeypatch.setattr(kernels, "soft_prune", lambda w, n, m, **rest: right(w, 3, 4, **rest))
    with pytest.raises(SparsePretrainError, match=r"NOT 2:4: transformer\.h\.0\.mlp\.c_fc"):
        tiny.train()


def test_run_without_evaluation_finishes(tiny):
    outcome = tiny.train("eval.batches=0", "data.validation=0.0")
    assert outcome.code == 0
    assert all("split" not in line for line in metrics(outcome.directory))
    assert "finished" in tiny.train("eval.batches=0", "data.validation=0.0").output


def test_one_evaluation_is_one_number(tiny):
    outcome = tiny.train("eval.every=0", "steps=1", "schedule.warmup=0")
    (loss,) = [line["loss"] for line in metrics(outcome.directory) if "split" in line]
    assert outcome.output.count(f"{loss:.4f}") == 2 and "→" not in outcome.output
    assert [line["step"] for line in metrics(outcome.directory)] == [1, 1]


def test_a_metric_that_is_not_finite_is_shown(tiny, monkeypatch):
    from sparsepretrain.tasks._bases import WindowTask

    metrics_of = WindowTask.metrics
    monkeypatch.setattr(
        WindowTask, "metrics", lambda self, seen: metrics_of(self, seen) | {"perplexity": math.inf}
    )
    outcome = tiny.train("steps=2")
    assert outcome.code == 0 and "nan" in outcome.output


def test_training_without_a_sparse_step_is_noted(tiny):
    step = ("sparsity=step", "sparsity.clipping=[null, null]")
    assert "no step trained sparse" in tiny.train(*step).output


@pytest.mark.parametrize("error", [ImportError("no package"), ZeroDivisionError("a plug-in's")])
def test_an_evaluation_that_fails_loses_no_step(tiny, tmp_path, monkeypatch, error):
    from sparsepretrain.tasks._bases import WindowTask

    words = ("steps=5", "checkpoint.every=0", "eval.every=0")
    metrics_of = WindowTask.metrics

    def fail(*_):
        raise error

    monkeypatch.setattr(WindowTask, "metrics", fail)
    for _ in range(2):  # a restart takes no further step
        with pytest.raises(type(error)):
            tiny.train(*words)
        (run,) = tiny.directory(*words).parent.iterdir()
        assert [*checkpoint.saved(run / "checkpoints")] == [5]
    monkeypatch.setattr(WindowTask, "metrics", metrics_of)
    assert tiny.train(*words).code == 0
    whole = Tiny(tmp_path / "whole", tiny.corpus).train(*words)
    assert_same_run(run, whole.directory)


def test_nothing_that_is_not_finite_is_saved_when_an_evaluation_fails(tiny, monkeypatch):
    from sparsepretrain.tasks._bases import WindowTask

    def fail(task, observations):
        weight = next(session.model.parameters())
        weight.detach().fill_(math.nan)
        raise ZeroDivisionError

    session = tiny.build("eval.every=0", "checkpoint.every=0")
    monkeypatch.setattr(WindowTask, "metrics", fail)
    saves = []
    with pytest.raises(ZeroDivisionError):
        run_steps(session, lambda line: None, lambda: saves.append(session.step), lambda: None)
    assert session.step == 6 and not saves
