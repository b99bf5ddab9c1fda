"""Learning rates at the points that can be worked out by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepretrain import config
from sparsepretrain.config.groups import Decay, StableDecay, Triangle, Warmup
from sparsepretrain.errors import ConfigError
from sparsepretrain.training.schedules import learning_rate, warmup_steps
from support.tiny_runs import assert_same_run

COSINE = Decay(name="cosine", warmup=9, start=None, end=0.1)
LINEAR = Decay(name="linear", warmup=9, start=None, end=0.1)
ROOT = Warmup(name="inverse_sqrt", warmup=9, start=None)
CONSTANT = Warmup(name="constant", warmup=9, start=None)
STABLE = StableDecay(name="wsd", warmup=9, start=None, decay=0.25, shape="linear", end=0.1)


@pytest.mark.parametrize("schedule", [COSINE, LINEAR, ROOT, CONSTANT, STABLE], ids=lambda s: s.name)
def test_warm_up_is_linear_and_ends_at_the_peak(schedule):
    rates = [learning_rate(schedule, 1.0, step, 109) for step in range(10)]
    assert rates == pytest.approx([(i + 1) / 10 for i in range(10)], abs=1e-15)
    schedule = replace(schedule, start=0.5)
    rates = [learning_rate(schedule, 2.0, step, 109) for step in range(10)]
    assert rates == pytest.approx([1 + i / 9 for i in range(10)], abs=1e-15)


def test_warm_up_may_be_a_fraction_of_the_run():
    fraction = replace(COSINE, warmup=0.1)
    assert warmup_steps(fraction, 55) == 6 and warmup_steps(fraction, 4) == 0
    six = replace(COSINE, warmup=6)
    assert learning_rate(fraction, 1.0, 20, 55) == learning_rate(six, 1.0, 20, 55)


def published_rate(it):
    """nanoGPT of thu-ml/2by4-pretrain-acc-examples, train.py: get_lr."""
    if it < 3000:
        return 1.5e-4 * it / 3000
    ratio = (it - 3000) / (300000 - 3000)
    return 1e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1.5e-4 - 1e-5)


def test_the_papers_gpt2_has_the_rates_of_its_code():
    run = config.load(["model=gpt2_124m"])
    for step in (0, 1, 2999, 3000, 3001, 150000, 299999):
        rate = learning_rate(run.schedule, run.optim.lr, step, run.steps)
        assert rate == pytest.approx(published_rate(step), rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [(COSINE, 0.55, 0.1), (LINEAR, 0.55, 0.1), (CONSTANT, 1.0, 1.0),
     (ROOT, math.sqrt(9 / 59), math.sqrt(9 / 109))],
    ids=lambda v: getattr(v, "name", ""),
)  # fmt: skip
def test_rates_at_the_middle_and_the_end(schedule, middle, end):
    assert learning_rate(schedule, 1.0, 59, 109) == pytest.approx(middle, abs=1e-15)
    assert learning_rate(schedule, 1.0, 109, 109) == pytest.approx(end, abs=1e-15)
    quarter = {"cosine": 0.1 + 0.45 * (1 + math.sqrt(0.5)), "linear": 0.775}.get(schedule.name)
    assert quarter is None or learning_rate(schedule, 1.0, 34, 109) == pytest.approx(quarter)


@pytest.mark.parametrize("schedule", [COSINE, LINEAR], ids=lambda s: s.name)
def test_a_tail_falls_from_the_floor_to_zero(schedule):
    short = replace(schedule, tail=0.0)
    schedule = replace(schedule, tail=0.25)
    for step in range(75):  # the decay ends where the tail begins
        assert learning_rate(schedule, 2.0, step, 100) == learning_rate(short, 2.0, step, 75)
    for step in range(75, 101):
        expected = 2.0 * 0.1 * (100 - step) / 25
        assert learning_rate(schedule, 2.0, step, 100) == pytest.approx(expected, abs=1e-15)


def test_a_tail_that_leaves_no_decay_is_refused():
    with pytest.raises(ConfigError, match=r"schedule.tail and schedule.warmup must sum to less"):
        config.load(["schedule=cosine", "schedule.warmup=0.5", "schedule.tail=0.5"])


ANY = st.sampled_from([COSINE, LINEAR, ROOT, CONSTANT])


@given(ANY, st.integers(0, 50), st.integers(1, 60), st.floats(1e-6, 1.0))
def test_always_positive_and_never_above_the_peak(schedule, warmup, steps, peak):
    schedule = replace(schedule, warmup=warmup)
    rates = [learning_rate(schedule, peak, step, steps) for step in range(steps)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    after = rates[warmup:]
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(after))
    if steps > warmup:
        assert rates[warmup] == pytest.approx(peak, rel=1e-12)


def test_triangle_is_the_published_multiplier():
    """min(0.25 + x, 4 - 4x) of arXiv:2404.01847's code for BERT; x is the fraction of the run."""
    schedule = Triangle(name="triangle", start=0.25, peak=0.75)
    for step in range(1001):
        x = step / 1000
        expected = 3.0 * min(0.25 + x, 4 - 4 * x)
        assert learning_rate(schedule, 3.0, step, 1000) == pytest.approx(expected, abs=1e-12)
    assert warmup_steps(schedule, 1000) == 750


@given(start=st.floats(0, 1), peak=st.floats(0, 1), steps=st.integers(1, 60))
def test_triangle_rises_to_the_peak_and_falls(start, peak, steps):
    schedule = Triangle(name="triangle", start=start, peak=peak)
    rates = [learning_rate(schedule, 1.0, step, steps) for step in range(steps + 1)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    rising = [rate for step, rate in enumerate(rates) if step / steps < peak]
    falling = rates[len(rising) :]
    assert all(a <= b + 1e-12 for a, b in pairwise(rising))
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))
    assert not rising or rising[0] == start
    assert peak == 1 or rates[-1] == 0


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [("linear", 0.775, 0.55), ("sqrt", 0.55, 0.1 + 0.9 * (1 - 0.5**0.5))],
)
def test_stable_phase_ends_where_the_decay_begins(shape, quarter, half):
    """The decay takes the last 50 of 200 steps: these are 0, 25 and 50 % of it, and its end."""
    schedule = replace(STABLE, shape=shape)
    found = [learning_rate(schedule, 1.0, step, 200) for step in (9, 150, 162.5, 175, 200)]
    assert found == pytest.approx([1.0, 1.0, quarter, half, 0.1], abs=1e-15)


def test_a_warm_up_and_decay_longer_than_the_run_are_refused():
    problems = dict(replace(STABLE, warmup=0.8).problems())
    assert list(problems) == ["decay"]


@pytest.mark.parametrize("method", ["sste", "step"])
def test_a_longer_run_continues_the_stable_phase_exactly(tiny, method):
    shared = ["schedule=wsd", "schedule.decay=0.5", "checkpoint.keep_last=9", f"sparsity={method}"]
    if method == "step":
        shared += ["sparsity.clipping=[null,null]", "sparsity.window_length=2"]
    short = tiny.train(*shared, "steps=8")
    stable = short.directory / "checkpoints" / "step_00000004"
    longer = tiny.train(*shared, "steps=16", f"resume={stable}")
    whole = tiny.train(*shared, "steps=16", "name=whole")
    assert [short.code, longer.code, whole.code] == [0, 0, 0]
    assert_same_run(longer.directory, whole.directory)
