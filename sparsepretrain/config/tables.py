"""Tables of papers as data: ``configs/table/<name>.yaml`` says which runs, what was published, and
what is claimed. Nothing here runs or reads a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from sparsepretrain.config.places import TABLES, check_yaml, search_path
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.limits import Problems
from sparsepretrain.registry import suggestion

Scale = Literal["paper", "nano"]
Term = str | list[str]
"""``row``, ``row @ column``, or two of them: the first minus the second."""


@dataclass(slots=True, kw_only=True)
class Metric:
    """A number of every run: of the lines of its record, or of a stage after training."""

    label: str
    key: str
    """Of a line of the record, as ``loss``, ``bleu``, ``flip_rate``."""
    split: str | None = "validation"
    """Lines of this split; null: those of training."""
    stage: str | None = None
    """The stage whose number it is, or a glob: the mean over all that match; null: training."""
    over: tuple[float, float] | None = None
    """Mean of the lines between these fractions of the run; null: the last line."""
    relative_to: tuple[float, float] | None = None
    """Divide by the mean over this part of the run."""
    better: Literal["lower", "higher"] | None = None
    variant: str = ""
    """What makes numbers comparable: tokenisation, weights, metric variant."""
    sequence_length: int | None = None
    factor: float = 1.0
    """What the number is multiplied by, as 100 where a share is printed in per cent."""
    digits: Annotated[int, "[0, 10]"] = 4
    """After the point."""

    def problems(self) -> Problems:
        for key, part in (("over", self.over), ("relative_to", self.relative_to)):
            if part is not None and not 0 <= part[0] < part[1] <= 1:
                yield key, f"must be two fractions of the run, ascending, got {list(part)}"


@dataclass(slots=True, kw_only=True)
class Stage:
    """What happens to every run after training: it is fine-tuned, or evaluated.

    Where its numbers lie follows from the run alone. A fine-tuning is a run with the cell's seed in
    ``<runs_dir>/<table>/<row>[--<column>]--<stage>/``, which ``RunDirectory.finetuned(stage)`` of
    the cell's run finds; an evaluation is a line of its ``eval.jsonl``, see
    ``RunDirectory.evaluation``, and of the harness a file, see ``RunDirectory.harness_result``. A
    stage that failed stands under its name in ``RunDirectory.failures()`` of the cell's run.
    """

    name: str
    finetune: str | None = None
    """``task=`` of ``sparsepretrain finetune RUN``."""
    evaluate: Literal["validation", "test"] | None = None
    """``split=`` of ``sparsepretrain eval RUN``."""
    lm_eval: str | None = None
    """Tasks of lm-evaluation-harness, separated by commas: the run is exported, then measured by
    the harness's own command."""
    overrides: list[str] = field(default_factory=list)
    """Further words of that command."""

    def problems(self) -> Problems:
        if [self.finetune, self.evaluate, self.lm_eval].count(None) != 2:
            yield "name", f"{self.name!r} must have one of finetune, evaluate and lm_eval"
        if self.name == "train" or self.name != slug(self.name):
            yield "name", f"must be letters, digits, _ and -, and not 'train', got {self.name!r}"


@dataclass(slots=True, kw_only=True)
class Size:
    """How large the runs of a table are."""

    overrides: list[str] = field(default_factory=list)
    """Of every run, before those of its row and column."""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Row -> further overrides, as a decay factor that goes with the size."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    """Glob of ``row`` or ``row @ column`` -> why these are not run at this scale."""
    stages: list[Stage] = field(default_factory=list)
    seeds: Annotated[int, "> 0"] = 5
    minutes: Annotated[float | None, "> 0"] = None
    """CPU minutes of all runs on one core, measured; null: not known."""


@dataclass(slots=True, kw_only=True)
class Published:
    """Where the printed numbers of one metric stand in ``_published.yaml``."""

    paper: str
    table: str
    metric: str
    """Of this table."""
    match: dict[str, Any] = field(default_factory=dict)
    """Keys and values that all its rows there share."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row of this table -> keys and values of the row there."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    margin: Annotated[float | None, "> 0"] = None
    """Smaller differences from these numbers mean nothing; null: not known."""
    note: str = ""
    """Printed beside the numbers."""


@dataclass(slots=True, kw_only=True)
class Claim:
    """A sentence that seeds can decide, see ``reports.claims``."""

    text: str
    kind: Literal["less", "order", "best_of", "equal", "crossing", "interior"]
    of: list[Term]
    """less: the first is below the second; order: ascending; best_of: the first is best; equal: two
    of them; crossing: the sign of (first minus second) changes along ``along``; interior: along a
    grid, the optimum is not at an end."""
    metric: str | None = None
    """null: the first one of the table."""
    margin: Annotated[float | None, "> 0"] = None
    """equal: the largest difference that still counts as none."""
    along: list[str] = field(default_factory=list)
    """crossing: columns, in order."""
    source: str = ""
    """Who claims it: paper and place; empty: nobody but us."""
    untestable: dict[str, str] = field(default_factory=dict)
    """Scale -> why runs of it cannot tell."""

    def problems(self) -> Problems:
        least = {"crossing": 2, "less": 2, "equal": 2, "interior": 3}.get(self.kind, 2)
        exact = self.kind in ("less", "equal", "crossing")
        if len(self.of) < least or (exact and len(self.of) != 2):
            yield "of", f"of a claim {self.kind!r} must name {least} terms, got {len(self.of)}"
        if (self.margin is None) == (self.kind == "equal"):
            yield "margin", "belongs to claims 'equal', and they need one"
        if bool(self.along) != (self.kind == "crossing"):
            yield "along", "belongs to claims 'crossing', and they need it"


@dataclass(slots=True, kw_only=True)
class Setting:
    """Where a hyper-parameter of the table comes from."""

    value: Any
    source: Literal["paper_explicit", "code_inferred", "our_choice", "not_specified"]
    where: str = ""
    """Section, table, file and commit; why, where it is our choice."""


@dataclass(slots=True, kw_only=True)
class Table:
    """A file of ``configs/table``."""

    title: str
    paper: str | None = None
    arxiv: str | None = None
    number: str | None = None
    """Of the table or figure in the paper."""
    experiment: str | None = None
    """File of ``configs/experiment``: what one cell trains with at paper scale."""
    parts: list[str] = field(default_factory=list)
    """Names of other tables that this one only collects on one page."""
    bench: list[str] = field(default_factory=list)
    """Commands to run from a checkout: a table of speed, which a script measures without runs."""
    row_label: str = "method"
    column_label: str = ""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Label -> overrides."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """Label -> overrides; a cell is a row and a column. Empty: one column without a label."""
    baseline: str | None = "dense"
    """Row that differences are taken from."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """The first one is what the table is about."""
    scales: dict[Scale, Size] = field(default_factory=dict)
    first_seed: Annotated[int, "≥ 0"] = 0
    published: list[Published] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the table cannot say, and deviations from the paper."""

    def problems(self) -> Problems:
        if self.parts or self.bench:
            return
        if not self.rows or not self.metrics or not self.scales:
            yield "rows", "metrics and scales must be given, or parts, or bench"
        if self.baseline is not None and self.baseline not in self.rows:
            yield "baseline", f"{self.baseline!r} is no row; give one, or null"
        places = {*self.rows, *(place(r, c) for r in self.rows for c in self.columns)}
        for scale, size in self.scales.items():
            for key, labels in (("rows", self.rows), ("columns", self.columns)):
                for label in getattr(size, key).keys() - labels.keys():
                    at = f"scales.{scale}.{key}"
                    yield at, f"{label!r} is none of the table{suggestion(label, labels)}"
            for glob in size.without:
                if not any(fnmatchcase(at, glob) for at in places):
                    yield f"scales.{scale}.without", f"no cell is {glob!r}"
        stages = {stage.name for size in self.scales.values() for stage in size.stages}
        for key, metric in self.metrics.items():
            if metric.stage and not any(fnmatchcase(stage, metric.stage) for stage in stages):
                yield f"metrics.{key}.stage", f"{metric.stage!r} is no stage of any scale"
        for i, claim in enumerate(self.claims):
            if claim.metric is not None and claim.metric not in self.metrics:
                yield (
                    f"claims[{i}].metric",
                    f"{claim.metric!r}{suggestion(claim.metric, self.metrics)}",
                )
            for column in set(claim.along) - self.columns.keys():
                yield f"claims[{i}].along", f"{column!r} is no column"
            about = self.metrics.get(claim.metric or next(iter(self.metrics), ""))
            if claim.kind in ("best_of", "interior") and about and about.better is None:
                yield f"claims[{i}].metric", "has no best: give its `better`"
            for term in claim.of:
                for name in [term] if isinstance(term, str) else term:
                    if name not in places:
                        yield f"claims[{i}].of", f"{name!r} is no cell{suggestion(name, places)}"
        for i, printed in enumerate(self.published):
            if printed.metric not in self.metrics:
                yield f"published[{i}].metric", f"{printed.metric!r} is no metric of the table"
            for label in [*printed.rows, *printed.columns]:
                if label not in {*self.rows, *self.columns}:
                    yield f"published[{i}]", f"{label!r} is neither a row nor a column"


def place(row: str, column: str) -> str:
    """A cell, as claims and ``--only`` name it."""
    return f"{row} @ {column}" if column else row


def names(config_dirs: Sequence[Path] = ()) -> dict[str, Path]:
    """Name -> file of every table, the shipped ones first."""
    files = (f for d in search_path(config_dirs) for f in sorted((d / TABLES).glob("[!_.]*.yaml")))
    return {file.stem: file for file in files}


def load_table(name: str, config_dirs: Sequence[Path] = ()) -> Table:
    """Read and check a table.

    Raises:
        ConfigError: there is none of that name, or every problem of the file, naming its keys.
    """
    import yaml

    files = names(config_dirs)
    if name not in files:
        raise ConfigError(f"there is no table {name!r}{suggestion(name, files)}")
    check_yaml(files[name], aliases=True)
    try:
        plain = yaml.safe_load(files[name].read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{files[name]} cannot be read: {one_line(error)}") from error
    try:
        return build(Table, plain)
    except ConfigError as error:
        raise ConfigError([f"{files[name]}: {message}" for message in error.messages]) from error


def places(table: Table, scale: Scale) -> Iterator[tuple[str, str, str]]:
    """(row, column, why it is not run at this scale or empty) of every cell, row by row."""
    without = table.scales[scale].without.items()
    for row in table.rows:
        for column in table.columns or [""]:
            at = place(row, column)
            reasons = [
                why for glob, why in without if fnmatchcase(row, glob) or fnmatchcase(at, glob)
            ]
            yield row, column, reasons[0] if reasons else ""


def slug(label: str) -> str:
    """A label as the name of a directory."""
    return re.sub(r"[^\w.+-]+", "_", label).strip("_.") or "cell"
