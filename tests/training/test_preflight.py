"""What is refused or noted before a run starts."""

import pytest

from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.training.plan import notes, require_a_sparse_step


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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("schedule.warmup=10",), []),
        (("schedule.warmup=49",), ["the warm-up (49 steps)"]),
        (("schedule=triangle", "schedule.peak=0.5"), []),
        (("schedule.warmup=2", "eval.every=0"), ["one evaluation only"]),
        (("schedule.warmup=2", "eval.every=0", "eval.batches=0"), []),
    ],
)
def test_notes_about_warm_up_and_evaluation(overrides, words):
    found = notes(load(*overrides))
    assert [note[: len(word)] for note, word in zip(found, words, strict=True)] == words
