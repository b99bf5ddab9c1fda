"""Fit the scaling law of sparse networks (arXiv:2309.08520) to rows of a table.

    L = (a_S·(1 - S)^b_S + c_S)·N^(-b_N) + a_D·D^(-b_D) + c

S is the fraction of zeros, N the number of nonzero parameters, both without embeddings, and D the
number of tokens. N and D are relative to the baseline, which changes the units of a_S, c_S and a_D
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from sparsepretrain.reports.page import markdown_table
from sparsepretrain.studies.results import TableResults
from sparsepretrain.studies.tables import Table

NAMES = ("a_S", "b_S", "c_S", "b_N", "a_D", "b_D", "c")
FEWEST = 6
"""Fewest rows of a fit."""

EQUATION = (
    "L = (a_S·(1 - S)^b_S + c_S)·N^(-b_N) + a_D·D^(-b_D) + c (arXiv:2309.08520), fitted by least "
    "squares to the means of {rows} rows; coefficients that are not listed are 0. S: zeros among "
    "the parameters without embeddings; N: nonzero ones; D: tokens. N and D are relative to "
    "{baseline}, so the units of a_S, c_S and a_D differ from those of the paper."
)


class Point(NamedTuple):
    """Mean loss of a row."""

    row: str
    sparsity: float
    parameters: float  # relative to the baseline
    tokens: float  # relative to the baseline
    loss: float


class Law(NamedTuple):
    """Fitted law."""

    coefficients: dict[str, tuple[float, float]]  # value and half of its 95 % interval
    fitted: list[float]  # loss of each point


def fit(points: Sequence[Point]) -> Law | str:
    """Fit the law by least squares, all coefficients ≥ 0; or return the reason why not.

    Coefficients that another one can replace are left out: c_S with two sparsities, b_S with one,
    and the term of D with equal numbers of tokens, where c contains it. The points determine the
    law if no interval of the other coefficients contains 0.
    """
    levels = {
        name: len({round(getattr(point, name), 6) for point in points})
        for name in ("sparsity", "parameters", "tokens")
    }
    left_out = {"c_S"} if levels["sparsity"] < 3 else set()
    left_out |= {"b_S"} if levels["sparsity"] < 2 else set()
    left_out |= {"a_D", "b_D"} if levels["tokens"] == 1 else set()
    names = [name for name in NAMES if name not in left_out]
    needed = max(FEWEST, len(names) + 1)  # one more than coefficients, or there are no intervals
    if len(points) < needed or levels["parameters"] < 3:
        return (
            f"Not fitted: {len(points)} of at least {needed} finished rows, with "
            f"{levels['parameters']} of at least 3 numbers of nonzero parameters."
        )
    if levels["tokens"] == 2:
        return (
            "Not fitted: rows with 2 numbers of tokens do not determine a_D and b_D. Give all rows "
            "equal numbers, or at least 3 different ones."
        )
    law = _least_squares(points, names)
    # `not <`: in an exact fit the half of an infinite interval is 0·∞ = NaN
    undetermined = [name for name, (value, half) in law.coefficients.items() if not half < value]
    if undetermined:
        return (
            f"Not fitted: {len(points)} rows do not determine {', '.join(undetermined)} (95 % "
            "intervals contain 0). Add rows with other sparsities, sizes and numbers of tokens."
        )
    return law


def _least_squares(points: Sequence[Point], names: Sequence[str]) -> Law:
    """Fit the coefficients ``names``; the others are 0."""
    s, n, d, losses = np.array([point[1:] for point in points]).T

    def losses_of(values: np.ndarray) -> np.ndarray:
        k = dict.fromkeys(NAMES, 0.0) | dict(zip(names, values, strict=True))
        factor = k["a_S"] * (1 - s) ** k["b_S"] + k["c_S"]
        law: np.ndarray = factor * n ** -k["b_N"] + k["a_D"] * d ** -k["b_D"] + k["c"]
        return law

    # The sum of squares has several minima, because c, c_S and small exponents can replace each
    # other: start from small and large exponents and shares of c.
    low = float(losses.min())
    spread = float(np.ptp(losses))
    fits = []
    for exponent, share in product((0.05, 0.3), (0.1, 0.5)):
        values = (spread, 0.5, share * low, exponent, spread, 0.5, (1 - share) * low)
        start = dict(zip(NAMES, values, strict=True))
        fits.append(
            least_squares(
                lambda values: losses_of(values) - losses,
                [start[name] for name in names],
                bounds=(0, math.inf),
                x_scale="jac",
                max_nfev=2000,
                xtol=1e-12,
                ftol=1e-12,
                gtol=1e-12,
            )
        )
    best = min(fits, key=lambda result: float(result.cost))
    free = len(points) - len(names)
    variance = 2 * best.cost / free
    # diagonal of (JᵀJ)⁻¹; a direction that J does not see makes all of its coefficients infinite
    _, singular, rotation = np.linalg.svd(best.jac, full_matrices=False)
    with np.errstate(divide="ignore", invalid="ignore"):  # np.where discards ∞·0
        inverse = np.where(singular > 1e-7 * singular[0], singular**-2.0, math.inf)
        terms = np.where(np.abs(rotation) > 1e-6, inverse[:, None] * rotation**2, 0.0)
    half = stats.t.ppf(0.975, free) * np.sqrt(variance * terms.sum(axis=0))
    pairs = zip(best.x.tolist(), half.tolist(), strict=True)
    return Law(dict(zip(names, pairs, strict=True)), losses_of(best.x).tolist())


def points_of(results: TableResults, table: Table) -> list[Point]:
    """Return the finished rows of ``table.scaling``; none without a finished baseline."""
    values = results.values(next(iter(table.metrics)))
    cells = {cell.row: cell for cell in results.cells if cell.nonzero and cell.row in values}
    baseline = cells.get(table.baseline or "")
    if baseline is None:
        return []
    return [
        Point(
            row=row,
            sparsity=1 - cells[row].nonzero / cells[row].entries,
            parameters=cells[row].nonzero / baseline.nonzero,
            tokens=cells[row].tokens / baseline.tokens,
            loss=float(np.mean(list(values[row].values()))),
        )
        for row in table.scaling
        if row in cells
    ]


def section(results: TableResults, table: Table) -> list[str]:
    """Return Markdown lines: coefficients and fitted losses, or the reason why there are none."""
    points = points_of(results, table)
    if not points:
        return [f"Not fitted: no finished run of {table.baseline}, which N and D are relative to."]
    law = fit(points)
    if isinstance(law, str):
        return [law]
    digits = next(iter(table.metrics.values())).digits
    coefficients = [
        (name, f"{value:.2g}", f"± {half:.1g}") for name, (value, half) in law.coefficients.items()
    ]
    rows = [
        (
            point.row,
            f"{point.sparsity:.3f}",
            f"{point.parameters:.3f}",
            f"{point.tokens:.3f}",
            f"{point.loss:.{digits}f}",
            f"{fitted:.{digits}f}",
            f"{100 * (point.loss / fitted - 1):+.2f}",
        )
        for point, fitted in zip(points, law.fitted, strict=True)
    ]
    header = ("row", "S", "N", "D", "measured", "fitted", "residual, %")
    return [
        EQUATION.format(rows=len(points), baseline=table.baseline),
        "",
        *markdown_table(("coefficient", "value", "95 % interval"), coefficients),
        "",
        *markdown_table(header, rows),
    ]
