"""Verdicts on synthetic seeds of known truth: error rates, power, undecided claims."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.reports.differences import Difference
from sparsepretrain.studies.claims import Ruling, holm, judge
from sparsepretrain.studies.results import read_record
from sparsepretrain.studies.table_page import _mean, judged
from sparsepretrain.studies.tables import Table, load_table
from support import ROOT

ROWS = ["dense", "sste", "srste", "ste"]
TRIALS = 300


def table(columns=(), better="lower", without=None, **claim):
    plain = {"title": "a table", "claims": [{"text": "a claim", **claim}]}
    plain |= {"rows": {row: [] for row in ROWS}, "columns": {column: [] for column in columns}}
    plain["metrics"] = {"loss": {"label": "loss", "key": "loss", "better": better}}
    return build(Table, plain | {"scales": {"nano": {"without": without or {}}}})


def verdict(values, gaps=None, columns=(), **claim):
    made = table(columns, **claim)
    return judge(made.claims[0], made, "nano", values, gaps)


def seeds(random, means, sd=1.0, n=5):
    """Return cells with these means; pairing removes the noise of the seed."""
    common = random.normal(0, 5, n)
    return {
        name: dict(enumerate(mean + common + random.normal(0, sd / math.sqrt(2), n)))
        for name, mean in means.items()
    }


def rate(wanted, means, trials=TRIALS, n=5, columns=(), **claim):
    """Return the fraction of trials with this verdict."""
    random, made = np.random.default_rng(0), table(columns, **claim)
    draws = (seeds(random, means, n=n) for _ in range(trials))
    found = [judge(made.claims[0], made, "nano", values).verdict for values in draws]
    return found.count(wanted) / trials


FLAT = dict.fromkeys(ROWS, 0.0)
AXIS = {f"{row} @ {c}": 0.0 for row in ROWS for c in "abcd"}
KINDS = [
    ({"kind": "less", "of": ["sste", "ste"]}, FLAT, ()),
    ({"kind": "order", "of": ROWS}, FLAT, ()),
    ({"kind": "best_of", "of": ROWS}, FLAT, ()),
    ({"kind": "interior", "of": ROWS}, FLAT, ()),
    ({"kind": "crossing", "of": ["sste", "ste"], "along": [*"abcd"]}, AXIS, tuple("abcd")),
]


@pytest.mark.parametrize(("claim", "means", "columns"), KINDS)
def test_false_positive_rate_is_as_stated(claim, means, columns):
    decided = [rate(v, means, columns=columns, **claim) for v in ("held", "contradicted")]
    assert sum(decided) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / TRIALS)


@pytest.mark.parametrize(
    ("means", "claim"),
    [
        ({"sste": 1.0, "ste": 0.0}, {"kind": "equal", "margin": 1.0}),
        ({"sste": 1.0, "ste": 0.0}, {"kind": "not_worse", "margin": 1.0}),
        ({"dense": 0.0, "sste": 9.0, "ste": 9.0}, {"kind": "order"}),
        ({"sste": 9.0, "dense": 0.0, "ste": 0.0}, {"kind": "interior"}),
    ],
)
def test_false_positive_rate_at_the_edge_of_a_claim_is_one_percent(means, claim):
    """There a wrong "held" is most likely."""
    claim = {**claim, "of": [*means]}
    assert rate("held", means, **claim) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / TRIALS)


def test_power_is_as_stated():
    random, size = np.random.default_rng(1), 1000
    known = Difference("x", np.array([0.2, 1.8, 0.2, 1.8, 1.0, 1.0]))
    needed = known.seeds_to_decide()
    draws = random.normal(known.mean, known.sd, (size, needed))
    assert np.mean([Difference("x", d).sign() == 1 for d in draws]) >= 0.76
    fewer = random.normal(known.mean, known.sd, (size, needed - 1))
    assert np.mean([Difference("x", d).sign() == 1 for d in fewer]) <= 0.84
    margin = 2.5
    needed = known.seeds_to_decide(margin)
    draws = random.normal(known.mean, known.sd, (size, needed))
    assert 0.75 <= np.mean([Difference("x", d).outside(margin) < 0.01 for d in draws]) <= 0.93


CLEAR = {"dense": 0.0, "sste": 10.0, "srste": 20.0, "ste": 30.0}


@pytest.mark.parametrize(
    ("claim", "wanted"),
    [
        ({"kind": "less", "of": ["sste", "ste"]}, "held"),
        ({"kind": "less", "of": ["ste", "sste"]}, "contradicted"),
        ({"kind": "less", "of": [["sste", "dense"], ["ste", "dense"]]}, "held"),
        ({"kind": "order", "of": ROWS}, "held"),
        ({"kind": "order", "of": ["dense", "srste", "sste", "ste"]}, "contradicted"),
        ({"kind": "best_of", "of": ROWS}, "held"),
        ({"kind": "best_of", "of": ROWS, "better": "higher"}, "contradicted"),
        ({"kind": "best_of", "of": ["ste", "sste"], "better": "higher"}, "held"),
        ({"kind": "equal", "of": ["sste", "ste"], "margin": 5.0}, "contradicted"),
        ({"kind": "equal", "of": ["sste", "ste"], "margin": 40.0}, "held"),
        ({"kind": "not_worse", "of": ["sste", "ste"], "margin": 1.0}, "held"),
        ({"kind": "not_worse", "of": ["ste", "srste"], "margin": 20.0}, "held"),
        ({"kind": "not_worse", "of": ["ste", "sste"], "margin": 5.0}, "contradicted"),
        ({"kind": "not_worse", "of": ["ste", "sste"], "margin": 1.0, "better": "higher"}, "held"),
        ({"kind": "count", "of": ["sste", "ste"]}, "held"),
        ({"kind": "count", "of": ["ste", "sste"]}, "contradicted"),
        ({"kind": "interior", "of": ["sste", "dense", "ste"]}, "held"),
        ({"kind": "interior", "of": ["dense", "sste", "ste"]}, "contradicted"),
        ({"kind": "interior", "of": ["sste", "ste", "dense"], "better": "higher"}, "held"),
    ],
)
def test_clear_differences_are_decided(claim, wanted):
    for trial in range(5):
        values = seeds(np.random.default_rng(trial), CLEAR, n=8)
        assert verdict(values, **claim).verdict == wanted


@pytest.mark.parametrize(
    ("sste", "ste", "why"),
    [
        ({}, {0: 1.0}, "sste − ste: no seed has both"),
        ({0: 1.0}, {0: 2.0}, "no spread over seeds"),
        ({s: float(s) for s in range(4)}, {s: s + 9 + 0.1 * s for s in range(4)}, "n = 4: about 5"),
        ({s: float(s) for s in range(6)}, {s: s + 2.0 for s in range(6)}, "no spread over seeds"),
        ({s: 1.0 for s in range(6)}, {s: 1.0 for s in range(6)}, "are these the same runs?"),
        ({s: math.nan for s in range(6)}, {s: 1.0 for s in range(6)}, "no seed has both"),
        ({s: 1.0 for s in range(6)}, {s: 1.0 for s in range(9, 15)}, "no seed has both"),
    ],
)
def test_undecided_claims_name_the_reason(sste, ste, why):
    for claim in ({"kind": "less"}, {"kind": "equal", "margin": 100.0}):
        ruling = verdict({"sste": sste, "ste": ste}, of=["sste", "ste"], **claim)
        assert ruling.verdict == "not decided" and why in ruling.why


def test_a_count_of_few_runs_is_not_decided():
    values = {"sste": dict(enumerate([0.0, -1, 0, -1, 0])), "ste": dict.fromkeys(range(5), 0.0)}
    ruling = verdict(values, kind="count", of=["sste", "ste"])
    assert ruling.verdict == "not decided" and "below 0 in 2 of 5 runs" in ruling.why


def test_holm_steps_down():
    ps = [0.001, 0.04, 0.03, 0.005, 0.2]
    rulings = [Ruling("held", "", p=p) for p in ps]
    left_out = Ruling("not testable at this scale", "")
    # step-down by hand: 5·0.001, 4·0.005, 3·0.03, then never less than before
    assert holm([*rulings, left_out])[:5] == pytest.approx([0.005, 0.09, 0.09, 0.02, 0.2])
    assert math.isnan(holm([*rulings, left_out])[5])


RECORDS = ROOT / "results/records"


@pytest.mark.parametrize(
    ("name", "first", "second", "metric", "claim"),
    [
        ("claims_regression", "SR-STE", "STE", "loss", "SR-STE is below STE"),
        ("claims_regression", "dense", "STE", "flips", "at the end a dense network flips less"),
        ("claims_regression", "SR-STE", "STE", "flips_left", "flips die out under SR-STE"),
        ("claims_regression", "S-STE, no MVUE", "S-STE", "loss", "MVUE costs something"),
        ("claims_regression", "STEP", "SR-STE", "loss", "freezing v replaces the decay term"),
        ("claims_tuned_regression", "SR-STE", "S-STE, no MVUE", "loss", "SR-STE on gradients"),
        ("claims_tuned_regression", "S-STE", "T-SR-STE", "loss", "S-STE is better than T-SR"),
        ("claims_tuned_regression", "STEP + λ", "STEP", "loss", "the decay helps STEP"),
        ("claims_tuned_lm", "SR-STE", "STE", "loss", "SR-STE is below STE"),
        ("claims_tuned_lm", "S-STE", "dense, 867 steps", "loss", "at equal cost, S-STE"),
        ("sste_muon", "dense, Muon", "dense", "loss", "dense training is better under Muon"),
        ("sste_muon", "S-STE, Muon", "S-STE", "loss", "S-STE is better under Muon"),
        ("sste_muon", "SR-STE, Muon", "SR-STE", "loss", "SR-STE is better under Muon"),
        ("sste_muon", "SR-STE, Muon", "S-STE, Muon", "loss", "under Muon SR-STE is below S-STE"),
        ("match", "S-STE", "dense, FLOPs of S-STE", "loss", "at equal FLOPs, S-STE"),
        ("match", "dense", "SR-STE", "loss", "at equal tokens, SR-STE is worse"),
    ],
)
def test_verdicts_of_a_committed_record_are_those_of_scipy(name, first, second, metric, claim):
    results, table = read_record(RECORDS / f"{name}.json.gz"), load_table(name)
    values = results.values(metric)
    if metric == "loss":  # in percent of the dense loss with the same seed
        dense = values["dense"]
        values = {k: {s: 100 * v / dense[s] for s, v in of.items()} for k, of in values.items()}
    common = sorted(values[first].keys() & values[second].keys())
    test = stats.ttest_rel(*([values[name][seed] for seed in common] for name in (first, second)))
    verdict = "not decided" if test.pvalue >= 0.01 else "held"
    verdict = "contradicted" if verdict == "held" and test.statistic > 0 else verdict
    found = next(ruling for c, ruling in judged(results, table) if c.text.startswith(claim))
    assert (found.verdict, common) == (verdict, results.seeds)
    assert found.p == pytest.approx(test.pvalue, rel=1e-6)


def test_verdicts_about_sizes_are_those_of_scipy():
    """Every claim of the grid over sizes says that each cell is below those after it."""
    results, table = read_record(RECORDS / "scaling_lm.json.gz"), load_table("scaling_lm")
    losses = results.values("loss")

    def gap(cell):  # in percent of the dense loss with the same seed
        dense = losses[f"dense @ {cell.partition(' @ ')[2]}"]
        return np.array([100 * losses[cell][s] / dense[s] for s in results.seeds])

    rulings = judged(results, table)
    assert len(rulings) == len(table.claims) == 17
    for claim, ruling in rulings:
        pairs = itertools.combinations(map(gap, claim.of), 2)
        tests = [stats.ttest_rel(first, second) for first, second in pairs]
        held = all(test.pvalue < 0.01 and test.statistic < 0 for test in tests)
        # one pair the other way round is enough, so that its level is corrected for all of them
        against = any(len(tests) * test.pvalue < 0.01 and test.statistic > 0 for test in tests)
        verdict = "held" if held else "contradicted" if against else "not decided"
        assert ruling.verdict == verdict, claim.text


def test_missing_and_failed_seeds_are_named():
    random = np.random.default_rng(4)
    values = seeds(random, {"sste": 0.0, "ste": 10.0}, n=7)
    del values["ste"][3]
    ruling = verdict(values, {"ste": "seed 3 failed (diverged)"}, kind="less", of=["sste", "ste"])
    assert ruling.verdict == "held" and "n = 6" in ruling.why
    assert "ste: seed 3 failed (diverged)" in ruling.why


def test_row_term_means_every_column_that_ran():
    random = np.random.default_rng(5)
    means = {"sste @ a": 0.0, "ste @ a": 10.0, "sste @ b": 10.0, "ste @ b": 0.0}
    values = seeds(random, means, n=6)
    claim = {"kind": "less", "of": ["sste", "ste"], "columns": ("a", "b")}
    assert verdict(values, **claim).verdict == "contradicted"
    some = verdict(values, without={"* @ b": "takes too long"}, **claim)
    assert some.verdict == "held" and "not run: takes too long" in some.why
    none = verdict(values, without={"sste": "takes too long"}, **claim)
    assert (none.verdict, none.why) == ("not testable at this scale", "takes too long")
    crossing = {"kind": "crossing", "of": ["sste", "ste"], "along": ["a", "b"]}
    assert verdict(values, columns=("a", "b"), **crossing).verdict == "held"
    same = seeds(random, means | {"sste @ b": 0.0, "ste @ b": 10.0}, n=6)
    assert verdict(same, columns=("a", "b"), **crossing).verdict == "contradicted"
    claim["of"] = ["sste @ a", "ste @ a"]
    ruling = verdict(values, untestable={"nano": "too small"}, **claim)
    assert (ruling.verdict, ruling.why) == ("not testable at this scale", "too small")


def test_unsuitable_claims_are_refused():
    values = {f"{row} @ {c}": {0: 1.0} for row in ROWS for c in "ab"}
    with pytest.raises(ConfigError, match="needs terms `row @ column`"):
        verdict(values, columns=("a", "b"), kind="interior", of=ROWS)
    with pytest.raises(ConfigError, match="has no best value"):
        table(better=None, kind="best_of", of=["dense", "ste"])


def test_small_means_are_shown_with_two_significant_digits():
    assert _mean(Difference("x", [0.1, 0.2, 0.3]), 5, "+") == "+0.20000 ± 0.24841"
    assert _mean(Difference("x", [1e-7, 2e-7, 3e-7]), 5, "+") == "+0.00000020 ± 0.00000025"
    assert _mean(Difference("x", [3e-8]), 5) == "0.000000030"
    assert _mean(Difference("x", [0.0, 0.0]), 5) == "0.00000 ± 0.00000"
