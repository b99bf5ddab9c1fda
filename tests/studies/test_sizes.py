"""Gaps to dense training by model size and data, on losses that follow a known law."""

import dataclasses
import math
import re

import numpy as np
import pytest

from sparsepretrain.config.strict import build
from sparsepretrain.studies import figures, sizes
from sparsepretrain.studies.results import CellResult, TableResults
from sparsepretrain.studies.table_page import render
from sparsepretrain.studies.tables import Table, cell_name

SIZES = (25_000, 100_000, 400_000, 1_600_000)
DATA = (5, 20, 80)
SAVED = 0.1
"""Part of the FLOPs of a dense run that a sparse one saves, if a 2:4 matmul costs half."""


def dense_loss(n, tokens):
    return 1.2 + 20 / n**0.3 + 30 / tokens**0.3


def results_of(gap, noise=0.0, *, without=()):
    """Return finished runs; ``gap``: (N, tokens per parameter) -> loss of SR-STE over dense."""
    random, cells = np.random.default_rng(1), []
    columns = {f"{n}, {d}": (n, d) for n in SIZES for d in DATA}
    for column, (n, d) in columns.items():
        shares = {"dense": 1.0, "SR-STE": 1.0, "dense, FLOPs of SR-STE": 1 - SAVED}
        for row, share in shares.items():
            if cell_name(row, column) in without:
                continue
            for seed in range(5):
                loss = dense_loss(n, share * n * d) * (gap(n, d) if row == "SR-STE" else 1)
                loss *= 1.02**seed * (1 + random.normal(0, noise))
                sparse = row == "SR-STE"
                cells.append(
                    CellResult(
                        row=row, column=column, seed=seed, state="finished",
                        tokens=share * n * d, entries=n, nonzero=n // 2 if sparse else n,
                        average=n / 2 if sparse else n, sparse_matmuls=1.0 if sparse else 0.0,
                        flops=6.0 * n * n * d * (1 - SAVED if sparse else share),
                        metrics={"loss": loss},
                    )
                )  # fmt: skip
    plain = {
        "title": "sizes", "scaling": ["dense", "SR-STE"],
        "rows": {"dense": [], "SR-STE": [], "dense, FLOPs of SR-STE": []},
        "columns": {column: [] for column in columns},
        "match": {"dense, FLOPs of SR-STE": {"to": "SR-STE", "equal": "flops"}},
        "metrics": {"loss": {"label": "loss", "key": "loss", "better": "lower"}},
        "scales": {"nano": {"seeds": 5}},
    }  # fmt: skip
    results = TableResults(name="sizes", scale="nano", seeds=[*range(5)], cells=cells)
    return results, build(Table, plain)


def test_gaps_are_relative_to_dense_with_the_same_seed():
    results, table = results_of(lambda n, d: 1.05)
    found = sizes.gaps(results, table, None)
    assert [*found] == ["SR-STE"], "neither the baseline nor rows of equal cost"
    assert {*found["SR-STE"]} == {(n, d) for n in SIZES for d in DATA}
    for seeds in found["SR-STE"].values():
        assert [*seeds.values()] == pytest.approx([5.0] * 5)


@pytest.mark.parametrize("factor", [2.0, 1.5, 1.064])
def test_at_equal_cost_dense_runs_have_fewer_tokens(factor):
    """A run as good as a dense one of equal cost has no gap, whatever the speed."""
    share = 1 - SAVED * 2 * (1 - 1 / factor)
    gap = lambda n, d: dense_loss(n, share * n * d) / dense_loss(n, n * d)  # noqa: E731
    found = sizes.gaps(*results_of(gap), factor)["SR-STE"]
    for seeds in found.values():
        assert np.abs([*seeds.values()]).max() < 0.03, "percent: the error of the parabola"
    tokens = sizes.gaps(*results_of(gap), None)["SR-STE"]
    assert all(min(seeds.values()) > 0.01 for seeds in tokens.values())


def test_a_size_with_one_amount_of_data_has_no_gap_at_equal_cost():
    one = {cell_name("dense", f"25000, {d}") for d in (20, 80)}
    results, table = results_of(lambda n, d: 1.05, without=one)
    assert {n for n, _ in sizes.gaps(results, table, 2.0)["SR-STE"]} == {*SIZES[1:]}
    assert (25_000, 5) in sizes.gaps(results, table, None)["SR-STE"]


def test_a_crossing_is_found_where_it_is():
    gap = lambda n: 2 - 0.5 * math.log2(n / 25_000)  # noqa: E731
    line = sizes.line_of([(n, gap(n)) for n in SIZES])
    assert line.slope == pytest.approx(-0.5) and line.half < 1e-9
    assert line.crossing == pytest.approx([400_000] * 3)


def test_intervals_of_crossings_contain_the_truth_as_often_as_they_say():
    random, hits = np.random.default_rng(2), []
    for _ in range(300):
        points = [
            (n, 2 - 0.5 * math.log2(n / 25_000) + random.normal(0, 0.4))
            for n in SIZES
            for _ in range(5)
        ]
        _, low, high = sizes.line_of(points).crossing
        hits.append(low <= 400_000 <= high)
    assert 0.91 < np.mean(hits) < 0.985


@pytest.mark.parametrize(
    ("gap", "noise", "expected"),
    [
        (lambda n: 2 - 0.5 * math.log2(n / 25_000), 0.05, r"40\dk|39\dk"),
        (lambda n: 20 - math.log2(n / 25_000), 0.05, "none up to 1.60M: the line is above"),
        (lambda n: -20 + math.log2(n / 25_000), 0.05, "none up to 1.60M: the line is below"),
        (lambda n: -9 - math.log2(n / 25_000), 0.05, "none: the line is below zero at all"),
        (lambda n: 3, 0.5, "not determined: no trend"),
        (lambda n: 7 - math.log2(n / 25_000), 0.3, "not determined: between|none up to"),
    ],
)
def test_a_crossing_that_the_runs_do_not_determine_has_no_number(gap, noise, expected):
    random = np.random.default_rng(3)
    values = {n: [gap(n) + random.normal(0, noise) for _ in range(5)] for n in SIZES}
    line = sizes.line_of([(n, value) for n, own in values.items() for value in own])
    text = sizes.crossing_text(line, min(SIZES), max(SIZES))
    assert re.match(expected, text), text


def test_two_points_have_no_line():
    assert sizes.line_of([(1e4, 1.0), (1e5, 2.0)]) is None
    assert sizes.line_of([(1e4, 1.0), (1e4, 2.0), (1e4, 3.0)]) is None


def test_the_page_has_gaps_the_check_of_the_interpolation_both_laws_and_a_figure():
    results, table = results_of(lambda n, d: 1.05 - 0.01 * math.log2(n / 25_000), 0.002)
    page = render(results, {"sizes": table})
    text = "\n".join(page.lines)
    for title in sizes.COSTS:
        assert f"**Percent above dense, {title}**" in text
    assert "In 12 cells a dense run of equal FLOPs was trained as well" in text
    assert "arXiv:2309.08520" in text and "arXiv:2501.12486" in text
    assert "| SR-STE | 12 |" in text, "residuals by row"
    ((name, figure),) = page.figures.items()
    assert name == "sizes-sizes.png" and len(figure.axes) == 6


def test_a_table_without_runs_has_no_figure():
    results, table = results_of(lambda n, d: 1.05)
    empty = dataclasses.replace(results, cells=[])
    assert sizes.section(empty, table) == [] and figures.of_table(empty, table) == {}
