"""Fit the scaling law of sparse networks (arXiv:2309.08520) to the record of a table.

    python docs/examples/scaling_law.py docs/tables/records/match.json.gz S-STE

prints coefficients and residuals. Rows named after the record are left out, since a law holds for
masks of one method.

    L = (a_S·(1 - S)^b_S + c_S)·N^(-b_N) + a_D·D^(-b_D) + c

S is the fraction of zeros, N the number of nonzero parameters, both without embeddings, and D the
number of tokens. N and D are relative to the dense run, which changes the units of a_S, c_S and
a_D only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t

from sparsepretrain.config.tables import Table, load_table
from sparsepretrain.reports.page import markdown_table
from sparsepretrain.reports.results import TableResults, read_record

NAMES = ("a_S", "b_S", "c_S", "b_N", "a_D", "b_D", "c")
FEWEST = 6
"""Fewest points of a fit."""

EQUATION = (
    "L = (a_S·(1 - S)^b_S + c_S)·N^(-b_N) + a_D·D^(-b_D) + c (arXiv:2309.08520), fitted "
    "by least squares to the means of {points} rows; {free} coefficients are free. S: zeros among "
    "the parameters without embeddings; N: nonzero ones; D: tokens. N and D are relative to "
    "{dense}. Not determined: the interval contains 0. Published coefficients have other units."
)


class Point(NamedTuple):
    """Mean loss of a row."""

    row: str
    sparsity: float
    parameters: float  # relative to dense
    tokens: float  # relative to dense
    loss: float


class Law(NamedTuple):
    """Fitted law."""

    coefficients: dict[str, tuple[float, float]]  # value and half of its 95 % interval
    fitted: list[float]  # loss of each point


def fit(points: Sequence[Point]) -> Law | str:
    """Fit the law by least squares, all coefficients ≥ 0; or return the reason why not.

    Coefficients that the points cannot tell apart are left out: c_S with two sparsities, b_S with
    one as well, and the term of D with fewer than three numbers of tokens, where c contains it.
    An infinite interval means that the coefficient is not determined.
    """
    levels = {
        name: len({round(getattr(point, name), 6) for point in points})
        for name in ("sparsity", "parameters", "tokens")
    }
    left_out = {"c_S"} if levels["sparsity"] < 3 else set()
    left_out |= {"b_S"} if levels["sparsity"] < 2 else set()
    left_out |= {"a_D", "b_D"} if levels["tokens"] < 3 else set()
    names = [name for name in NAMES if name not in left_out]
    needed = max(FEWEST, len(names) + 1)
    if len(points) < needed or levels["parameters"] < 3:
        return (
            f"Not fitted: {len(points)} of at least {needed} finished rows, with "
            f"{levels['parameters']} of at least 3 numbers of nonzero parameters."
        )
    s, n, d, losses = (np.array([point[i] for point in points]) for i in range(1, 5))

    def losses_of(values: np.ndarray) -> np.ndarray:
        k = dict.fromkeys(NAMES, 0.0) | dict(zip(names, values, strict=True))
        factor = k["a_S"] * (1 - s) ** k["b_S"] + k["c_S"]
        law: np.ndarray = factor * n ** -k["b_N"] + k["a_D"] * d ** -k["b_D"] + k["c"]
        return law

    low, high = float(losses.min()), float(np.ptp(losses))
    tolerances: dict[str, float] = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-12)
    fits = []
    for b, share in product((0.05, 0.3), (0.1, 0.5)):
        first = (high, 0.5, share * low, b, high, 0.5, (1 - share) * low)
        start = dict(zip(NAMES, first, strict=True))
        fits.append(
            least_squares(
                lambda values: losses_of(values) - losses,
                [start[name] for name in names],
                bounds=(0, math.inf),
                x_scale="jac",
                max_nfev=2000,
                **tolerances,
            )
        )
    found = min(fits, key=lambda result: float(result.cost))
    free = len(points) - len(names)
    variance = 2 * found.cost / free
    _, singular, rotation = np.linalg.svd(found.jac, full_matrices=False)
    with np.errstate(divide="ignore", invalid="ignore"):  # ∞·0 is not taken
        inverse = np.where(singular > 1e-7 * singular[0], singular**-2.0, math.inf)
        terms = np.where(np.abs(rotation) > 1e-6, inverse[:, None] * rotation**2, 0.0)
    spread = terms.sum(axis=0)
    half = t.ppf(0.975, free) * np.sqrt(variance * spread)
    pairs = zip(found.x.tolist(), half.tolist(), strict=True)
    fitted = losses_of(found.x).tolist()
    return Law(dict(zip(names, pairs, strict=True)), fitted)


def points(results: TableResults, table: Table, left_out: Sequence[str] = ()) -> list[Point]:
    """Return the finished rows except ``left_out``; none without a finished baseline."""
    values = results.values(next(iter(table.metrics)))
    of_row = {cell.row: cell for cell in results.cells if cell.nonzero and cell.row in values}
    dense = of_row.get(table.baseline or "")
    if dense is None:
        return []
    return [
        Point(
            row,
            1 - own.nonzero / own.entries,
            own.nonzero / dense.nonzero,
            own.tokens / dense.tokens,
            float(np.mean(list(values[row].values()))),
        )
        for row in table.rows
        if (own := of_row.get(row)) is not None and row not in left_out
    ]


def section(results: TableResults, table: Table, left_out: Sequence[str] = ()) -> list[str]:
    """Return Markdown lines: coefficients, then measured and fitted values of the rows."""
    known = points(results, table, left_out)
    law = fit(known)
    if isinstance(law, str):
        return [law]
    digits = next(iter(table.metrics.values())).digits
    rows = [
        (name, *((f"{value:.2g}", f"± {half:.1g}") if half < value else ("not determined", "–")))
        for name, (value, half) in law.coefficients.items()
    ]
    measured = [
        (
            point.row,
            f"{point.sparsity:.3f}",
            f"{point.parameters:.3f}",
            f"{point.tokens:.3f}",
            f"{point.loss:.{digits}f}",
            f"{fitted:.{digits}f}",
            f"{100 * (point.loss / fitted - 1):+.2f}",
        )
        for point, fitted in zip(known, law.fitted, strict=True)
    ]
    header = ("row", "S", "N", "D", "measured", "fitted", "residual, %")
    return [
        EQUATION.format(dense=table.baseline, points=len(known), free=len(law.coefficients)),
        "",
        *markdown_table(("coefficient", "value", "95 % interval"), rows),
        "",
        *markdown_table(header, measured),
    ]


if __name__ == "__main__":
    record = read_record(Path(sys.argv[1]))
    print(*section(record, load_table(record.name), sys.argv[2:]), sep="\n")
