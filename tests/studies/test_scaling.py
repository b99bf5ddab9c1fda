"""The scaling law of arXiv:2309.08520."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from sparsepretrain.studies import scaling
from sparsepretrain.studies.results import CellResult, TableResults, read_record
from sparsepretrain.studies.scaling import Law, Point, fit
from sparsepretrain.studies.table_page import render
from sparsepretrain.studies.tables import load_table
from support import ROOT

RECORDS = ROOT / "results" / "records"
TRUE = {"a_S": 0.5, "b_S": 0.7, "c_S": 1.0, "b_N": 0.25, "a_D": 0.3, "b_D": 0.4, "c": 0.6}


def law(s, n, d, k):
    return (
        (k["a_S"] * (1 - s) ** k["b_S"] + k["c_S"]) / n ** k["b_N"]
        + k["a_D"] / d ** k["b_D"]
        + k["c"]
    )


def grid(sparsities, widths, tokens, true, noise=None):
    points = []
    for s, width, d in itertools.product(sparsities, widths, tokens):
        n = width * (1 - s)
        loss = law(s, n, d, true) + (noise.normal(0, 0.003) if noise else 0)
        points.append(Point(f"{s} {width} {d}", s, n, d, loss))
    return points


@pytest.mark.parametrize("true", [TRUE, TRUE | {"b_S": 0.3, "b_N": 0.1, "c": 0.2}])
def test_exact_losses_give_the_exact_coefficients(true):
    found = fit(grid((0, 0.5, 0.75, 0.875), (0.25, 1, 4), (0.25, 0.5, 1), true))
    assert isinstance(found, Law)
    assert {k: v for k, (v, _) in found.coefficients.items()} == pytest.approx(true, rel=1e-5)
    assert all(half < 1e-5 for _, half in found.coefficients.values())


def test_intervals_contain_the_truth_as_often_as_they_say():
    random, hits = np.random.default_rng(3), []
    for _ in range(40):
        found = fit(grid((0, 0.5, 0.75, 0.875), (0.25, 1, 4), (0.25, 0.5, 1), TRUE, random))
        value, half = found.coefficients["b_N"]
        hits.append(abs(value - TRUE["b_N"]) < half)
    assert np.mean(hits) > 0.85


@pytest.mark.parametrize(
    ("sparsities", "tokens", "names"),
    [
        ((0, 0.5), (0.25, 0.5, 1), {"a_S", "b_S", "b_N", "a_D", "b_D", "c"}),
        ((0,), (1,), {"a_S", "b_N", "c"}),
        ((0, 0.5, 0.75), (1,), {"a_S", "b_S", "c_S", "b_N", "c"}),
    ],
)
def test_coefficients_that_the_rows_cannot_tell_apart_are_left_out(sparsities, tokens, names):
    true = TRUE if len(sparsities) > 2 else TRUE | {"c_S": 0.0}
    widths = (0.25, 0.5, 1, 2, 4, 8)
    found = fit(grid(sparsities, widths, tokens, true))
    assert set(found.coefficients) == names


def test_too_few_rows_are_not_fitted():
    assert fit(grid((0, 0.5), (1, 2), (1,), TRUE)).startswith("Not fitted: 4 of at least 6")
    assert "2 of at least 3 numbers" in fit(grid((0,), (1, 2), (0.2, 0.4, 0.6, 0.8, 1), TRUE))
    assert "2 numbers of tokens" in fit(grid((0, 0.5, 0.75), (0.25, 1, 4), (0.5, 1), TRUE))


def test_an_underdetermined_law_is_named_and_has_no_numbers():
    noise = np.random.default_rng(0)
    close = fit(grid((0, 0.5, 0.75), (0.9, 1), (0.8, 0.9, 1), TRUE, noise))
    assert close.startswith("Not fitted: 18 rows do not determine ") and "b_N" in close
    exact = fit(grid((0, 0.5, 0.75), (1,), (1, 1), TRUE))  # six rows, three of them different
    assert exact.startswith("Not fitted: 6 rows do not determine a_S, b_S, ")
    record = read_record(RECORDS / "match.json.gz")
    (line,) = scaling.section(record, load_table("match"))
    assert line.startswith("Not fitted: 9 rows do not determine a_S, b_S, ")


def results_of(shapes, true=TRUE):
    """Return finished runs of two seeds: row -> (nonzero parameters, tokens, sparsity)."""
    cells = []
    for row, (n, d, s) in shapes.items():
        cost = {"tokens": 100 * d, "entries": round(n / (1 - s)), "nonzero": n}
        for seed in (0, 1):
            metrics = {"loss": law(s, n / 1000, d, true) + 0.1 * (2 * seed - 1)}
            about = {"row": row, "seed": seed, "state": "finished"}
            cells.append(CellResult(**about, **cost, metrics=metrics))
    return TableResults(name="match", scale="nano", cells=cells)


SHAPES = {
    "dense": (1000, 1.0, 0.0), "SR-STE": (600, 1.0, 0.4), "SR-STE, 1:4": (400, 1.0, 0.6),
    "dense, parameters of SR-STE": (600, 1.0, 0.0),
    "dense, parameters of SR-STE, 1:4": (400, 1.0, 0.0),
    "dense, FLOPs of SR-STE": (1000, 0.9, 0.0), "dense, FLOPs of S-STE": (1000, 0.8, 0.0),
    "dense, half the tokens": (1000, 0.5, 0.0), "SR-STE, half the tokens": (600, 0.5, 0.4),
    "S-STE": (600, 1.0, 0.4),
}  # fmt: skip


def test_page_of_a_table_has_the_law_of_its_rows():
    table, results = load_table("match"), results_of(SHAPES)
    page = render(results, {"match": table}).lines
    lines = page[page.index("## Scaling law") : page.index("## Pairing")]
    assert any(line.startswith("| b_N | 0.25 | ±") for line in lines)
    assert sum(line.endswith("| +0.00 |") or line.endswith("| -0.00 |") for line in lines) == 9
    assert not any(line.startswith("| S-STE |") for line in lines), "masks of another method"
    assert math.isclose(scaling.points_of(results, table, table.scaling)[1].sparsity, 0.4)
    half = dataclasses.replace(results, cells=[c for c in results.cells if c.row != "dense"])
    (line,) = scaling.section(half, table)
    assert line.startswith("Not fitted: no finished run of dense")
    other = dataclasses.replace(table, scaling=[])
    assert "## Scaling law" not in render(results, {"match": other}).lines


def test_the_law_of_mean_parameters_is_that_of_exact_losses():
    table, results = load_table("match"), results_of(SHAPES)
    for cell in results.cells:
        sparse = "SR-STE" in cell.row and "dense" not in cell.row
        cell.average = 0.8 * cell.entries if sparse else float(cell.entries)
        n, d = cell.average / 1000, cell.tokens / 100
        cell.metrics["loss"] = 0.7 / n**0.3 + 0.4 / d**0.5 + 1.1
    lines = scaling.section(results, table)
    found = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in lines if "| ±" in line
    }
    assert found == {"A": "0.7", "α": "0.3", "B": "0.4", "β": "0.5", "E": "1.1"}


def test_rows_keep_their_law_under_other_labels():
    table = load_table("match")
    sizes = {"nano": dataclasses.replace(table.scales["nano"], labels={"SR-STE": "sparse"})}
    page = render(results_of(SHAPES), {"match": dataclasses.replace(table, scales=sizes)}).lines
    assert any(line.startswith("| sparse | 0.400 | 0.600 |") for line in page)
