"""The law of learning rates behind the table scaling_lm."""

import importlib.util
import itertools
import math

import pytest

from sparsepretrain.studies.results import CellResult, TableResults
from sparsepretrain.studies.tables import load_table
from support import ROOT

spec = importlib.util.spec_from_file_location("scaling_rates", ROOT / "scripts/scaling_rates.py")
rates = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rates)
Place = rates.Place


def test_the_best_rate_is_the_vertex_of_a_parabola():
    grid = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
    true = 9.5e-3
    found = rates.best({rate: 2 + math.log(rate / true) ** 2 for rate in grid})
    assert found == pytest.approx(true)
    assert rates.best({4e-3: 1.0, 8e-3: 2.0, 1.6e-2: 3.0}) == 4e-3, "an end counts as it is"
    assert rates.best({4e-3: 2.0, 8e-3: 1.0, 1.6e-2: math.inf}) == 8e-3, "1.6e-2 diverged"


def test_the_law_is_that_of_exact_rates():
    rows = {"dense": -4.0, "SR-STE": -3.5}
    places = [Place(*at) for at in itertools.product(rows, ("25k", "98k"), (5, 20, 80))]
    exact = {
        p: math.exp(rows[p.row] - 0.3 * math.log(rates.SIZES[p.size]) + 0.1 * math.log(p.data))
        for p in places
    }
    law = rates.fit(exact)
    assert law.rows == pytest.approx(rows) and (law.size, law.data) == pytest.approx((-0.3, 0.1))
    assert law.rate(places[3]) == pytest.approx(exact[places[3]])


def test_a_diverged_run_counts_as_the_worst():
    def cell(column, seed, loss):
        state = "failed" if loss is None else "finished"
        metrics = {} if loss is None else {"loss": loss}
        return CellResult(row="dense", column=column, seed=seed, state=state, metrics=metrics)

    cells = [cell("25k, 0.004", 1, 2.0), cell("25k, 0.004", 2, 3.0), cell("25k, 0.008", 1, 1.0)]
    cells += [cell("25k, 0.008", 2, None), cell("98k, 5, 0.004", 1, 4.0)]
    found = rates.losses([TableResults(name="t", cells=cells)])
    assert found[Place("dense", "25k", 20)] == {4e-3: 2.5, 8e-3: math.inf}
    assert found[Place("dense", "98k", 5)] == {4e-3: 4.0}
    cells[-1].state = "partial"
    with pytest.raises(SystemExit, match="seed 1 is partial: finish"):
        rates.losses([TableResults(name="t", cells=cells)])


def test_the_tables_train_with_the_rates_of_the_committed_runs():
    _, law = rates.tuned_law()
    for name, expected in (
        ("scaling_lm", rates.cell_rates(law)),
        ("scaling_lm_transfer", rates.transfer_rates(law)),
    ):
        assert load_table(name).scales["nano"].cells == {
            f"{row} @ {column}": [f"optim.lr={rate:g}"] for (row, column), rate in expected.items()
        }


def test_rates_are_rounded_to_powers_of_the_root_of_two():
    assert [rates.rounded(rate) for rate in (4.1e-3, 5.5e-3, 9e-3, 1.2e-2)] == [
        4e-3,
        5.7e-3,
        8e-3,
        1.1e-2,
    ]
