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


def test_trained_dense_runs_of_equal_flops_need_no_interpolation():
    gap = lambda n, d: dense_loss(n, (1 - SAVED) * n * d) / dense_loss(n, n * d)  # noqa: E731
    results, table = results_of(gap, without={"dense @ 25000, 80", "SR-STE @ 100000, 5"})
    found = sizes.trained_gaps(results, table)
    assert [*found] == ["SR-STE"]
    expected = {(n, d) for n in SIZES for d in DATA} - {(25_000, 80), (100_000, 5)}
    assert {*found["SR-STE"]} == expected, "also with two amounts of data, and with the least"
    for seeds in found["SR-STE"].values():
        assert [*seeds.values()] == pytest.approx([0.0] * 5, abs=1e-9)
    other = dataclasses.replace(results, cells=[c for c in results.cells if c.seed != 3])
    later = [c for c in results.cells if c.seed == 3 and c.row != "dense, FLOPs of SR-STE"]
    some = dataclasses.replace(results, cells=other.cells + later)
    for by_place in (sizes.trained_gaps(r, table)["SR-STE"] for r in (other, some)):
        assert {seed for seeds in by_place.values() for seed in seeds} == {0, 1, 2, 4}
    for kind in ({"equal": "tokens"}, {"equal": "flops", "factor": 0.5}):
        match = {"dense, FLOPs of SR-STE": dataclasses.replace(*table.match.values(), **kind)}
        assert sizes.trained_gaps(results, dataclasses.replace(table, match=match)) == {}


@pytest.mark.parametrize("factor", [2.0, 1.5, 1.064])
def test_at_equal_cost_dense_runs_have_fewer_tokens(factor):
    """A run as good as a dense one of equal cost has no gap, whatever the speed."""
    share = 1 - SAVED * 2 * (1 - 1 / factor)
    gap = lambda n, d: dense_loss(n, share * n * d) / dense_loss(n, n * d)  # noqa: E731
    found = sizes.gaps(*results_of(gap), factor)["SR-STE"]
    assert {data for _, data in found} == {20, 80}, "no dense run has fewer tokens than 5 N"
    for seeds in found.values():
        assert np.abs([*seeds.values()]).max() < 0.03, "percent: the error of the parabola"
    tokens = sizes.gaps(*results_of(gap), None)["SR-STE"]
    assert all(min(seeds.values()) > 0.01 for seeds in tokens.values())


def test_a_size_with_two_amounts_of_data_has_no_gap_at_equal_cost():
    """A line through two losses would be off by as much as the gaps."""
    results, table = results_of(lambda n, d: 1.05, without={"dense @ 25000, 80"})
    assert {n for n, _ in sizes.gaps(results, table, 2.0)["SR-STE"]} == {*SIZES[1:]}
    assert (25_000, 20) in sizes.gaps(results, table, None)["SR-STE"]


def test_the_cost_of_a_row_is_the_mean_of_its_seeds():
    results, table = results_of(lambda n, d: 1.05)
    place = sizes.places(results, table)[0]
    cells = [c for c in results.cells if (c.row, c.column) == ("SR-STE", place.column)]
    for seed, cell in enumerate(cells):
        cell.flops = place.flops * (0.88 + 0.01 * seed)
    assert sizes.cost_share(results, "SR-STE", place, 2.0) == pytest.approx(0.9)
    assert sizes.cost_share(results, "SR-STE", place, None) == 1


def test_a_crossing_is_found_where_it_is():
    gap = lambda n: 2 - 0.5 * math.log2(n / 25_000)  # noqa: E731
    line = sizes.line_of({n: {seed: gap(n) for seed in range(3)} for n in SIZES})
    assert line.slope == pytest.approx(-0.5) and line.half < 1e-9
    assert line.crossing == pytest.approx([400_000] * 3)


NOISES = {"equal": (0.4,) * 4, "larger at small sizes": (2.0, 0.6, 0.3, 0.2)}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_intervals_contain_the_truth_as_often_as_they_say(noise):
    """The slope, and the crossing where there is one; the largest size has three of five seeds."""
    random, slopes, crossings = np.random.default_rng(2), [], []
    for _ in range(600):
        line = sizes.line_of(
            {
                n: {
                    seed: 2 - 0.5 * math.log2(n / 25_000) + random.normal(0, spread)
                    for seed in range(3 if n == SIZES[-1] else 5)
                }
                for n, spread in zip(SIZES, noise, strict=True)
            }
        )
        slopes.append(abs(line.slope + 0.5) <= line.half)
        if line.crossing is not None:
            _, low, high = line.crossing
            crossings.append(low <= 400_000 <= high)
    assert 0.93 < np.mean(slopes) < 0.97
    assert len(crossings) > 200 and 0.92 < np.mean(crossings) < 0.985


@pytest.mark.parametrize(
    ("gaps", "noise", "expected"),
    [
        ((2, 1, 0, -1), 0.05, r"(39\d|40\d)k \((3[5-9]\d|40\d)k to 4\d\dk\)"),
        ((-2, -1, 0.5, 1.5), 0.05, r"\d\d\dk \("),
        ((6, 0.5, 0.5, 0.5), 0.1, "none: worse than dense at all sizes"),
        ((3, 3, 3, 3), 0.05, "none: worse than dense at all sizes"),
        ((-3, -0.5, -0.4, -0.3), 0.1, "none: better than dense at all sizes"),
        ((20, 19, 18, 17), 0.05, "none: worse"),
        ((0.3, 0.2, 0.2, 0.1), 2.0, "not determined$"),
        ((3, -1, 2, -1), 0.1, "not determined$"),
        ((9, -0.5, -0.6, -0.4), 0.1, "not determined: the gaps are not on a line"),
    ],
)
def test_a_crossing_has_a_number_only_where_the_runs_show_one(gaps, noise, expected):
    random = np.random.default_rng(3)
    by_size = {
        n: {seed: gap + random.normal(0, noise) for seed in range(5)}
        for n, gap in zip(SIZES, gaps, strict=True)
    }
    means = sizes.over_sizes({(n, 20): seeds for n, seeds in by_size.items()}, 20)
    text = sizes.crossing_text(sizes.line_of(by_size), means)
    assert re.match(expected, text), text


def test_a_line_needs_two_seeds_with_two_sizes():
    assert sizes.line_of({10_000: {1: 1.0, 2: 1.1}}) is None
    assert sizes.line_of({10_000: {1: 1.0, 2: 2.0}, 100_000: {1: 2.0}}) is None
    by_size = {10_000: {1: 1.0, 2: 2.0}, 100_000: {1: 1.0, 2: 2.0}}
    line = sizes.line_of(by_size)
    assert line.slope == pytest.approx(0) and line.crossing is None
    one = sizes.over_sizes({(n, 5): {1: 1.0} for n in by_size}, 5)
    assert sizes.crossing_text(line, one) == "not determined"


def test_the_page_has_gaps_the_check_of_the_interpolation_both_laws_and_a_figure():
    results, table = results_of(lambda n, d: 1.05 - 0.01 * math.log2(n / 25_000), 0.002)
    page = render(results, {"sizes": table})
    text = "\n".join(page.lines)
    for title in (*sizes.COSTS, sizes.TRAINED):
        assert f"**Percent above dense, {title}**" in text
    assert "In 8 cells (25000, 20; 25000, 80; " in text
    assert "FLOPs relative to dense, by ascending size" in text and "SR-STE 0.90, 0.90" in text
    assert "arXiv:2309.08520" in text and "arXiv:2501.12486" in text
    assert "| SR-STE | 12 |" in text, "residuals by row"
    ((name, figure),) = page.figures.items()
    assert name == "sizes-sizes.png"
    visible = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert len(visible) == 5, "no comparison at equal FLOPs with 5 tokens per parameter"


def test_a_table_without_runs_has_no_figure():
    results, table = results_of(lambda n, d: 1.05)
    empty = dataclasses.replace(results, cells=[])
    assert sizes.section(empty, table) == [] and figures.of_table(empty, table) == {}
