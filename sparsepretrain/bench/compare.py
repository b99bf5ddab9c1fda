"""Two results files of one suite, case by case (``bench compare OLD NEW``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from sparsepretrain.bench.kernels import full_name
from sparsepretrain.errors import ConfigError
from sparsepretrain.tracking.console import Console

SIDES = {"at_most": False, "at_least": True}
"""Limit of a case -> whether more is better."""


class Reading(NamedTuple):
    """One case of one file."""

    value: float | None
    """None: nothing was measured."""
    unit: str = ""
    low: float | None = None  # of the rounds, where the file has them
    high: float | None = None
    more_is_better: bool | None = None
    """None: it is not known."""
    status: str = "ok"

    def __str__(self) -> str:
        return self.status if self.value is None else f"{self.value:.4g} {self.unit}"


class Change(NamedTuple):
    """A case of the older file."""

    name: str
    old: Reading
    new: Reading
    threshold: float

    @property
    def ratio(self) -> float | None:
        """New over old; None: there is none."""
        comparable = self.old.value and self.new.value is not None
        return self.new.value / self.old.value if comparable else None  # type: ignore[operator]

    @property
    def interval(self) -> tuple[float, float] | None:
        """What the ratio may be by the rounds of both."""
        old, new = self.old, self.new
        if not (old.low and old.high and new.low is not None and new.high is not None):
            return None
        return new.low / old.high, new.high / old.low

    @property
    def verdict(self) -> str:
        """``regressed``, ``lost``, ``improved``, ``same``; or why it is not judged."""
        if self.old.status == "ok" and self.new.status.startswith(("wrong", "failed")):
            return "regressed"
        if self.old.value is not None and self.new.value is None:
            return "lost"
        if self.ratio is None:
            return "not measured in both"
        if self.old.more_is_better is None:
            return "not judged"
        low, high = self.interval or (self.ratio, self.ratio)
        slack, ratio = 1 + self.threshold, self.ratio
        if self.old.more_is_better:
            ratio, low, high = 1 / max(ratio, 1e-9), 1 / max(high, 1e-9), 1 / max(low, 1e-9)
        if ratio > slack and low > 1:
            return "regressed"
        return "improved" if ratio < 1 / slack and high < 1 else "same"

    @property
    def cells(self) -> list[str]:
        """As a row of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        interval = "" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)
        return [self.name, str(self.old), str(self.new), ratio, interval, self.verdict]


def compare(old: Path, new: Path, threshold: float, console: Console | None = None) -> list[Change]:
    """Print what changed from ``old`` to ``new``, and return it.

    A case regressed if it is worse by more than ``threshold`` (0.1: by 10 %) and the interval of
    its rounds, where the files have them, lies on the worse side as a whole; or if it was measured
    and now is wrong or fails. It is lost if it now is skipped or gone. Shares in per cent, and
    cases of which neither more nor less is said to be better, are not judged.

    Args:
        old: JSON of :func:`sparsepretrain.bench.run`.
        new: the same suite, later, on the same hardware.
        threshold: ≥ 0.
        console: prints; None: to the standard output.

    Raises:
        ConfigError: no such files, or of two suites, kinds or machines.
    """
    if not threshold >= 0:
        raise ConfigError(f"threshold must be ≥ 0, got {threshold:g}")
    console = console or Console()
    files = [_load(path) for path in (old, new)]
    for what, values in {
        "suite": [file["suite"] for file in files],
        "quick": [file.get("quick", False) for file in files],
        "hardware": [file["environment"]["hardware"] for file in files],
    }.items():
        if values[0] != values[1]:
            told = [json.dumps(value, ensure_ascii=False) for value in values]
            raise ConfigError(f"cannot compare: {what} of {old} is {told[0]}, of {new} {told[1]}")
    before, after = (_readings(*pair) for pair in zip((old, new), files, strict=True))
    gone = Reading(None, status="gone")
    changes = [Change(k, before[k], after.get(k, gone), threshold) for k in before]
    head = ["case", "old", "new", "new/old", "by rounds", ""]
    title = f"bench {files[0]['suite']}: {old} → {new}"
    console.table(title, [change.cells for change in changes], head, lines=False)
    if only := after.keys() - before:
        console.info(f"only in {new}: {'; '.join(sorted(only))}")
    worse = [change.name for change in changes if change.verdict == "regressed"]
    said = f"{len(worse)} of {len(changes)} cases regressed by more than {threshold:.0%}"
    lost = [change.name for change in changes if change.verdict == "lost"]
    console.info(f"\n{said}{': ' * bool(worse)}{'; '.join(worse)}")
    if lost:
        console.info(f"{len(lost)} cases are measured no more: {'; '.join(lost)}")
    return changes


def _load(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no JSON") from error
    if not isinstance(found, dict) or not {"suite", "environment", "cases"} <= found.keys():
        raise ConfigError(f"{path} is no results file of `sparsepretrain bench`")
    return found


def _readings(path: Path, file: dict[str, Any]) -> dict[str, Reading]:
    try:
        return dict(map(describe, file["cases"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a damaged case ({error!r})") from error


def describe(row: dict[str, Any]) -> tuple[str, Reading]:
    """Name and reading of a case as it stands in a file."""
    if "us" in row:  # kernels.Timed
        name, us, status = (
            full_name(row["case"], row["shape"], row["impl"]),
            row["us"],
            row["status"],
        )
        if us is None:
            return name, Reading(None, status=status)
        return name, Reading(us["p50"], "µs", us["p10"], us["p90"], False, status)
    value, detail = row["value"], row["detail"]
    found = detail.get("quartiles") or detail.get("seconds") or ()
    covered = bool(found) and min(found) <= value <= max(found)
    low, high = (min(found), max(found)) if covered else (None, None)
    side = next((more for key, more in SIDES.items() if row[key] is not None), None)
    side = None if row["unit"] == "%" else side
    return row["name"], Reading(value, row["unit"], low, high, side)
