"""Verdicts on the claims of a table.

Every test is a t-test of paired differences: runs of one seed share data and, with one model, the
initial weights. A verdict needs p < 0.01 (two-sided: both directions have the same bar) and five
seeds. Levels are Bonferroni-corrected where any test suffices, and uncorrected where all must hold
(intersection-union, Berger 1982).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Literal

from scipy.stats import binomtest

from sparsepretrain.errors import ConfigError
from sparsepretrain.reports.differences import ALPHA, MOST_SEEDS, Difference
from sparsepretrain.studies.tables import Claim, Scale, Table, Term, cell_name, table_cells

Verdict = Literal["held", "contradicted", "not decided", "not testable at this scale"]
Values = dict[str, dict[int, float]]
"""Cell (``row`` or ``row @ column``) -> seed -> number of a finished run."""


def difference(values: Values, row: str, column: str, baseline: str | None) -> Difference:
    """Return a cell minus the baseline in its column, over common seeds; None: the cell itself."""
    at = cell_name(row, column)
    if baseline is None:
        return Difference(at, [*values.get(at, {}).values()])
    base = cell_name(baseline, column)
    return _Series(at, "", values.get(at, {})) - _Series(base, "", values.get(base, {}))


@dataclass(frozen=True, slots=True)
class Ruling:
    """Verdict on a claim, with its reasons."""

    verdict: Verdict
    why: str
    """Reason, in one line."""
    differences: list[Difference] = field(default_factory=list)
    """Differences behind the verdict."""
    p: float = 1.0
    """Level at which a decided claim would still be decided, corrected for its own tests."""


def holm(rulings: Sequence[Ruling]) -> list[float]:
    """Return Holm-adjusted p of each ruling (Holm 1979); claims that cannot be tested have NaN."""
    tested = [r for r in rulings if r.verdict != "not testable at this scale"]
    adjusted = {}
    highest = 0.0
    for rank, ruling in enumerate(sorted(tested, key=lambda r: r.p)):
        highest = max(highest, min(1.0, (len(tested) - rank) * ruling.p))
        adjusted[id(ruling)] = highest
    return [adjusted.get(id(ruling), math.nan) for ruling in rulings]


def judge(
    claim: Claim, table: Table, scale: Scale, values: Values, gaps: Mapping[str, str] | None = None
) -> Ruling:
    """Return the verdict on one claim.

    In a table with columns, a term that names a row means every column: the claim must hold in all.
    ``gaps``: cell -> missing seeds and the reason.
    """
    if scale in claim.untestable:
        return Ruling("not testable at this scale", claim.untestable[scale])
    names = claim.names
    everywhere = any(name in table.rows for name in names) and bool(table.columns)
    along = claim.along or (list(table.columns) if everywhere else [""])
    unrun = {cell_name(row, column): why for row, column, why in table_cells(table, scale) if why}
    groups: list[list[_Series]] = []
    reasons: dict[str, None] = {}
    for column in along:
        at = {name: cell_name(name, column) if name in table.rows else name for name in names}
        if left_out := [unrun[cell] for cell in at.values() if cell in unrun]:
            reasons |= dict.fromkeys(left_out)
            continue
        groups.append([_series(term, at, column, values) for term in claim.of])
    if not groups or (reasons and claim.kind == "crossing"):
        return Ruling("not testable at this scale", "; ".join(reasons))
    better = table.metrics[claim.metric or next(iter(table.metrics))].better
    ruling = _JUDGES[claim.kind](claim, groups, better)
    cells = {cell_name(n, c) if n in table.rows else n for n in names for c in along}
    missing = [f"{cell}: {why}" for cell, why in (gaps or {}).items() if cell in cells and why]
    notes = [ruling.why, *missing, *(f"not run: {why}" for why in reasons)]
    return replace(ruling, why="; ".join(filter(None, notes)))


@dataclass(frozen=True, slots=True)
class _Series:
    """Term in one column."""

    label: str
    column: str
    values: dict[int, float]

    def __sub__(self, other: _Series) -> Difference:
        seeds = sorted(self.values.keys() & other.values.keys())
        where = f" @ {self.column}" if self.column else ""
        label = f"{self.label} − {other.label}{where}"
        return Difference(label, [self.values[s] - other.values[s] for s in seeds])


def _series(term: Term, at: Mapping[str, str], column: str, values: Values) -> _Series:
    names = [term] if isinstance(term, str) else term
    found = [{s: v for s, v in values.get(at[n], {}).items() if math.isfinite(v)} for n in names]
    if len(names) == 1:
        return _Series(names[0], column, found[0])
    first, second = found
    both = {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}
    return _Series(f"({names[0]} − {names[1]})", column, both)


def _below(claim: Claim, groups: list[list[_Series]], better: str | None) -> Ruling:
    """Judge less, order and best_of: every difference is below zero."""
    differences = []
    for terms in groups:
        pairs: Iterable[tuple[_Series, _Series]] = combinations(terms, 2)
        if claim.kind == "best_of":
            pairs = [(terms[0], other) for other in terms[1:]]
            pairs = pairs if better == "lower" else [(b, a) for a, b in pairs]
        differences += [a - b for a, b in pairs]
    held = [d.below() for d in differences]
    against = [d.above() for d in differences]
    verdict, p, decisive = _all_hold(differences, held, against)
    why = _undecided(decisive) if verdict == "not decided" else "; ".join(map(str, decisive))
    return Ruling(verdict, why, differences, p)


def _equal(claim: Claim, groups: list[list[_Series]], better: str | None) -> Ruling:
    """Judge equal: every difference is within the margin."""
    margin = claim.margin
    assert margin is not None
    differences = [first - second for first, second in groups]
    held = [d.outside(margin) for d in differences]
    against = [min(d.above(margin), d.below(-margin)) for d in differences]
    verdict, p, decisive = _all_hold(differences, held, against)
    if verdict == "not decided":
        return Ruling(verdict, _undecided(decisive, margin), differences)
    where = "within" if verdict == "held" else "beyond"
    why = f"{'; '.join(map(str, decisive))}; {where} ± {margin:g}: p = {p:.1g}"
    return Ruling(verdict, why, differences, p)


def _not_worse(claim: Claim, groups: list[list[_Series]], better: str | None) -> Ruling:
    """Judge not_worse: every difference is above the margin in the good direction, one-sided."""
    margin = claim.margin
    assert margin is not None
    pairs = groups if better == "lower" else [[second, first] for first, second in groups]
    differences = [first - second for first, second in pairs]
    held = [d.below(margin) / 2 for d in differences]  # one-sided
    against = [d.above(margin) / 2 for d in differences]
    verdict, p, decisive = _all_hold(differences, held, against)
    if verdict == "not decided":
        shifted = [Difference(d.label, [v - margin for v in d.values]) for d in decisive]
        return Ruling(verdict, f"minus the margin: {_undecided(shifted)}", differences)
    why = "; ".join(map(str, decisive))
    why += f"; worse by {margin:g}: p = {p:.1g}" if verdict == "held" else f", margin {margin:g}"
    return Ruling(verdict, why, differences, p)


def _count(claim: Claim, groups: list[list[_Series]], better: str | None) -> Ruling:
    """Judge count: in more than half of all runs the first is below the second (binomial test)."""
    differences = [first - second for first, second in groups]
    texts = []
    held = []
    against = []
    for d in differences:
        below = sum(value < 0 for value in d.values)
        test = binomtest(below, d.n) if d.n else None
        low, high = test.proportion_ci() if test is not None else (0.0, 1.0)
        p = float(test.pvalue) if test is not None else 1.0
        share = f"share [{low:.2f}, {high:.2f}], p = {p:.1g}"
        texts.append(f"{d.label}: below 0 in {below} of {d.n} runs, {share}")
        held.append(p if 2 * below > d.n else 1.0)
        against.append(p if 2 * below <= d.n else 1.0)
    verdict, p, _ = _all_hold(differences, held, against)
    return Ruling(verdict, "; ".join(texts), differences, p)


def _all_hold(
    differences: list[Difference], held: Sequence[float], against: Sequence[float]
) -> tuple[Verdict, float, list[Difference]]:
    """Return the verdict on a claim of which every difference must hold, and its p.

    ``held``, ``against``: p of each difference for the claim and against it. The last value is the
    weakest difference of a claim that held, those against it, or those that are not decided.
    """
    weakest = max(held)
    if weakest < ALPHA:
        return "held", weakest, [differences[held.index(weakest)]]
    # a single difference suffices to contradict
    level = ALPHA / len(against)
    if min(against) < level:
        beyond = [d for d, p in zip(differences, against, strict=True) if p < level]
        return "contradicted", len(against) * min(against), beyond
    return "not decided", 1.0, [d for d, p in zip(differences, held, strict=True) if p >= ALPHA]


def _crossing(claim: Claim, groups: list[list[_Series]], better: str | None) -> Ruling:
    """Judge crossing: significantly below zero in one column and above in another."""
    differences = [first - second for first, second in groups]
    level = ALPHA / len(differences)
    decided = [(d, sign) for d in differences if (sign := d.sign(level))]
    for (before, sign), (after, other) in pairwise(decided):
        if sign != other:
            text = f"the sign changes between {before} and {after}"
            p = len(differences) * max(before.p(), after.p())
            return Ruling("held", text, differences, p)
    if abs(sum(d.sign() for d in differences)) == len(differences):
        text = f"the same sign at every column; {_weakest(differences)}"
        return Ruling("contradicted", text, differences, max(d.p() for d in differences))
    open_ = [d for d in differences if not d.sign(level)]
    return Ruling("not decided", _undecided(open_, level=level), differences)


def _interior(claim: Claim, groups: list[list[_Series]], better: str | None) -> Ruling:
    """Judge interior: a point inside the grid is significantly better than both ends."""
    if len(groups) > 1:
        raise ConfigError(f"{claim.text!r}: an optimum inside a grid needs terms `row @ column`")
    grid = groups[0]
    first, *inside, last = grid
    sign = 1 if better == "higher" else -1
    to_ends = [[point - end for end in (first, last)] for point in inside]
    level = ALPHA / len(inside)  # any inner point suffices
    for both in to_ends:
        if all(d.sign(level) == sign for d in both):
            p = len(inside) * max(d.p() for d in both)
            return Ruling("held", "; ".join(map(str, both)), both, p)
    for end in (0, 1):
        differences = [both[end] for both in to_ends]
        if all(d.sign() == -sign for d in differences):
            text = f"the optimum is at an end: {_weakest(differences)}"
            return Ruling("contradicted", text, differences, max(d.p() for d in differences))
    means = [Difference("", [*point.values.values()]).mean * sign for point in inside]
    best = max(range(len(inside)), key=lambda i: (not math.isnan(means[i]), means[i]))
    return Ruling("not decided", _undecided(to_ends[best], level=level), to_ends[best])


_JUDGES = {
    "less": _below,
    "order": _below,
    "best_of": _below,
    "equal": _equal,
    "not_worse": _not_worse,
    "count": _count,
    "crossing": _crossing,
    "interior": _interior,
}


def _weakest(differences: Sequence[Difference]) -> str:
    return str(max(differences, key=lambda d: d.p()))


def _undecided(
    differences: Sequence[Difference], margin: float | None = None, *, level: float = ALPHA
) -> str:
    """Return the intervals and the number of seeds that would decide."""
    reasons = []
    for d in differences:
        if d.n == 0:
            reasons.append(f"{d.label}: no seed has both")
        elif d.flat or d.n == 1:
            reasons.append(f"{d}: no spread over seeds; are these the same runs?")
        else:
            needed = d.seeds_to_decide(margin, level)
            text = f"more than {MOST_SEEDS}" if needed is None else f"about {needed}"
            reasons.append(f"{d}: {text} seeds would decide")
    return "; ".join(reasons)
