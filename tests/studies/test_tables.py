"""Table files: checks, and the runs that follow."""

from collections import Counter

import pytest
import yaml

from sparsepretrain.config import freeze, load
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.cells import Selection, cells, read_seeds, seeds_text
from sparsepretrain.studies.tables import Published, cell_name, load_table, printed, slug

SMALL = {
    "title": "a table",
    "rows": {"dense": ["sparsity=dense"], "γ = 0.2": ["sparsity=sste", "sparsity.gamma=0.2"]},
    "columns": {"short": ["steps=4"], "long": ["steps=8"]},
    "metrics": {"loss": {"label": "validation loss", "key": "loss", "better": "lower"}},
    "scales": {
        "nano": {
            "overrides": ["experiment=smoke"],
            "rows": {"dense": ["optim.lr=2e-3"]},
            "without": {"dense @ long": "too slow"},
            "seeds": 2,
        }
    },
    "first_seed": 7,
}


def written(directory, **changes):
    (directory / "table").mkdir(exist_ok=True)
    (directory / "table" / "mine.yaml").write_text(yaml.safe_dump(SMALL | changes, sort_keys=False))
    return [directory]


def matching(row, to, equal="flops"):
    return {"match": {row: {"to": to, "equal": equal}}}


def metric(**changes):
    return {"metrics": {"loss": {"label": "l", "key": "loss", **changes}}}


def tuning(grid, seeds=(1,), **more):
    return {"scales": {"nano": {"tune": {"seeds": [*seeds], "grid": [grid], **more}}}}


def test_cells_are_runs_with_a_directory_each(tmp_path):
    dirs = written(tmp_path)
    found = cells("mine", load_table("mine", dirs), "nano", Selection(config_dirs=dirs))
    names = ("dense @ short", "γ = 0.2 @ short", "γ = 0.2 @ long")
    assert [cell.label for cell in found[:3]] == [f"{name}, seed 7" for name in names]
    assert [cell.seed for cell in found] == [7, 7, 7, 8, 8, 8]
    places = {str(freeze.run_directory(cell.run).parent) for cell in found}
    assert places == {f"runs/mine/{n}" for n in ("dense--short", "γ_0.2--short", "γ_0.2--long")}
    assert found[0].run.optim.lr == 2e-3 and found[2].run.steps == 8
    assert load(found[2].words) == found[2].run, "the words give the same run"
    table, given = load_table("mine", dirs), ["steps=5", "runs_dir=r"]
    found = cells("mine", table, "nano", Selection(1, "* @ short", given))
    assert [(cell.row, cell.run.steps) for cell in found] == [("dense", 5), ("γ = 0.2", 5)]
    assert found[0].run.runs_dir == "r/mine"


def test_all_mistakes_of_all_cells_are_reported(tmp_path):
    dirs = written(tmp_path)
    table = load_table("mine", dirs)
    with pytest.raises(ConfigError) as caught:
        cells("mine", table, "nano", Selection(overrides=["optim.lrr=1", "seeds=3"]))
    assert len(caught.value.messages) == 2
    named = "dense @ short, γ = 0.2 @ short, γ = 0.2 @ long: unknown key 'optim.lrr'"
    assert named in str(caught.value)
    with pytest.raises(ConfigError, match="use --seeds"):
        cells("mine", table, "nano", Selection(overrides=["seed=3"]))
    with pytest.raises(ConfigError, match="did you mean 'dense @ short'"):
        cells("mine", table, "nano", Selection(only="dens @ short"))
    with pytest.raises(ConfigError, match="no scale 'paper'"):
        cells("mine", table, "paper", Selection())
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        load_table("mines", dirs)


def test_cells_may_have_fewer_seeds(tmp_path):
    nano = {
        "overrides": ["experiment=smoke"],
        "seeds": 3,
        "fewer_seeds": {"* @ long": 2, "dense*": 1},
    }
    dirs = written(tmp_path, scales={"nano": nano})
    table = load_table("mine", dirs)
    found = cells("mine", table, "nano", Selection(config_dirs=dirs))
    assert Counter(cell.name for cell in found) == {
        **{"dense @ short": 1, "dense @ long": 1},
        **{"γ = 0.2 @ short": 3, "γ = 0.2 @ long": 2},
    }
    asked = cells("mine", table, "nano", Selection([7, 8, 9], "dense @ long", config_dirs=dirs))
    assert [cell.seed for cell in asked] == [7, 8, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"dense": "sparsity=dense"}}, "rows.dense must be a list"),
        ({"titel": "x"}, "unknown key 'titel' .did you mean 'title'"),
        ({"baseline": "ste"}, "baseline 'ste' is not a row"),
        ({"claims": [{"text": "t", "kind": "less", "of": ["dense", "sste"]}]}, "'sste' is unknown"),
        ({"claims": [{"text": "t", "kind": "equal", "of": ["dense", "dense"]}]}, "margin"),
        (
            {"claims": [{"text": "t", "kind": "less", "of": ["dense", "dense"]}]},
            "compares 'dense' with itself",
        ),
        (
            {"scales": {"nano": {"stages": [{"name": "a", "evaluate": "validation"}] * 2}}},
            "scales.nano.stages two have the name 'a'",
        ),
        (metric(over=[0.5, 0.1]), "ascending"),
        (metric(percent_of="sste"), "metrics.loss.percent_of 'sste' is unknown"),
        (tuning("a=1", seeds=[]), "at least one seed"),
        (tuning("a"), "must be KEY=VALUE"),
        (tuning("a=[1, 2]"), "without spaces"),
        (
            {"columns": {}, **tuning("a=1", rows={"dense": ["b=[1,2],3"]})},
            "same number of settings, got dense 2",
        ),
        (matching("dense", "none"), "match.dense.to 'none' is unknown"),
        (matching("none", "dense"), "match 'none' is unknown"),
        (matching("dense", "dense"), "'dense' is matched itself"),
        (matching("dense", "dense", "time"), "one of parameters, flops, tokens, got 'time'"),
        (
            {"scales": {"nano": {"fewer_seeds": {"dense @ middle": 1}}}},
            "scales.nano.fewer_seeds no cell is 'dense @ middle'",
        ),
        ({"scales": {"nano": {"fewer_seeds": {"* @ long": 0}}}}, "must be at least 1, got 0"),
        ({"columns": {}, "scaling": ["dens"]}, "scaling 'dens' is unknown .did you mean 'dense'"),
        ({"scaling": ["dense"], "baseline": None}, "scaling is for tables with a baseline"),
        (
            {"columns": {}, "scaling": ["dense"], "metrics": {"s": {"label": "s", "key": "s"}}},
            "scaling needs a first metric that is a loss",
        ),
    ],
)
def test_mistakes_in_a_file_name_file_and_key(tmp_path, changes, message):
    dirs = written(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_table("mine", dirs)
    assert "mine.yaml: " in str(caught.value)


def test_published_numbers_come_with_their_status():
    rows = {"dense": {"method": "dense"}, "step": {"method": "STEP"}}
    source = Published(paper="S-STE", table="Table 4 (partly)", metric="bleu", rows=rows)
    row = printed(source, "dense", "")
    assert row is not None and row["value"] == 26.42 and row["status"] == "secondary"
    assert printed(source, "step", "") is None  # without a published number
    assert printed(source, "srste", "") is None
    assert cell_name("a", "") == "a" and slug("λ = 6e-5, MVUE") == "λ_6e-5_MVUE"


@pytest.mark.parametrize(
    ("text", "seeds"), [("5", 5), ("101..103", [101, 102, 103]), ("3,7,3", [3, 7]), ("4..4", [4])]
)
def test_seeds_are_a_number_a_range_or_a_list(text, seeds):
    found = read_seeds(text)
    assert (found if isinstance(found, int) else [*found]) == seeds
    again = read_seeds(seeds_text(found))
    assert (again if isinstance(again, int) else [*again]) == seeds


@pytest.mark.parametrize("text", ["1001", "20251201", "9" * 20, "1..1001", f"0..{10**20}"])
def test_seeds_that_are_too_many_are_refused(text):
    with pytest.raises(ValueError, match="expected at most 1,000 seeds, got") as caught:
        read_seeds(text)
    assert ".." in text or f"a single seed is {text}..{text}" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "twice"),
    [
        ("rows:", "rows:\n  sste: []\n  'sste': []", "'sste' occurs twice"),
        ("title:", "title: other\ntitle:", "'title' occurs twice"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(before, after, twice, tmp_path):
    """One of both rows would be lost."""
    dirs = written(tmp_path)
    (file,) = tmp_path.rglob("mine.yaml")
    file.write_text(file.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=rf"mine.yaml cannot be read: {twice} in the block"):
        load_table("mine", dirs)


@pytest.mark.parametrize("text", ["0", "5..3", "1-3", "1,x", ""])
def test_other_seeds_are_refused(text):
    with pytest.raises(ValueError, match="expected a number"):
        read_seeds(text)
