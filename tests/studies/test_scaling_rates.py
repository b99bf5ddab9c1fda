"""The rule that gives every cell of the table scaling_lm its learning rate."""

import importlib.util
import math

import pytest

from sparsepretrain.studies.results import CellResult, TableResults, read_record
from sparsepretrain.studies.tables import cell_name, load_table
from support import ROOT

spec = importlib.util.spec_from_file_location("scaling_rates", ROOT / "scripts/scaling_rates.py")
rates = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rates)
Place = rates.Place


GRID = (4e-3, 8e-3, 1.6e-2)


def tuning(best_rates, *, noise=None, seeds=(1, 2, 3)):
    """Losses of a place: row -> rate -> seed -> loss, least at the rate of the row."""
    noise = noise or {}
    return {
        row: {
            rate: {s: 2 + math.log(rate / best) ** 2 + noise.get((row, rate, s), 0) for s in seeds}
            for rate in GRID
        }
        for row, best in best_rates.items()
    }


def test_all_rows_have_the_rate_with_the_least_mean_loss():
    rows = tuning({"dense": 8e-3, "half": 8e-3, "SR-STE": 1.6e-2})
    assert rates.best(rows, {1, 2, 3}) == 8e-3
    assert rates.best({"SR-STE": rows["SR-STE"]}, {1, 2, 3}) == 1.6e-2
    rows["half"][8e-3][2] = math.inf
    assert rates.best(rows, {1, 2, 3}) == 1.6e-2, "a rate that diverged is out"
    assert rates.best(rows, {1, 3}) == 8e-3


def test_one_rate_is_better_than_rates_that_noise_chose():
    """Seeds 1 and 2 of a row prefer a rate by chance; the third shows what that costs."""
    lucky = {("half", 1.6e-2, seed): -0.6 for seed in (1, 2)}
    rows = tuning({"dense": 8e-3, "half": 8e-3, "ASP": 8e-3, "STE": 8e-3}, noise=lucky)
    own, shared = rates.excess({rates.Place("25k", 5): rows, rates.Place("98k", 5): rows})
    assert own > shared > 0
    one = {row: {r: {1: v[1]} for r, v in by.items()} for row, by in rows.items()}
    assert rates.excess({Place("98k", 80): one, Place("25k", 5): rows}) == rates.excess(
        {Place("25k", 5): rows}
    ), "one seed chooses and does not judge"


def test_larger_sizes_have_the_rate_of_98k_times_a_power_of_their_size():
    chosen = {Place("98k", d): 8e-3 for d in (5, 20, 80)}
    chosen |= {Place("25k", 5): 1.6e-2, Place("25k", 20): 1.6e-2, Place("25k", 80): 1.6e-2}
    power = rates.exponent(chosen)
    assert power.value == pytest.approx(-0.5, abs=0.002) and power.error == pytest.approx(0)
    columns = rates.column_rates(chosen)
    assert columns["25k, 5"] == 1.6e-2 and columns["98k, 80"] == 8e-3
    # (332,448 / 98,624) to the power of -0.5 is 0.54, which is rounded to 2^-1
    assert columns["332k, 20"] == 4e-3
    chosen[Place("25k", 80)] = 8e-3
    assert rates.exponent(chosen) == pytest.approx((-1 / 3, 1 / 6), abs=0.002)


def test_a_diverged_run_counts_as_the_worst():
    def cell(column, seed, loss):
        state = "failed" if loss is None else "finished"
        metrics = {} if loss is None else {"loss": loss}
        return CellResult(row="dense", column=column, seed=seed, state=state, metrics=metrics)

    cells = [cell("25k, 0.004", 1, 2.0), cell("25k, 0.004", 2, 3.0), cell("25k, 0.008", 1, 1.0)]
    cells += [cell("25k, 0.008", 2, None), cell("98k, 5, 0.004", 1, 4.0)]
    found = rates.losses([TableResults(name="t", cells=cells)])
    assert found[Place("25k", 20)]["dense"] == {4e-3: {1: 2.0, 2: 3.0}, 8e-3: {1: 1.0, 2: math.inf}}
    assert found[Place("98k", 5)]["dense"] == {4e-3: {1: 4.0}}
    cells[-1].state = "partial"
    with pytest.raises(SystemExit, match="seed 1 is partial: finish"):
        rates.losses([TableResults(name="t", cells=cells)])


def test_the_tables_train_with_the_rates_of_the_committed_runs():
    found = rates.read()
    columns = rates.column_rates(rates.tuned(found))
    assert {c: rate_of(w) for c, w in load_table("scaling_lm").columns.items()} == columns
    middle = columns["332k, 20"]
    transfer = {c: rate_of(w) for c, w in load_table("scaling_lm_transfer").columns.items()}
    expected = {"half": middle / 2, "as transferred": middle, "twice": middle * 2}
    assert transfer == pytest.approx(expected)
    notes = " ".join(load_table("scaling_lm").notes)
    assert (
        "({:.2f} % above the best of the seed, against {:.2f} %".format(*rates.excess(found))
        in notes
    )


def rate_of(words):
    (rate,) = [float(w.removeprefix("optim.lr=")) for w in words if w.startswith("optim.lr=")]
    return rate


def test_rates_are_rounded_to_powers_of_the_root_of_two():
    assert [rates.rounded(rate) for rate in (4.1e-3, 5.5e-3, 9e-3, 1.2e-2)] == [
        4e-3,
        5.7e-3,
        8e-3,
        1.1e-2,
    ]


def test_the_note_on_transferred_rates_has_the_numbers_of_the_record():
    losses = read_record(ROOT / "results/records/scaling_lm_transfer.json.gz").values("loss")

    def percent(row, column):
        (of_rate,) = losses[cell_name(row, column)].values()
        (transferred,) = losses[cell_name(row, "as transferred")].values()
        return f"{abs(100 * (of_rate / transferred - 1)):.1f}", of_rate > transferred

    twice, half = (
        [percent(row, column) for row in ("dense", "SR-STE")] for column in ("twice", "half")
    )
    assert [raised for _, raised in (*twice, *half)] == [False, True, True, True]
    expected = (
        f"twice the rate lowers the loss of dense by {twice[0][0]} % and raises that of SR-STE by "
        f"{twice[1][0]} %, half the rate raises both, by {half[0][0]} and {half[1][0]} %."
    )
    (note,) = [note for note in load_table("scaling_lm").notes if "scaling_lm_transfer" in note]
    assert note.endswith(expected)
