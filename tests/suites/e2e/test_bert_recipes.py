"""BERT and WikiText recipes: dry runs, and a short run at nano size."""

import io

import pytest

from sparsepretrain import config
from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.training.plan import dry_run
from sparsepretrain.training.trainer import train
from support.tiny_runs import metrics

GATED = "model=bert_geglu"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


def show(*overrides):
    run = config.load(["tracker.mode=disabled", "parallel.device=cpu", *overrides])
    out = io.StringIO()
    dry_run(run, Console(out))
    return out.getvalue()


@pytest.mark.parametrize(
    ("overrides", "parameters", "layers"),
    [
        (("model=bert_base",), "109,514,298 (109.5M)", "sste 2:4: 24 layers, 56,623,104 of"),
        (("experiment=half", GATED), "91,278,337", "dense: 32 layers, 28,311,552 of"),
        pytest.param(
            ("experiment=step_wikitext103",),
            "124,373,760",
            "step 2:4: 24 layers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_dry_runs_print_parameters_and_sparse_layers(overrides, parameters, layers):
    text = show(*overrides)
    assert parameters in text and layers in text


def test_nano_bert_learns_in_twelve_steps(tiny):
    small = ("n_embd=64", "n_head=2", "n_layer=1", "n_inner=128")
    overrides = [
        "experiment=nano_bert", *(f"model.{o}" for o in small), "steps=12", "eval.every=12",
        "eval.batches=2", "log.every=1", "schedule.warmup=0",
    ]  # fmt: skip
    more = [
        o for o in tiny.overrides() if o.startswith(("data", "runs_dir", "tracker", "parallel"))
    ]
    run = config.load([*overrides, *more])
    assert train(run, Console(io.StringIO())) == 0
    evaluations = [line for line in metrics(freeze.run_directory(run)) if "split" in line]
    assert evaluations[0]["loss"] > 5.3 and evaluations[-1]["loss"] < evaluations[0]["loss"] - 0.5
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"]
