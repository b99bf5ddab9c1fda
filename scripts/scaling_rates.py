"""Choose the learning rates of the table scaling_lm from the runs that tune them.

    python scripts/scaling_rates.py     one rate for each column, and why not one for each row

Reads results/records/scaling_lm_rates.json.gz and scaling_lm_rates_data.json.gz. The rule is in
configs/table/scaling_lm_rates_data.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from sparsepretrain.studies.results import TableResults, read_record
from sparsepretrain.studies.tables import load_table

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results" / "records"
TABLES = ("scaling_lm_rates", "scaling_lm_rates_data")
SIZES = {"25k": 24_736, "98k": 98_624, "332k": 332_448, "984k": 984_448}
"""Name of a size in columns -> parameters without embeddings."""
TUNED = ("25k", "98k")
"""Sizes whose rates were tuned, at every amount of data."""
UNIT = 4e-3
"""Rates are this, times a power of √2."""


class Place(NamedTuple):
    """Column of scaling_lm."""

    size: str
    data: int  # bytes per parameter


Losses = dict[Place, dict[str, dict[float, dict[int, float]]]]
"""Place -> row -> rate -> seed -> validation loss; ∞ if the run failed, as diverged ones do."""


def losses(records: list[TableResults]) -> Losses:
    """Return the losses of the runs that tune the rates.

    Columns are ``25k, 0.004``, with 20 bytes per parameter, or ``25k, 5, 0.004``. A run that has
    not ended says nothing about its rate: it ends the program.
    """
    found: Losses = {}
    for record in records:
        for cell in record.cells:
            if cell.state not in ("finished", "failed"):
                raise SystemExit(
                    f"{record.name}: {cell.name}, seed {cell.seed} is {cell.state}: finish the "
                    "table and record it again"
                )
            size, *data, rate = cell.column.split(", ")
            place = Place(size, int(data[0]) if data else 20)
            loss = cell.metrics.get("loss") if cell.state == "finished" else None
            by_rate = found.setdefault(place, {}).setdefault(cell.row, {})
            by_rate.setdefault(float(rate), {})[cell.seed] = math.inf if loss is None else loss
    return found


def seeds_of(rows: dict[str, dict[float, dict[int, float]]]) -> set[int]:
    """Return the seeds of a place, which all of its rows and rates have."""
    by_rate = next(iter(rows.values()))
    return set(next(iter(by_rate.values())))


def best(rows: dict[str, dict[float, dict[int, float]]], seeds: Collection[int]) -> float:
    """Return the rate with the least loss: the geometric mean over rows of means over seeds."""
    rates = next(iter(rows.values()))
    return min(
        rates,
        key=lambda rate: sum(
            math.log(fmean(loss for seed, loss in by_rate[rate].items() if seed in seeds))
            for by_rate in rows.values()
        ),
    )


class Excess(NamedTuple):
    """Mean percent above the least loss of a seed, at rates that the other seeds chose."""

    own: float
    """With the best rate of each row."""
    shared: float
    """With one rate for all rows."""


def excess(found: Losses) -> Excess:
    """Compare both ways to choose rates on seeds that did not choose, where there are several."""
    own, shared = [], []
    for rows in found.values():
        seeds = seeds_of(rows)
        if len(seeds) == 1:
            continue
        for seed in seeds:
            others = seeds - {seed}
            for row, by_rate in rows.items():
                least = min(by_seed[seed] for by_seed in by_rate.values())
                for chosen, total in (({row: by_rate}, own), (rows, shared)):
                    total.append(100 * (by_rate[best(chosen, others)][seed] / least - 1))
    return Excess(fmean(own), fmean(shared))


class Exponent(NamedTuple):
    """Power of the number of parameters that best rates follow."""

    value: float
    error: float
    """Standard error over the amounts of data."""


def exponent(rates: dict[Place, float]) -> Exponent:
    """Return the exponent of N between both tuned sizes, the mean over the amounts of data."""
    small, large = TUNED
    steps = math.log(SIZES[large] / SIZES[small])
    powers = [
        math.log(rates[Place(large, place.data)] / rate) / steps
        for place, rate in rates.items()
        if place.size == small
    ]
    return Exponent(fmean(powers), stdev(powers) / len(powers) ** 0.5)


def tuned(found: Losses) -> dict[Place, float]:
    """Return the rate of each tuned place."""
    return {place: best(rows, seeds_of(rows)) for place, rows in found.items()}


def column_rates(rates: dict[Place, float]) -> dict[str, float]:
    """Return column of scaling_lm -> rate; of larger sizes, that of 98k times a power of N."""
    power = exponent(rates).value
    columns = {}
    for column in load_table("scaling_lm").columns:
        size, data = column.split(", ")
        place = Place(size, int(data))
        tuned_at = place if size in TUNED else Place(TUNED[-1], place.data)
        columns[column] = rounded(rates[tuned_at] * (SIZES[size] / SIZES[tuned_at.size]) ** power)
    return columns


def rounded(rate: float) -> float:
    """Return the nearest rate of 4e-3 times a power of √2, with two significant digits."""
    return float(f"{UNIT * 2 ** (round(2 * math.log2(rate / UNIT)) / 2):.2g}")


def read() -> Losses:
    """Return the losses of the committed runs."""
    return losses([read_record(RECORDS / f"{name}.json.gz") for name in TABLES])


def main() -> None:
    """Print the rates, the exponent, and what choosing in another way costs."""
    found = read()
    rates = tuned(found)
    own, shared = excess(found)
    print(f"above the least loss of a seed, at rates that other seeds chose: {own:.2f} % with one")
    print(f"rate for each row, {shared:.2f} % with one for all")
    power = exponent(rates)
    print(f"exponent of N {power.value:+.2f} ± {power.error:.2f} (standard error)")
    for column, rate in column_rates(rates).items():
        print(f"{column:9s} {rate:g}")


if __name__ == "__main__":
    main()
