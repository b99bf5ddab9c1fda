"""Rows of a table with the cost of another row."""

import pytest

from sparsepretrain import config
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.cells import Selection, cells
from sparsepretrain.studies.matching import matched
from sparsepretrain.studies.tables import Table, load_table
from sparsepretrain.training.cost import run_cost

MICRO = ["experiment=claims_lm", "steps=100"]
FLOPS, TOKENS, PARAMETERS = ({"equal": kind} for kind in ("flops", "tokens", "parameters"))


def table_of(words, **match):
    plain = {"title": "at equal cost", "match": {"equal": {"to": "sparse", **match}}}
    plain["rows"] = {"dense": ["sparsity=dense"], "sparse": words, "equal": ["sparsity=dense"]}
    plain["metrics"] = {"loss": {"label": "loss", "key": "loss", "better": "lower"}}
    return build(Table, plain | {"scales": {"nano": {}}})


def equal(words, overrides=MICRO, **match):
    asked = Selection(overrides=overrides)
    return matched("t", table_of(words, **match), "nano", asked)["equal", ""]


@pytest.mark.parametrize(
    ("words", "match", "expected"),
    [
        (["sparsity=sste"], FLOPS, None),
        (["sparsity=srste"], TOKENS, ["steps=100"]),
        (["sparsity=srste"], {**TOKENS, "factor": 0.25}, ["steps=25"]),
        (["sparsity=srste"], PARAMETERS, [64]),
        (["sparsity=srste", "sparsity.n=1"], PARAMETERS, [32]),
        (["sparsity=srste", "sparsity.targets=all"], PARAMETERS, [32]),
    ],
)
def test_a_matched_row_costs_as_much_as_the_other(words, match, expected):
    found = equal(words, **match)
    other, own = (run_cost(config.load([*MICRO, *w])) for w in (words, ["sparsity=dense", *found]))
    if match["equal"] == "flops":
        assert own.flops == pytest.approx(other.flops, rel=0.5 / 100)
        # FFN: 8·32² of 12·32² per layer; attention scores 2·32 per token pair; head 256·32
        ffn, rest = 2 * 8 * 32**2, 2 * 4 * 32**2 + 2 * 2 * 32 * 64 + 256 * 32
        share = 3 * ffn / (3 * (ffn + rest))
        assert found == [f"steps={round(100 * (1 - share / 3))}"]
    elif match["equal"] == "parameters":
        assert found == [f"model.n_inner={expected[0]}", "model.ffn_factor=1"]
        assert own.parameters == other.parameters - other.entries + other.nonzero
    else:
        assert found == expected


@pytest.mark.slow
def test_the_words_of_the_user_precede_the_computed_ones():
    cell = "dense, FLOPs of S-STE"
    table = load_table("match")
    asked = Selection(1, overrides=["steps=500"])
    assert matched("match", table, "paper", asked)[cell, ""] == ["steps=433"]
    found = cells("match", table, "paper", asked, matched={(cell, ""): ["steps=9"]})
    assert {c.row: c.run.steps for c in found}[cell] == 9


LARGE = ("gpt2_124m", "bert_base", "llama_60m", "llama_130m", "llama_350m")
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in LARGE]


@pytest.mark.parametrize("model", ["llama_nano", *LARGE])
def test_every_language_model_recipe_has_rows_of_equal_cost(model):
    asked = Selection(overrides=[f"model={model}", "optim.lr=1e-3"])
    found = matched("match", load_table("match"), "paper", asked)
    assert len(found) == 6 and all(found.values())


@pytest.mark.parametrize(
    ("words", "match", "message"),
    [
        # embeddings 10,240, norms 160, a quarter of 10,240 weights
        (
            ["sparsity=srste", "sparsity.targets=all", "sparsity.n=1", "model.n_inner=16"],
            PARAMETERS,
            "equal: model.n_inner: expected 12,960 parameters, .* an FFN of width 1 gives",
        ),
        (["sparsity=step"], FLOPS, "equal: sparsity: the optimizer decides when step"),
        (["sparsity=ste"], {**TOKENS, "factor": 1e-6}, "equal: steps: expected at least one"),
    ],
)
def test_a_cost_that_nothing_meets_is_refused(words, match, message):
    with pytest.raises(ConfigError, match=message):
        equal(words, **match)


PRUNED = ("SR-STE", "SR-STE, 1:4")


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("flops", ["SR-STE", "S-STE", "dense, FLOPs of SR-STE", "dense, FLOPs of S-STE"]),
        pytest.param(
            "tokens",
            ["SR-STE", "dense, half the tokens", "SR-STE, half the tokens"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "parameters",
            [*PRUNED, *(f"dense, parameters of {row}" for row in PRUNED)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_kind_of_match_keeps_the_rows_that_it_compares(kind, rows):
    table, asked = load_table("match"), Selection(1, overrides=[f"match={kind}", "steps=100"])
    found = matched("match", table, "paper", asked)
    kept = cells("match", table, "paper", asked, matched=found)
    assert [cell.row for cell in kept] == ["dense", *rows]
    assert not any(word.startswith("match=") for cell in kept for word in cell.words)


def test_an_unknown_kind_of_match_is_refused():
    with pytest.raises(ConfigError, match=r"match: .*\(parameters, flops, tokens\), got 'time'"):
        matched("match", load_table("match"), "paper", Selection(overrides=["match=time"]))
    with pytest.raises(ConfigError, match="match: table claims_lm has no matched rows"):
        asked = Selection(overrides=["match=flops"])
        cells("claims_lm", load_table("claims_lm"), "nano", asked)


def test_a_row_that_does_not_run_has_no_cost():
    table = table_of(["sparsity=ste"], equal="tokens")
    table.scales["nano"].without = {"sparse": "takes too long"}
    with pytest.raises(ConfigError, match=r"equal: match\.to: 'sparse' does not run at scale"):
        matched("t", table, "nano", Selection(overrides=MICRO))
    table.scales["nano"].without["equal"] = "as well"
    assert matched("t", table, "nano", Selection(overrides=MICRO)) == {}


def test_each_column_has_a_cost_of_its_own():
    table = table_of(["sparsity=srste"], **FLOPS)
    table.scales["nano"].overrides = MICRO
    table.columns = {"short": ["steps=50"], "wide": ["model.n_embd=64"]}
    found = matched("t", table, "nano", Selection())
    for column, words in table.columns.items():
        sparse = config.load([*MICRO, *words, "sparsity=srste"])
        dense = config.load([*MICRO, *words, "sparsity=dense", *found["equal", column]])
        assert run_cost(dense).flops == pytest.approx(run_cost(sparse).flops, rel=0.02)
    steps = {column: int(words[0].partition("=")[2]) for (_, column), words in found.items()}
    assert steps["short"] < 50 < steps["wide"] < 100
    kept = cells("t", table, "nano", Selection(1), matched=found)
    assert {c.column: c.run.steps for c in kept if c.row == "equal"} == steps


def test_a_model_without_an_ffn_width_is_refused():
    overrides = ["experiment=smoke", "model=resnet18_cifar"]
    with pytest.raises(ConfigError, match="equal: model: expected a model with n_inner"):
        equal(["sparsity=ste"], overrides, equal="parameters")
