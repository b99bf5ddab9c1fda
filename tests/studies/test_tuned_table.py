"""Page of a table that tunes its rows, from results with known numbers."""

import dataclasses
import math

import pytest

from sparsepretrain.config.strict import build
from sparsepretrain.studies import figures
from sparsepretrain.studies.results import CellResult, TableResults, chosen, means
from sparsepretrain.studies.table_page import judged, render
from sparsepretrain.studies.tables import Table

SEEDS = range(101, 109)
LOSS = {"label": "validation loss", "key": "loss", "better": "lower"}
RATES, PAIR = ["optim.lr=1,2,3"], ["ste", "dense"]


@pytest.fixture(scope="module")
def table():
    return build(
        Table,
        {
            "title": "Two methods, tuned",
            "rows": {"dense": [], "short": [], "ste": []},
            "metrics": {"loss": LOSS | {"percent_of": "dense"}},
            "scales": {"nano": {"tune": {"seeds": [1, 2], "grid": RATES, "rows": {"ste": RATES}}}},
            "claims": [
                {"text": "STE costs 4 to 6 %", "kind": "equal", "margin": 6, "of": PAIR},
                {"text": "STE is better", "kind": "less", "of": PAIR},
            ],
        },
    )


def run(row, seed, column="", loss=None, **more):
    metrics = {} if loss is None else {"loss": loss}
    state = "finished" if loss is not None else "partial"
    return CellResult(row=row, column=column, seed=seed, state=state, metrics=metrics, **more)


@pytest.fixture
def results():
    """STE is 5 % above dense on every teacher; the teachers differ by a factor of eight."""
    tuning = [
        run(row, seed, f"optim.lr={rate}", loss=loss + 0.1 * seed)
        for row in ("dense", "short", "ste")
        for seed in (1, 2)
        for rate, loss in ((1, 3.0), (2, 2.0), (3, 1.0 if row == "ste" else 2.5))
    ]
    cells = []
    for index, seed in enumerate(SEEDS):
        base = 1.0 + index
        wobble = 0.001 * (-1) ** index
        cost = {"parameters": 7, "flops": 100.0, "sparse_matmuls": 0.0}
        cells += [
            run("dense", seed, loss=base, **cost),
            run("short", seed, loss=1.02 * base, **cost | {"flops": 80.0}),
            run("ste", seed, loss=base * (1.05 + wobble), **cost | {"sparse_matmuls": 1.0}),
        ]
    return TableResults(name="two", scale="nano", seeds=[*SEEDS], cells=cells, tuning=tuning)


def test_the_lowest_mean_of_complete_rows_is_chosen(results, table):
    best = {"dense": "optim.lr=2", "short": "optim.lr=2", "ste": "optim.lr=3"}
    assert chosen(results.tuning, table) == best
    assert means(results.tuning, table)["ste"]["optim.lr=1"] == pytest.approx(3.15)
    results.tuning[0] = run("dense", 1, "optim.lr=1")
    assert set(chosen(results.tuning, table)) == {"short", "ste"}


def test_a_diverged_setting_is_the_worst(results, table):
    for cell in results.tuning:
        if (cell.row, cell.column, cell.seed) == ("ste", "optim.lr=3", 2):
            cell.metrics = {"loss": None}
    assert chosen(results.tuning, table)["ste"] == "optim.lr=2"
    assert means(results.tuning, table)["ste"]["optim.lr=3"] == math.inf
    for cell in results.tuning:
        if cell.row == "ste":
            cell.metrics = {"loss": None}
    assert "ste" not in chosen(results.tuning, table)


def test_claims_are_judged_in_percent_of_the_baseline(results, table):
    assert results.compared("loss", table)["ste"][101] == pytest.approx(5.1)
    rulings = [ruling for _, ruling in judged(results, table)]
    assert [ruling.verdict for ruling in rulings] == ["held", "contradicted"]
    assert rulings[1].differences[0].mean == pytest.approx(5.0)


def test_percent_of_a_cell_compares_columns_with_each_other():
    table = build(
        Table,
        {
            "title": "Two rates",
            "rows": {"ste": []},
            "columns": {"1": [], "2": []},
            "baseline": None,
            "metrics": {"loss": LOSS | {"percent_of": "ste @ 1"}},
            "scales": {"nano": {}},
            "claims": [{"text": "2 is worse", "kind": "less", "of": ["ste @ 1", "ste @ 2"]}],
        },
    )
    cells = [run("ste", seed, "1", loss=float(seed)) for seed in SEEDS]
    cells += [run("ste", seed, "2", loss=seed * (1.1 + seed / 1e5)) for seed in SEEDS]
    results = TableResults(name="rates", scale="nano", seeds=[*SEEDS], cells=cells)
    assert results.compared("loss", table)["ste @ 2"][101] == pytest.approx(10.101)
    page = render(results, {"rates": table})
    assert "% above ste @ 1" in page.markdown
    assert "| ste | 1 | 104.5000 ± 2.0478 | 8 of 8 | – |" in page.lines
    assert "**held**" in page.markdown


def test_page_shows_tuning_percent_and_cost(results, table):
    page = render(results, {"two": table})
    assert "3 settings per row, each run with the seeds 1, 2;" in page.markdown
    assert "| ste | `optim.lr=3` | `optim.lr=3` | 1.1500 | 2.1500, 3.1500 |" in page.lines
    assert "| dense | `optim.lr=2` | – | 2.1500 | 2.6500, 3.1500 |" in page.lines
    line = next(line for line in page.lines if line.startswith("| ste | ") and "8 of 8" in line)
    assert line.endswith("| 8 of 8 | +5.0 ± 0.1 | 1 | 100 |")
    assert set(page.figures) == {"two-ranked.png", "two-cost.png"}


def test_figures_show_every_row_with_its_cost(results, table):
    ranked = figures.ranked_figure(results, table)
    axes = ranked.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["short", "ste"]
    cost = figures.cost_figure(results, table)
    assert {text.get_text() for text in cost.axes[0].texts} == {"dense", "short", "ste"}
    for cell in results.cells:
        cell.flops = None
    assert figures.cost_figure(results, table) is None


def plain_table(table):
    """The same table, whose first metric is not relative to the baseline."""
    metric = dataclasses.replace(table.metrics["loss"], percent_of=None)
    return dataclasses.replace(table, metrics={"loss": metric})


def test_the_line_of_shorter_dense_runs_goes_through_their_points(results, table):
    for each in (table, plain_table(table)):
        (axes,) = figures.cost_figure(results, each).axes
        line = next(line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_alpha())
        points = {line.get_xydata()[0].tobytes() for line in axes.lines if line.get_marker() == "o"}
        assert {point.tobytes() for point in line.get_xydata()} <= points


@pytest.mark.parametrize("left", [("ste",), ("dense", "ste"), ("dense",), ()])
def test_rows_without_a_common_seed_are_left_out_of_figures(results, table, left):
    for each in (table, plain_table(table)):
        results.cells = [cell for cell in results.cells if cell.row in left]
        page = render(results, {"two": each})
        assert set(page.figures) == ({"two-ranked.png"} if len(left) == 2 else set())
    for cell in results.cells:
        cell.seed += 100 * (cell.row == "ste")
    assert render(results, {"two": plain_table(table)}).figures == {}
