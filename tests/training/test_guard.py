"""What ``guard`` skips, what it leaves as it is then, and that resumed runs skip the same."""

import copy

import pytest
from tiny_runs import assert_equal_bits, assert_same_run, interrupted, metrics

from sparsepretrain.errors import DivergedError
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import loop
from sparsepretrain.training.guard import MAX_SKIPS, Guard
from sparsepretrain.training.loop import train_step

NAN = float("nan")


@pytest.fixture
def factors(monkeypatch):
    """``factors({12: NAN})``: the training loss of step 12 is multiplied, so are its gradients."""
    original, step = CausalLM.loss, loop.train_step
    now, values = [0], {}

    def loss(self, model, batch):
        total, count = original(self, model, batch)
        return total * (values.get(now[0], 1.0) if model.training else 1.0), count

    def train_step(t):
        now[0] = t.step + 1
        return step(t)

    monkeypatch.setattr(CausalLM, "loss", loss)
    monkeypatch.setattr(loop, "train_step", train_step)
    return values.update


def judged(losses):
    guard = Guard("skip")
    return [guard.accepts(x, x, step=1, scaled=False, culprits=list) for x in losses], guard


def test_values_that_are_not_finite_are_skipped():
    accepted, guard = judged([4.0, NAN, float("inf"), 1e30])
    assert accepted == [True, False, False, True]
    assert (guard.skipped, guard.skips_in_a_row) == (2, 0)
    with pytest.raises(DivergedError, match=f"the loss is nan, {MAX_SKIPS + 1} steps in a row"):
        judged([NAN] * (MAX_SKIPS + 1))


def test_skip_keeps_the_weights_and_the_data_order(tiny):
    t = tiny.build("guard=skip", "steps=30")
    seen = []
    original = t.batches.step
    t.batches.step = lambda step: seen.append(step) or original(step)
    for _ in range(8):
        train_step(t)
    before = copy.deepcopy([t.model.state_dict(), t.optimizer.state_dict()["state"]])
    layer = t.model.transformer.h[0].mlp.c_fc.weight
    handle = layer.register_hook(lambda grad: grad * NAN)
    rate = train_step(t).lr
    handle.remove()
    assert (t.step, t.guard.skipped, t.sparsifier.completed_steps) == (9, 1, 8)
    assert_equal_bits(before, [t.model.state_dict(), t.optimizer.state_dict()["state"]])
    values = train_step(t)
    assert seen == list(range(10)) and values.lr != rate
    assert (t.guard.skipped, t.updated, t.sparsifier.completed_steps) == (1, True, 9)


def test_resumed_run_skips_the_same_steps(tiny, factors, stop_after):
    words = ("guard=skip", "steps=24", "log.every=10", "log.layers_every=0", "eval.every=0")
    factors({10: NAN, 11: NAN, 20: NAN})
    plain = tiny.train(*words, "runs_dir=" + str(tiny.root / "plain"))
    lines = {line["step"]: line for line in metrics(plain.directory) if "split" not in line}
    assert list(lines) == [1, 10, 11, 20, 24], "skipped steps are in the record"
    assert [line.get("skipped") for line in lines.values()] == [None, 1, 2, 3, 3]
    assert lines[11]["loss"] is None
    assert "skipped steps" in plain.output
    assert_same_run(plain.directory, interrupted(tiny, stop_after, (9, 10, 19), *words))
