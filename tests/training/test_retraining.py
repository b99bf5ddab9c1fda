"""Runs with AST and CAST: resume, teacher, the numbers of the end, and plans that are refused."""

import io
from pathlib import Path

import pytest

from sparsepretrain import config
from sparsepretrain.cli import main
from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.training import plan
from sparsepretrain.training.reach import steps_to_zero
from sparsepretrain.training.trainer import train
from support import ROOT
from support.tiny_runs import Tiny, assert_same_run, interrupted, metrics

CAST = ("sparsity=cast", "sparsity.decay=0.01", "sparsity.refresh=2", "optim.lr=1e-2")
AST = ("sparsity=ast", "sparsity.decay=0.1", "sparsity.refresh=2")


@pytest.fixture(scope="module")
def dense(tmp_path_factory, small_corpus):
    """Directory of a dense run."""
    return Tiny(tmp_path_factory.mktemp("dense"), small_corpus).train("sparsity=dense").directory


@pytest.mark.parametrize(
    "words", [AST, (*AST, "sparsity.slorb=8"), CAST], ids=["ast", "branch", "cast"]
)
def test_resume_with_a_teacher_is_bit_exact(tiny, dense, stop_after, words):
    words = (*words, f"init.path='{dense}'", "teacher=self", "batch.micro=2")
    whole = tiny.train(*words, f"runs_dir='{tiny.root / 'whole'}'").directory
    assert_same_run(whole, interrupted(tiny, stop_after, (1, 3), *words))


def test_a_run_of_cast_ends_with_the_pattern(tiny, dense):
    outcome = tiny.train(*CAST, f"init.path='{dense}'", "teacher=self", "steps=8", "eval.every=4")
    assert outcome.code == 0 and "2:4 in all" in outcome.output
    assert "the last step pruned" in outcome.output
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert [line["density"] for line in lines] == [1.0] * (len(lines) - 1) + [0.5]
    assert all(0 < line["masked_share"] < 0.5 for line in lines)
    weights = freeze.from_yaml(outcome.directory / "config.yaml")["sparsity"]
    assert weights["name"] == "cast"


@pytest.mark.parametrize("words", [CAST, ("sparsity=mdgf", "sparsity.until=0.9")])
def test_a_run_may_stop_before_its_weights_have_the_pattern(tiny, words):
    run = tiny.load(*words)
    out = io.StringIO()
    assert train(run, Console(out), stop_after=3) == 0, out.getvalue()
    assert "not 2:4 so far" in out.getvalue() and "NOT 2:4" not in out.getvalue()


def test_the_last_evaluation_also_measures_the_weights_without_a_branch(tiny):
    outcome = tiny.train(*AST, "sparsity.slorb=8", "eval.every=2")
    evaluations = [line for line in metrics(outcome.directory) if "split" in line]
    *before, last = evaluations
    assert before and not any("pruned_loss" in line for line in before)
    assert last["pruned_loss"] > 0 and last["pruned_loss"] != last["loss"]
    assert "pruned_loss" in outcome.output and "beside dense branches" in outcome.output
    plain = tiny.train(*AST).directory
    assert not any("pruned_loss" in line for line in metrics(plain))
    adapters = ("sparsity=slope", "sparsity.adapters.rank=2", "sparsity.adapters.start=0")
    *_, last = metrics(tiny.train(*adapters).directory)
    assert last["pruned_loss"] > 0


@pytest.mark.parametrize("source", [True, False])
def test_steps_that_cannot_move_the_weights_to_zero_are_refused(tiny, dense, source):
    words = [*CAST, "optim.lr=1e-6"] + ([f"init.path='{dense}'"] if source else [])
    for start in (tiny.train, lambda *w: plan.dry_run(tiny.load(*w), Console(io.StringIO()))):
        with pytest.raises(ConfigError, match=r"optim.lr=1e-06 in \d+ steps .* Σ lr·α = .*, med"):
            start(*words)
    assert not (tiny.root / "runs").exists()
    run = tiny.load(*CAST)
    expected = sum(
        plan.learning_rate(run.schedule, 1e-2, step, run.steps) * step / run.steps
        for step in range(run.steps)
    )
    session = tiny.build(*CAST)
    assert steps_to_zero(run, session.sparsifier) == pytest.approx(expected)
    assert steps_to_zero(run, tiny.build("sparsity=srste").sparsifier) is None


def test_the_dry_run_shows_how_far_the_steps_reach(tiny, dense):
    out = io.StringIO()
    plan.dry_run(tiny.load(*CAST, f"init.path='{dense}'"), Console(out))
    text = " ".join(out.getvalue().split())
    assert "Σ lr·α = " in text and "median |W| = " in text
    assert (
        "fprop, after the last step" in text
        and "none: weights are dense until the last step" in text
    )


@pytest.mark.parametrize("method", ["ast", "cast"])
@pytest.mark.parametrize("optimizer", ["sgd", "muon", "lion"])
def test_another_optimizer_is_refused(tiny, method, optimizer):
    words = (f"sparsity={method}", f"optim={optimizer}", "sparsity.targets=ffn", "optim.lr=0.1")
    with pytest.raises(ConfigError, match=f"sparsity={method} needs optim=adamw"):
        tiny.train(*words)


def test_a_window_that_ends_before_the_run_never_prunes(tiny):
    with pytest.raises(ConfigError, match=r"none of the \d+ steps is followed by the pruning"):
        tiny.train(*CAST, "sparsity.window.stop=0.5")


@pytest.mark.parametrize("method", ["ast", "cast"])
def test_finished_runs_are_fine_tuned_under_their_zeros(tiny, dense, method, capsys):
    words = AST if method == "ast" else CAST
    source = tiny.train(*words, f"init.path='{dense}'").directory
    more = [*tiny.overrides("steps=2", f"runs_dir='{tiny.root / 'more'}'")]
    more = [word for word in more if not word.startswith(("model", "data"))]
    assert main(["finetune", str(source), "task=causal_lm", *more]) == 0, capsys.readouterr()
    (directory,) = (tiny.root / "more").glob("*/*-s0")
    assert freeze.from_yaml(directory / "config.yaml")["sparsity"]["name"] == "asp"
    assert "2:4 in all" in capsys.readouterr().out


def test_an_experiment_brings_its_groups_to_a_fine_tuning(tiny, dense, capsys):
    """Without one, method and data of the source go on."""
    more = [f"runs_dir='{tiny.root / 'more'}'", "steps=2", "eval.batches=1", "epochs=null"]
    more += ["tracker.mode=disabled", "task.sequence_length=16", "sparsity.refresh=1"]
    chosen = ["task=causal_lm", "experiment=ast_nano", *more]
    assert main(["finetune", str(dense), *chosen]) == 0, capsys.readouterr()
    (directory,) = Path(tiny.root / "more").glob("ast_nano/*")
    run = freeze.from_yaml(directory / "config.yaml")
    assert (run["sparsity"]["name"], run["sparsity"]["targets"]) == ("ast", "all")
    assert run["teacher"]["name"] == "self" and run["experiment"] == "ast_nano"
    assert run["data"] == freeze.from_yaml(dense / "config.yaml")["data"]
    assert main(["finetune", str(dense), *chosen, "sparsity=tsrste", "teacher=none"]) == 0
    (other,) = set(Path(tiny.root / "more").glob("ast_nano/*")) - {directory}
    run = freeze.from_yaml(other / "config.yaml")
    assert (run["sparsity"]["name"], run["teacher"]["name"]) == ("tsrste", "none")


def test_the_published_recipe_has_the_published_constants():
    run = config.load(["experiment=ast_gpt2"])
    assert (run.steps, run.batch.size, run.task.sequence_length) == (40_000, 128, 1024)
    rates = {step: plan.learning_rate(run.schedule, run.optim.lr, step, 40_000) for step in RATES}
    assert rates == pytest.approx(RATES, rel=1e-9, abs=1e-15)
    assert (run.optim.betas, run.optim.weight_decay, run.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (run.teacher.name, run.teacher.weight, run.teacher.temperature) == ("self", 0.67, 2.0)
    assert (run.sparsity.decay, run.sparsity.decay_ramp * 40_000) == (1e-4, 10_000)
    assert (ROOT / "configs/table/ast_gpt2.yaml").is_file()


RATES = {0: 0.0, 1_000: 1e-4, 2_000: 2e-4, 20_000: 1.1e-4, 38_000: 2e-5, 39_000: 1e-5, 40_000: 0.0}
"""Cosine from 2,000 to 38,000 and a line to zero."""
