"""Fit scaling laws of sparse networks to rows of a table.

Of arXiv:2309.08520, with the fraction of zeros S and the number of nonzero parameters N:

    L = (a_S·(1 - S)^b_S + c_S)·N^(-b_N) + a_D·D^(-b_D) + c

Of arXiv:2501.12486, with the mean N̄ of the number of nonzero parameters over the run:

    L = A·N̄^(-α) + B·D^(-β) + E

S, N and N̄ are without embeddings; D is the number of tokens. N, N̄ and D are relative to the
baseline (in its first column), which changes the units of a_S, c_S, a_D, A and B only. The second
law is the first one with S = 0 and N̄ for N.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import least_squares

from sparsepretrain.reports.page import markdown_table
from sparsepretrain.studies.results import CellResult, TableResults
from sparsepretrain.studies.tables import Table, cell_name

NAMES = ("a_S", "b_S", "c_S", "b_N", "a_D", "b_D", "c")
FEWEST = 6
"""Fewest rows of a fit."""

EQUATION = (
    "L = (a_S·(1 - S)^b_S + c_S)·N^(-b_N) + a_D·D^(-b_D) + c (arXiv:2309.08520), fitted by least "
    "squares to the means of {points}; coefficients that are not listed are 0. S: zeros among "
    "the parameters without embeddings; N: nonzero ones; D: tokens. N and D are relative to "
    "{baseline}, so the units of a_S, c_S and a_D differ from those of the paper."
)
AVERAGE_NAMES = {"a_S": "A", "b_N": "α", "a_D": "B", "b_D": "β", "c": "E"}
AVERAGE_EQUATION = (
    "L = A·N̄^(-α) + B·D^(-β) + E (arXiv:2501.12486), fitted by least squares to the means of "
    "{points}. N̄: nonzero parameters without embeddings, mean over the steps of the run. N̄ and D "
    "are relative to {baseline}."
)


class Point(NamedTuple):
    """Mean loss of a row, or of a cell in a table with columns."""

    row: str
    sparsity: float
    parameters: float  # relative to the baseline
    tokens: float  # relative to the baseline
    loss: float


class Law(NamedTuple):
    """Fitted law."""

    coefficients: dict[str, tuple[float, float]]  # value and half of its 95 % interval
    fitted: list[float]  # loss of each point


def fit(points: Sequence[Point], called: Mapping[str, str] | None = None) -> Law | str:
    """Fit the law by least squares, all coefficients ≥ 0; or return the reason why not.

    ``called``: other names of coefficients, for the reason.

    Coefficients that another one can replace are left out: c_S with two sparsities, b_S with one,
    and the term of D with equal numbers of tokens, where c contains it. The points determine the
    law if no interval of the other coefficients contains 0.
    """
    shown = dict(zip(NAMES, NAMES, strict=True)) | {**(called or {})}
    levels = {
        # biases make S differ a little between models of different sizes
        name: len({round(getattr(point, name), digits) for point in points})
        for name, digits in (("sparsity", 2), ("parameters", 6), ("tokens", 6))
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
            f"Not fitted: rows with 2 numbers of tokens do not determine {shown['a_D']} and "
            f"{shown['b_D']}. Give all rows equal numbers, or at least 3 different ones."
        )
    law = _least_squares(points, names)
    # `not <`: in an exact fit the half of an infinite interval is 0·∞ = NaN
    undetermined = [
        shown[name] for name, (value, half) in law.coefficients.items() if not half < value
    ]
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


def _reference(results: TableResults, table: Table) -> CellResult | None:
    """Return the baseline in the first column that has it finished; N and D are relative to it."""
    values = results.values(next(iter(table.metrics)))
    cells = {cell.name: cell for cell in results.cells if cell.nonzero and cell.name in values}
    bases = [cell_name(table.baseline or "", column) for column in [*table.columns] or [""]]
    return next((cells[at] for at in bases if at in cells), None)


def points_of(
    results: TableResults, table: Table, rows: Collection[str], *, average: bool = False
) -> list[Point]:
    """Return the finished cells of ``rows``; none without a finished baseline.

    Args:
        results: of the table.
        table: the first metric is the loss.
        rows: rows of the table.
        average: N is the mean over the run of the nonzero parameters, and S is 0.
    """
    values = results.values(next(iter(table.metrics)))
    cells = {cell.name: cell for cell in results.cells if cell.nonzero and cell.name in values}
    columns = [*table.columns] or [""]
    baseline = _reference(results, table)
    if baseline is None:
        return []
    points = []
    for at in (cell_name(row, column) for row in rows for column in columns):
        if (cell := cells.get(at)) is None or (average and not cell.average):
            continue
        points.append(
            Point(
                row=cell.row,
                sparsity=0.0 if average else 1 - cell.nonzero / cell.entries,
                parameters=(cell.average if average else cell.nonzero) / baseline.nonzero,
                tokens=cell.tokens / baseline.tokens,
                loss=float(np.mean(list(values[at].values()))),
            )
        )
    return points


def section(results: TableResults, table: Table) -> list[str]:
    """Return Markdown lines: coefficients and fitted losses, or the reasons why there are none."""
    lines = _law(results, table, points_of(results, table, table.scaling), EQUATION, {})
    others = points_of(results, table, table.rows, average=True)
    if others:  # records of earlier runs do not have the mean number
        lines += ["", *_law(results, table, others, AVERAGE_EQUATION, AVERAGE_NAMES)]
    return lines


def _law(
    results: TableResults,
    table: Table,
    points: Sequence[Point],
    equation: str,
    names: Mapping[str, str],
) -> list[str]:
    reference = _reference(results, table)
    if not points or reference is None:
        return [f"Not fitted: no finished run of {table.baseline}, which N and D are relative to."]
    law = fit(points, names)
    if isinstance(law, str):
        return [law]
    coefficients = [
        (names.get(name, name), f"{value:.2g}", f"± {half:.1g}")
        for name, (value, half) in law.coefficients.items()
    ]
    kind = "cells" if table.columns else "rows"
    return [
        equation.format(points=f"{len(points)} {kind}", baseline=reference.name),
        "",
        *markdown_table(("coefficient", "value", "95 % interval"), coefficients),
        "",
        *(_by_row(points, law) if table.columns else _by_point(points, law, table)),
    ]


def _by_point(points: Sequence[Point], law: Law, table: Table) -> list[str]:
    digits = next(iter(table.metrics.values())).digits
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
    return markdown_table(("row", "S", "N", "D", "measured", "fitted", "residual, %"), rows)


def _by_row(points: Sequence[Point], law: Law) -> list[str]:
    residuals: dict[str, list[float]] = {}
    for point, fitted in zip(points, law.fitted, strict=True):
        residuals.setdefault(point.row, []).append(100 * (point.loss / fitted - 1))
    rows = [
        (row, str(len(own)), f"{np.mean(own):+.2f}", f"{max(map(abs, own)):.2f}")
        for row, own in residuals.items()
    ]
    return markdown_table(("row", "cells", "mean residual, %", "largest, %"), rows)
