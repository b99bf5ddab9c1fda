"""Fit the learning rates of the table scaling_lm to the runs that tune them.

    python scripts/scaling_rates.py     the law, its residuals, and `cells:` of both tables

Reads results/records/scaling_lm_rates.json.gz and scaling_lm_rates_data.json.gz. The rule is in
configs/table/scaling_lm_rates_data.yaml.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparsepretrain.studies.results import TableResults, read_record
from sparsepretrain.studies.tables import load_table, table_cells

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results" / "records"
TABLES = ("scaling_lm_rates", "scaling_lm_rates_data")
SIZES = {"25k": 24_736, "98k": 98_624, "332k": 332_448, "984k": 984_448}
"""Name of a size in columns -> parameters without embeddings."""
UNIT = 4e-3
"""Rates are this, times a power of √2."""


class Place(NamedTuple):
    """Row of the table at one size with one amount of data."""

    row: str
    size: str
    data: int


class Law(NamedTuple):
    """ln(rate) = rows[row] + size·ln(N) + data·ln(bytes per parameter)."""

    rows: dict[str, float]
    size: float
    data: float
    errors: tuple[float, float]
    """Standard errors of ``size`` and ``data``."""

    def rate(self, place: Place) -> float:
        """Return the rate of a place, not rounded."""
        n, data = math.log(SIZES[place.size]), math.log(place.data)
        return math.exp(self.rows[place.row] + self.size * n + self.data * data)


def losses(records: list[TableResults]) -> dict[Place, dict[float, float]]:
    """Return rate -> mean loss over seeds at each place; ∞ if a run failed, as diverged ones do.

    Columns are ``25k, 0.004``, with 20 bytes per parameter, or ``25k, 5, 0.004``. A run that has
    not ended says nothing about its rate: it ends the program.
    """
    by_place: dict[Place, dict[float, list[float]]] = {}
    for record in records:
        for cell in record.cells:
            if cell.state not in ("finished", "failed"):
                raise SystemExit(
                    f"{record.name}: {cell.name}, seed {cell.seed} is {cell.state}: finish the "
                    "table and record it again"
                )
            size, *data, rate = cell.column.split(", ")
            place = Place(cell.row, size, int(data[0]) if data else 20)
            loss = cell.metrics.get("loss") if cell.state == "finished" else None
            values = by_place.setdefault(place, {}).setdefault(float(rate), [])
            values.append(math.inf if loss is None else loss)
    return {
        place: {rate: sum(values) / len(values) for rate, values in sorted(by_rate.items())}
        for place, by_rate in by_place.items()
    }


def best(by_rate: dict[float, float]) -> float:
    """Return the vertex of the parabola through the best rate and its neighbors.

    The best rate itself where it is an end of the rates that did not diverge.
    """
    finite = {rate: loss for rate, loss in by_rate.items() if math.isfinite(loss)}
    rates = sorted(finite)
    at = rates.index(min(finite, key=lambda rate: finite[rate]))
    if at in (0, len(rates) - 1):
        return rates[at]
    three = rates[at - 1 : at + 2]
    # rates are a factor of two apart; the middle one is the best, so the vertex is between them
    low, middle, high = (finite[rate] for rate in three)
    shift = (low - high) / (2 * (low - 2 * middle + high))
    return three[1] * 2**shift


def fit(optima: dict[Place, float]) -> Law:
    """Fit the law by least squares."""
    rows = list(dict.fromkeys(place.row for place in optima))
    matrix = np.array(
        [
            [*(float(p.row == row) for row in rows), math.log(SIZES[p.size]), math.log(p.data)]
            for p in optima
        ]
    )
    values = np.log([*optima.values()])
    found, *_ = np.linalg.lstsq(matrix, values, rcond=None)
    residuals = values - matrix @ found
    variance = residuals @ residuals / (len(values) - len(found))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(matrix.T @ matrix)))
    *levels, size, data = found.tolist()
    return Law(dict(zip(rows, levels, strict=True)), size, data, tuple(errors[-2:].tolist()))


def rounded(rate: float) -> float:
    """Return the nearest rate of 4e-3 times a power of √2, with two significant digits."""
    return float(f"{UNIT * 2 ** (round(2 * math.log2(rate / UNIT)) / 2):.2g}")


def read() -> list[TableResults]:
    """Return the committed runs of both tables."""
    return [read_record(RECORDS / f"{name}.json.gz") for name in TABLES]


def cell_rates(law: Law) -> dict[tuple[str, str], float]:
    """Return (row, column) -> rounded rate of each cell of scaling_lm."""
    rates = {}
    for row, column, left_out in table_cells(load_table("scaling_lm"), "nano"):
        if not left_out:
            size, data = column.split(", ")
            tuned = row if row in law.rows else "dense"  # rows of equal cost are dense runs
            rates[row, column] = rounded(law.rate(Place(tuned, size, int(data))))
    return rates


def transfer_rates(law: Law) -> dict[tuple[str, str], float]:
    """Return (row, column) -> rate of each cell of scaling_lm_transfer."""
    rates = {}
    for row in ("dense", "SR-STE"):
        rate = rounded(law.rate(Place(row, "332k", 20)))
        rates |= {(row, "half"): rate / 2, (row, "as transferred"): rate, (row, "twice"): 2 * rate}
    return rates


def tuned_law() -> tuple[dict[Place, float], Law]:
    """Return the best rate of each place in the committed runs, and the law fitted to them."""
    optima = {place: best(by_rate) for place, by_rate in losses(read()).items()}
    return optima, fit(optima)


def main() -> None:
    """Print the law and the rates."""
    optima, law = tuned_law()
    print(f"exponent of N {law.size:+.3f} ± {law.errors[0]:.3f} (standard error)")
    print(f"exponent of bytes per parameter {law.data:+.3f} ± {law.errors[1]:.3f}")
    for place, rate in optima.items():
        print(
            f"{place.row:16s} {place.size:>4s} × {place.data:2d}  {rate:.4f}  {law.rate(place):.4f}"
        )
    for table, rates in (
        ("scaling_lm", cell_rates(law)),
        ("scaling_lm_transfer", transfer_rates(law)),
    ):
        print(table)
        for (row, column), rate in rates.items():
            print(f'      "{row} @ {column}": [optim.lr={rate:g}]')


if __name__ == "__main__":
    main()
