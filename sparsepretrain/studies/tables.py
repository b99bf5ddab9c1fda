"""Tables of papers as data: runs, published numbers and claims of ``configs/table/<name>.yaml``."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from sparsepretrain.config.places import TABLES, search_path
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError, Problems, one_line
from sparsepretrain.registry import suggestion

PUBLISHED = Path(__file__).with_name("published.yaml")
"""Published numbers with their sources."""

T = TypeVar("T")
Scale = Literal["paper", "nano"]
Term = str | list[str]
"""``row``, ``row @ column``, or a pair: the first minus the second."""


@dataclass(slots=True, kw_only=True)
class Metric:
    """Number read from the record of every run, or from a stage after training."""

    label: str
    key: str
    """Key in the record, such as ``loss``, ``bleu`` or ``flip_rate``."""
    split: str | None = "validation"
    """Split of the evaluations; null: training lines."""
    stage: str | None = None
    """Stage of the number, or a glob for the mean over matching stages; null: training."""
    over: tuple[float, float] | None = None
    """Interval to average over, as fractions of the run; null: the last line."""
    relative_to: tuple[float, float] | None = None
    """Interval, as fractions of the run, whose mean divides the number."""
    percent_of: str | None = None
    """Reference row (same column) or cell of the same seed; claims compare percent above it."""
    better: Literal["lower", "higher"] | None = None
    variant: str = ""
    """Tokenization, weights and metric variant, which make numbers comparable."""
    sequence_length: int | None = None
    factor: float = 1.0
    """Multiplier of the number, such as 100 for percent."""
    digits: Annotated[int, "[0, 10]"] = 4
    """Digits after the decimal point."""

    def problems(self) -> Problems:
        for key, part in (("over", self.over), ("relative_to", self.relative_to)):
            if part is not None and not 0 <= part[0] < part[1] <= 1:
                yield key, f"must be two fractions of the run, ascending, got {list(part)}"


@dataclass(slots=True, kw_only=True)
class Stage:
    """Fine-tuning, evaluation or pruning of every run after training.

    A fine-tuning is a run with the cell's seed in
    ``<runs_dir>/<table>/<row>[--<column>]--<stage>/`` (``RunDirectory.finetuned``). An evaluation
    is a line of ``eval.jsonl`` (``RunDirectory.evaluation``), or a file of the harness
    (``RunDirectory.harness_result``). A pruned run is a directory in it (``RunDirectory.pruning``).
    ``RunDirectory.failures`` returns failed stages.
    """

    name: str
    finetune: str | None = None
    """``task=`` of ``sparsepretrain finetune RUN``."""
    evaluate: Literal["validation", "test"] | None = None
    """``split=`` of ``sparsepretrain eval RUN``."""
    average: Annotated[int, "≥ 1"] = 1
    """evaluate: number of last checkpoints whose weights are averaged."""
    lm_eval: str | None = None
    """Tasks of lm-evaluation-harness for the exported run, separated by commas."""
    prune: str | None = None
    """``--method`` of ``sparsepretrain prune RUN``."""
    pattern: str = "2:4"
    """prune: ``--pattern``."""
    options: dict[str, Any] = field(default_factory=dict)
    """prune: options of the method, such as ``permute: false`` of ria."""
    row: str | None = None
    """prune, finetune: row of the table whose numbers are those of the pruned or fine-tuned run; it
    is not trained by itself."""
    overrides: list[str] = field(default_factory=list)
    """Further arguments of the command."""

    def problems(self) -> Problems:
        if [self.finetune, self.evaluate, self.lm_eval, self.prune].count(None) != 3:
            text = f"or evaluate, lm_eval or prune: stage {self.name!r} must have exactly one"
            yield "finetune", text
        if self.options and self.prune is None:
            yield "options", f"belongs to prune: stage {self.name!r} has none"
        if self.row and self.prune is None and self.finetune is None:
            yield "row", f"belongs to prune and finetune: stage {self.name!r} has none"
        if self.average > 1 and self.evaluate is None:
            yield "average", f"belongs to evaluate: stage {self.name!r} has none"
        if self.name == "train" or self.name != slug(self.name):
            yield "name", f"must be letters, digits, _ and -, and not 'train', got {self.name!r}"


@dataclass(slots=True, kw_only=True)
class Tune:
    """Tuning of every row over equally many settings; the table's seeds then run the best one.

    Values are written as for ``sparsepretrain train -m``: ``optim.lr=1e-3,2e-3``. A row tries every
    combination of its values. The best mean of the first metric over the seeds is chosen.
    """

    seeds: list[int]
    """Seeds for choosing the settings; must differ from the table's seeds."""
    grid: list[str]
    """Values of every row."""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Row -> values of further keys, or values that replace those of a grid key."""

    def settings(self, row: str) -> list[str]:
        """Return the settings of a row: overrides, separated by spaces."""
        values: dict[str, list[str]] = {}
        for word in [*self.grid, *self.rows.get(row, ())]:
            key, _, text = word.partition("=")
            values[key] = [f"{key}={value}" for value in re.split(r",(?![^\[]*\])", text)]
        return [" ".join(chosen) for chosen in product(*values.values())]

    def problems(self) -> Problems:
        if not self.seeds:
            yield "seeds", "must have at least one seed"
        words = [*self.grid, *chain.from_iterable(self.rows.values())]
        if bad := [word for word in words if "=" not in word or " " in word]:
            yield "grid", f"and rows must be KEY=VALUE,VALUE without spaces, got {bad[0]!r}"


@dataclass(slots=True, kw_only=True)
class Match:
    """Row whose FFN width or number of steps is computed so that it costs as much as another."""

    to: str
    """The other row."""
    equal: Literal["parameters", "flops", "tokens"]
    """parameters: FFN width with as many parameters as the other row has nonzero ones; flops: steps
    with equal FLOPs, if a 2:4 matmul costs half a dense one; tokens: steps with equal tokens."""
    factor: Annotated[float, "> 0"] = 1.0
    """Multiplier of the cost: 0.5 with ``tokens`` trains on half as many."""


@dataclass(slots=True, kw_only=True)
class Size:
    """Scale of the runs of a table."""

    overrides: list[str] = field(default_factory=list)
    """Overrides of every run, before those of its row and column."""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Row -> further overrides, such as a decay factor for this scale."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    """Glob of ``row`` or ``row @ column`` -> reason for not running it at this scale."""
    stages: list[Stage] = field(default_factory=list)
    tune: Tune | None = None
    """Tuning before the runs of the table; null: nothing is tuned."""
    stand_in: str = ""
    """Model and data used instead of those of the paper; part of the page title."""
    labels: dict[str, str] = field(default_factory=dict)
    """Row, column or name in a claim -> its name on pages of this scale."""
    variants: dict[str, str] = field(default_factory=dict)
    """Metric -> its variant at this scale."""
    notes: list[str] = field(default_factory=list)
    """Limits of the runs of this scale."""
    seeds: Annotated[int, "> 0"] = 5
    fewer_seeds: dict[str, int] = field(default_factory=dict)
    """Glob of ``row`` or ``row @ column`` -> most seeds of these cells, unless a command lists its
    seeds."""
    minutes: Annotated[float | None, "> 0"] = None
    """Measured CPU minutes of all runs on one core; null: unknown."""

    @property
    def staged(self) -> dict[str, Stage]:
        """Row -> stage that gives its numbers, of rows that are not trained by themselves."""
        return {stage.row: stage for stage in self.stages if stage.row is not None}

    def most_seeds(self, row: str, column: str, number: int) -> int:
        """Return how many of ``number`` seeds a cell has."""
        return min([number, *_fitting(self.fewer_seeds, row, column)])


@dataclass(slots=True, kw_only=True)
class Published:
    """Location of one metric's published numbers in ``published.yaml``."""

    paper: str
    table: str
    metric: str
    """Metric of this table."""
    match: dict[str, Any] = field(default_factory=dict)
    """Keys and values shared by all rows of the source."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row of this table -> keys and values of the source row."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    margin: Annotated[float | None, "> 0"] = None
    """Smallest significant difference from these numbers; null: unknown."""
    note: str = ""
    """Note printed with the numbers."""


@dataclass(slots=True, kw_only=True)
class Claim:
    """Claim that is tested over seeds, see ``reports.claims``."""

    text: str
    kind: Literal["less", "order", "best_of", "equal", "not_worse", "crossing", "interior", "count"]
    of: list[Term]
    """less: the first is below the second; order: ascending; best_of: the first is best; equal: two
    of them; not_worse: the first is at most ``margin`` worse than the second; crossing: the sign of
    (first minus second) changes along ``along``; interior: along a grid, the optimum is not at an
    end; count: the first is below the second in more than half of all runs."""
    metric: str | None = None
    """Metric; null: the first one of the table."""
    margin: Annotated[float | None, "> 0"] = None
    """equal, not_worse: largest difference that counts as equal."""
    along: list[str] = field(default_factory=list)
    """crossing: columns, in order."""
    source: str = ""
    """Paper and place of the claim; empty: our own claim."""
    untestable: dict[str, str] = field(default_factory=dict)
    """Scale -> reason why its runs cannot test the claim."""

    @property
    def names(self) -> list[str]:
        """Rows and cells of all terms."""
        return [name for term in self.of for name in ([term] if isinstance(term, str) else term)]

    def problems(self) -> Problems:
        least = 3 if self.kind == "interior" else 2
        most = 99 if self.kind in ("order", "best_of", "interior") else 2
        if not least <= len(self.of) <= most:
            count = least if least == most else f"at least {least}"
            yield "of", f"must have {count} terms in a claim {self.kind!r}, got {len(self.of)}"
        if (self.margin is None) == (self.kind in ("equal", "not_worse")):
            yield "margin", "belongs to claims 'equal' and 'not_worse', and they need one"
        if bool(self.along) != (self.kind == "crossing"):
            yield "along", "belongs to claims 'crossing', and they need it"


@dataclass(slots=True, kw_only=True)
class Setting:
    """Origin of a hyperparameter of the table."""

    value: Any
    source: Literal["paper_explicit", "code_inferred", "our_choice", "not_specified"]
    where: str = ""
    """Section, table, file and commit, or the reason for our choice."""


@dataclass(slots=True, kw_only=True)
class Table:
    """A file of ``configs/table``."""

    title: str
    paper: str | None = None
    arxiv: str | None = None
    number: str | None = None
    """Number of the table or figure in the paper."""
    experiment: str | None = None
    """File of ``configs/experiment`` with the settings of a cell at paper scale."""
    parts: list[str] = field(default_factory=list)
    """Names of other tables that this one collects on one page."""
    bench: list[str] = field(default_factory=list)
    """Benchmark commands of a speed table, which has no runs; they need a checkout."""
    row_label: str = "method"
    column_label: str = ""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Label -> overrides."""
    match: dict[str, Match] = field(default_factory=dict)
    """Row -> the row whose cost it gets, in each column."""
    scaling: list[str] = field(default_factory=list)
    """Rows, with masks of one method and dense ones, to which the page fits a scaling law. In a
    table with columns, which are sizes with amounts of data, the page also has the gap to the
    baseline by size."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """Label -> overrides; a cell is a row and a column. Empty: one column without a label."""
    baseline: str | None = "dense"
    """Row that is subtracted from the others."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics; the first one is the main metric."""
    scales: dict[Scale, Size] = field(default_factory=dict)
    first_seed: Annotated[int, "≥ 0"] = 0
    published: list[Published] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Limits of the table, and deviations from the paper."""

    def problems(self) -> Problems:
        if self.parts or self.bench:
            return
        if not self.rows or not self.metrics or not self.scales:
            yield "rows", "must be given with metrics and scales; or give parts, or bench"
        if self.baseline is not None and self.baseline not in self.rows:
            yield "baseline", f"{self.baseline!r} is not a row; give one, or null"
        cells = {*self.rows, *(cell_name(r, c) for r in self.rows for c in self.columns)}
        for key, metric in self.metrics.items():
            if metric.percent_of is not None:
                yield from _unknown(f"metrics.{key}.percent_of", [metric.percent_of], cells)
                if self.baseline not in (None, metric.percent_of):
                    yield f"metrics.{key}.percent_of", f"must be the baseline, {self.baseline!r}"
        yield from _unknown("match", self.match, self.rows)
        for row, match in self.match.items():
            yield from _unknown(f"match.{row}.to", [match.to], self.rows)
            if match.to in self.match:
                yield f"match.{row}.to", f"{match.to!r} is matched itself; name a row that is not"
        yield from _unknown("scaling", self.scaling, self.rows)
        if self.scaling and self.baseline is None:
            yield "scaling", "is for tables with a baseline"
        if self.scaling and any(m.better != "lower" for m in [*self.metrics.values()][:1]):
            yield "scaling", "needs a first metric that is a loss, with `better: lower`"
        for scale, size in self.scales.items():
            yield from _unknown(f"scales.{scale}.rows", size.rows, self.rows)
            yield from _unknown(f"scales.{scale}.columns", size.columns, self.columns)
            yield from _unknown(f"scales.{scale}.variants", size.variants, self.metrics)
            if scale == "nano" and self.paper and not size.stand_in:
                yield "scales.nano.stand_in", "must name the model and data of these runs"
            yield from _unknown(f"scales.{scale}.stages.row", size.staged, self.rows)
            if size.staged and (self.columns or len(self.rows) != len(size.staged) + 1):
                yield f"scales.{scale}.stages", "with a row need one trained row and no columns"
            if size.tune is not None:
                yield from self._tuning_problems(f"scales.{scale}.tune", size.tune)
            for key in ("without", "fewer_seeds"):
                for glob in getattr(size, key):
                    if not any(fnmatchcase(at, glob) for at in cells):
                        yield f"scales.{scale}.{key}", f"no cell is {glob!r}"
            names = Counter(stage.name for stage in size.stages)
            if twice := [stage for stage, number in names.items() if number > 1]:
                yield f"scales.{scale}.stages", f"two have the name {twice[0]!r}"
            if few := [count for count in size.fewer_seeds.values() if count < 1]:
                yield f"scales.{scale}.fewer_seeds", f"must be at least 1, got {few[0]}"
        stages = {stage.name for size in self.scales.values() for stage in size.stages}
        for key, metric in self.metrics.items():
            if metric.stage and not any(fnmatchcase(stage, metric.stage) for stage in stages):
                yield f"metrics.{key}.stage", f"{metric.stage!r} is not a stage of any scale"
        for i, claim in enumerate(self.claims):
            key = claim.metric or next(iter(self.metrics))
            yield from _unknown(f"claims[{i}].metric", [key], self.metrics)
            yield from _unknown(f"claims[{i}].along", claim.along, self.columns)
            about = self.metrics.get(key)
            directed = claim.kind in ("best_of", "interior", "not_worse")
            if directed and about and about.better is None:
                yield f"claims[{i}].metric", f"{key!r} has no best value: set metrics.{key}.better"
            yield from _unknown(f"claims[{i}].of", claim.names, cells)
            if itself := [each for each in claim.of if claim.of.count(each) > 1]:
                yield f"claims[{i}].of", f"compares {itself[0]!r} with itself"
        for i, printed in enumerate(self.published):
            labels = {*self.rows, *self.columns}
            yield from _unknown(f"published[{i}].metric", [printed.metric], self.metrics)
            yield from _unknown(f"published[{i}]", [*printed.rows, *printed.columns], labels)

    def _tuning_problems(self, key: str, tune: Tune) -> Problems:
        yield from _unknown(f"{key}.rows", tune.rows, self.rows)
        if self.columns:
            yield key, "is for tables without columns"
        if next(iter(self.metrics.values())).better is None:
            yield key, "needs a first metric with `better`"
        budgets = {row: len(tune.settings(row)) for row in self.rows}
        if len({*budgets.values()}) > 1:
            text = ", ".join(f"{row} {number}" for row, number in budgets.items())
            yield f"{key}.rows", f"must give all rows the same number of settings, got {text}"


def at_scale(table: Table, scale: Scale) -> Table:
    """Return a table as its page at ``scale`` shows it.

    Published numbers, settings and limits of the paper's runs are shown at paper scale only. Other
    scales rename rows and columns; the configurations of their runs hold their settings.
    """
    size = table.scales[scale]
    labels = table.scales[scale].labels
    notes = [*table.notes, *size.notes]
    if scale == "paper":
        return replace(table, notes=notes)

    def named(label: str) -> str:
        row, at, column = label.partition(" @ ")
        return f"{labels.get(row, row)}{at}{labels.get(column, column)}"

    def in_words(text: str) -> str:
        for old, new in labels.items():
            text = text.replace(old, new)
        return text

    run_columns = {column for _, column, why in table_cells(table, scale) if not why}

    claims = [
        replace(
            claim,
            text=in_words(claim.text),
            of=[named(t) if isinstance(t, str) else [*map(named, t)] for t in claim.of],
            along=[*map(named, claim.along)],
            source="" if table.paper else claim.source,
        )
        for claim in table.claims
        if {name.partition(" @ ")[2] for name in claim.names} <= {"", *run_columns}
    ]
    metrics = {
        key: replace(metric, variant=size.variants.get(key, metric.variant))
        for key, metric in table.metrics.items()
    }
    without = {named(cell): why for cell, why in size.without.items()}
    shown = replace(
        table,
        rows={named(row): words for row, words in table.rows.items()},
        columns={named(c): words for c, words in table.columns.items() if c in run_columns},
        scaling=[*map(named, table.scaling)],
        baseline=table.baseline and named(table.baseline),
        claims=claims,
        metrics=metrics,
        scales={**table.scales, scale: replace(size, without=without)},
        notes=notes,
    )
    if not table.paper:
        return shown
    title = f"{table.title} – nano stand-in: {size.stand_in}"
    return replace(shown, title=title, published=[], settings={}, notes=size.notes)


def _unknown(key: str, names: Iterable[str], known: Collection[str]) -> Problems:
    for name in names:
        if name not in known:
            yield key, f"{name!r} is unknown{suggestion(name, known)}"


def cell_name(row: str, column: str) -> str:
    """Return the name of a cell in claims and ``--only``."""
    return f"{row} @ {column}" if column else row


def names(config_dirs: Sequence[Path] = ()) -> dict[str, Path]:
    """Return name -> file of every table, shipped ones first."""
    files = (f for d in search_path(config_dirs) for f in sorted((d / TABLES).glob("[!_.]*.yaml")))
    return {file.stem: file for file in files}


def load_table(name: str, config_dirs: Sequence[Path] = ()) -> Table:
    """Read and check a table."""
    import yaml

    files = names(config_dirs)
    if name not in files:
        raise ConfigError(f"there is no table {name!r}{suggestion(name, files)}")
    try:
        plain = yaml.load(files[name].read_text(encoding="utf-8"), Loader=_loader())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{files[name]} cannot be read: {one_line(error)}") from error
    try:
        return build(Table, plain)
    except ConfigError as error:
        raise ConfigError([f"{files[name]}: {message}" for message in error.messages]) from error


@functools.cache
def _loader() -> type:
    """Return a loader of YAML that refuses a key that occurs twice, of which one would be lost.

    So does OmegaConf's, but it takes labels of columns such as 2e-4 for numbers.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [key for key, number in Counter(keys).items() if number > 1]:
                line = node.start_mark.line + 1
                raise ValueError(
                    f"{twice[0]!r} occurs twice in the block that begins at line {line}"
                )
            return super().construct_mapping(node, deep)

    return Loader


def table_cells(table: Table, scale: Scale) -> Iterator[tuple[str, str, str]]:
    """Yield (row, column, reason for not running or an empty string) of every cell."""
    without = table.scales[scale].without
    for row in table.rows:
        for column in table.columns or [""]:
            yield row, column, next(_fitting(without, row, column), "")


def _fitting(by_glob: Mapping[str, T], row: str, column: str) -> Iterator[T]:
    """Yield the values whose glob fits a row, or a row and a column."""
    names = row, cell_name(row, column)
    return (value for glob, value in by_glob.items() if any(fnmatchcase(n, glob) for n in names))


def slug(label: str) -> str:
    """Return a label as a directory name."""
    return re.sub(r"[^\w.+-]+", "_", label).strip("_.") or "cell"


@functools.cache
def published() -> dict[tuple[str, str], dict[str, Any]]:
    """Return (paper, table) -> entry of ``published.yaml``: status, source, note, rows."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with open(PUBLISHED, encoding="utf-8") as stream:
        entries = yaml.load(stream, Loader=loader)["tables"]
    return {(entry["paper"], str(entry["table"])): entry for entry in entries}


def printed(source: Published, row: str, column: str) -> dict[str, Any] | None:
    """Return the published row of a cell with ``status``, ``source`` and ``note``, or None."""
    entry = published().get((source.paper, source.table))
    if entry is None:
        raise ConfigError(f"{PUBLISHED.name} has no table {source.table!r} of {source.paper!r}")
    if row not in source.rows or (source.columns and column not in source.columns):
        return None
    wanted = {**source.match, **source.columns.get(column, {}), **source.rows[row]}
    fits = [r for r in entry["rows"] if all(r.get(k) == v for k, v in wanted.items())]
    if len(fits) > 1:
        raise ConfigError(f"{len(fits)} rows of {source.table!r} ({source.paper}) fit {wanted}")
    about = {key: entry.get(key, "") for key in ("status", "source", "note")}
    return {**about, **fits[0]} if fits else None
