"""What is refused or noted before a run starts."""

import io
import sys

import pytest

from sparsepretrain import config
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.training import plan
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.plan import require_a_sparse_step, warmup_note


def load(*overrides):
    return config.load(["steps=20", *overrides])


@pytest.mark.parametrize(
    ("method", "phase", "words"),
    [
        ("sste", "window.start=0.999", "sparsity.window"),
        ("sdgp", "window.start=0.999", "sparsity.window"),
        ("ste", "window={start: 0.5, stop: 0.51}", "sparsity.window"),
        ("tsrste", "dense_tail=0.99", "sparsity.window"),
        ("asp", "at=0.98", "sparsity.at"),
        ("mdgf", "until=0.98", "sparsity.until"),
        ("step", "clipping=[0.98, 1.0]", "sparsity.clipping"),
    ],
)
def test_a_run_without_a_sparse_step_is_refused(method, phase, words):
    overrides = [f"sparsity={method}", f"sparsity.{phase}"]
    with pytest.raises(ConfigError, match=r"no(ne of the 20| step)") as caught:
        require_a_sparse_step(load(*overrides))
    assert words in str(caught.value) and len(caught.value.messages) == 1
    require_a_sparse_step(load(overrides[0]))
    require_a_sparse_step(load("sparsity=dense", "sparsity.window.start=0.999"))
    if method != "tsrste":
        require_a_sparse_step(load(*overrides, "steps=2000"))


def test_long_warm_up_is_noted():
    assert str(warmup_note(load("schedule.warmup=49"))).startswith("the warm-up (49 steps)")
    assert warmup_note(load("schedule.warmup=10")) is None
    assert warmup_note(load("schedule=triangle", "schedule.peak=0.5")) is None


@pytest.mark.parametrize("start", [plan.check, plan.dry_run, build_session])
def test_packages_of_the_last_evaluation_are_asked_for_before_the_first_step(monkeypatch, start):
    run = load("model=transformer_nano", "data=cldr_ende")
    more = () if start is plan.check else (Console(io.StringIO()),)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataError, match=r"sacrebleu: pip install 'sparsepretrain\[mt\]'"):
        start(run, *more)
    run.eval.batches = 0
    plan.check(run)
    run.eval.batches, run.task.bleu = None, False
    plan.check(run)
