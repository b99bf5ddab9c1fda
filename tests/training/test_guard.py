"""What ``guard`` skips, what it leaves as it is then, and that resumed runs skip the same."""

import copy
import math
import random

import pytest

from sparsepretrain.errors import DivergedError
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import guard as room
from sparsepretrain.training import loop
from sparsepretrain.training.guard import MAX_SKIPS, Guard
from sparsepretrain.training.loop import train_step
from support.tiny_runs import assert_equal_bits, assert_same_run, final_state, interrupted, metrics


@pytest.fixture
def short(monkeypatch):
    """A window of eight steps."""
    monkeypatch.setattr(room, "SPIKE_WINDOW", 8)


@pytest.fixture
def factors(monkeypatch):
    """``factors({12: 50.0})``: the training loss of step 12 is multiplied, so are its gradients."""
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


WORDS = {"step": 1, "scaled": False, "culprits": list}


def judged(losses, norms=None, rule="spike"):
    guard = Guard(rule)
    pairs = zip(losses, norms or losses, strict=True)
    return [guard.accepts(*pair, sparse=True, **WORDS) for pair in pairs], guard


def noise(count, seed=0):
    draw = random.Random(seed)
    return [4 + draw.gauss(0, 0.1) for _ in range(count)]


def test_jump_is_a_spike_and_noise_is_not():
    accepted, guard = judged([*noise(500), 6.0, *noise(10)])
    assert accepted == [True] * 500 + [False] + [True] * 10
    assert (guard.skipped, guard.skips_in_a_row) == (1, 0)
    for rule in ("stop", "skip"):
        assert all(judged([*noise(500), 6.0], rule=rule)[0])


def test_spike_of_loss_or_norm_is_skipped():
    quiet, jump = noise(200), [*noise(199), 9.0]
    assert judged(jump, quiet)[0][-1] is judged(quiet, jump)[0][-1] is False
    assert all(judged([*noise(199), 0.0], [*noise(199), 0.0])[0]), "less is no spike"


def test_spikes_are_judged_after_half_a_window():
    assert all(judged([*noise(63), 1e9])[0])
    assert not all(judged([*noise(64), 1e9])[0])


@pytest.mark.parametrize("level", [8.0, 1e3, 1e30])
def test_lasting_new_level_is_accepted(level):
    accepted, _ = judged([*noise(300), *(level + x for x in noise(60))])
    assert accepted[300:].count(False) <= 4 and all(accepted[305:])


def test_non_finite_values_stay_out_of_the_window():
    accepted, _ = judged([*noise(100), float("nan"), float("inf"), *noise(100), 9.0])
    assert [i for i, ok in enumerate(accepted) if not ok] == [100, 101, 202]
    with pytest.raises(DivergedError, match=f"the loss is nan, {MAX_SKIPS + 1} steps in a row"):
        judged([float("nan")] * (MAX_SKIPS + 1))


def test_new_phase_clears_the_window():
    guard = Guard("spike")
    for x in noise(128):
        assert guard.accepts(x, x, sparse=True, **WORDS)
    assert guard.accepts(99.0, 99.0, sparse=False, **WORDS)


@pytest.mark.parametrize(("rule", "factor"), [("skip", float("nan")), ("spike", 1e4)])
def test_skip_keeps_the_weights_and_the_data_order(tiny, short, rule, factor):
    t = tiny.build(f"guard={rule}", "steps=30")
    seen = []
    original = t.batches.step
    t.batches.step = lambda step: seen.append(step) or original(step)
    for _ in range(8):
        train_step(t)
    before = copy.deepcopy([t.model.state_dict(), t.optimizer.state_dict()["state"]])
    layer = t.model.transformer.h[0].mlp.c_fc.weight
    handle = layer.register_hook(lambda grad: grad * factor)
    rate = train_step(t).lr
    handle.remove()
    assert (t.step, t.guard.skipped, t.sparsifier.completed_steps) == (9, 1, 8)
    assert_equal_bits(before, [t.model.state_dict(), t.optimizer.state_dict()["state"]])
    values = train_step(t)
    assert seen == list(range(10)) and values.lr != rate
    assert (t.guard.skipped, t.updated, t.sparsifier.completed_steps) == (1, True, 9)


def test_spikes_one_after_the_other_end_the_run():
    with pytest.raises(DivergedError, match=r"norm 1e\+20 is a spike, 11 steps in a row; nothing"):
        judged([*noise(64), *(10.0 ** (10 + k) for k in range(11))])


def test_spikes_under_loss_scaling_are_no_overflows():
    guard = Guard("spike")
    words = {"sparse": True, **WORDS, "scaled": True}
    for value in noise(64):
        guard.accepts(value, value, **words)
    with pytest.raises(DivergedError, match="is a spike, 11 steps in a row"):
        for k in range(12):
            guard.accepts(10.0 ** (10 + k), 1.0, **words)
    guard = Guard("spike")
    for _ in range(40):  # overflows, whose loss is finite
        assert not guard.accepts(4.0, math.inf, **words)


@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_other_rules_keep_no_window(rule):
    assert judged(noise(9), rule=rule)[1].state_dict()["losses"] == []


SPIKY = ("guard=spike", "steps=24", "log.every=10", "log.layers_every=0", "eval.every=0")


def test_resumed_run_skips_the_same_steps(tiny, short, factors, stop_after):
    factors({10: 40.0, 11: float("nan"), 20: 40.0})
    plain = tiny.train(*SPIKY, "runs_dir=" + str(tiny.root / "plain"))
    lines = {line["step"]: line for line in metrics(plain.directory) if "split" not in line}
    assert list(lines) == [1, 10, 11, 20, 24], "skipped steps are in the record"
    assert [line.get("skipped") for line in lines.values()] == [None, 1, 2, 3, 3]
    assert lines[11]["loss"] is None and lines[10]["loss"] > 100
    assert "skipped steps" in plain.output
    assert_same_run(plain.directory, interrupted(tiny, stop_after, (9, 10, 19), *SPIKY))


@pytest.mark.parametrize("words", [("batch.micro=1",), ("precision=fp16",), ("parallel=single",)])
def test_a_step_is_a_spike_in_any_micro_batches_and_precision(tiny, short, factors, words):
    factors({10: 40.0, 11: float("nan"), 20: 40.0})
    lines = metrics(tiny.train(*SPIKY, *words).directory)
    skipped = {line["step"]: line["skipped"] for line in lines if "skipped" in line}
    assert skipped == {10: 1, 11: 2, 20: 3, 24: 3}


def skipped(directory):
    return final_state(directory)["guard"]["skipped"]


def test_lost_window_changes_the_run(tiny, short, factors, stop_after, monkeypatch):
    """Negative control of the test above."""
    factors({20: 40.0})
    plain = tiny.train(*SPIKY, "runs_dir=" + str(tiny.root / "plain")).directory
    monkeypatch.setattr(Guard, "load_state_dict", lambda self, state: None)
    again = interrupted(tiny, stop_after, (19,), *SPIKY)
    assert skipped(plain) == 1 != skipped(again)
    with pytest.raises(AssertionError):
        assert_same_run(plain, again)
