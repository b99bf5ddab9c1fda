"""Results of a table's runs as small plain data, from which its page can be rewritten."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparsepretrain.config import freeze, strict
from sparsepretrain.config.compose import parse, shell_line
from sparsepretrain.config.validate import validate
from sparsepretrain.errors import ConfigError, DataError, DivergedError, one_line
from sparsepretrain.files import parse_json, write_atomic, writer_tag
from sparsepretrain.reports.runs import Curve, RunData, load
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.cells import (
    Cell,
    Selection,
    cells,
    pruning_words,
    stage_words,
    tuning_cells,
    word,
)
from sparsepretrain.studies.matching import matched
from sparsepretrain.studies.tables import Metric, Scale, Size, Stage, Table, cell_name, load_table
from sparsepretrain.training.cost import Cost, run_cost
from sparsepretrain.training.schedules import resolve_steps

CURVES = {"loss": "validation", "flip_rate": None}
"""Key of a stored curve -> split."""

SHARED = {
    "initial_weights": ("model", "init"),
    "data_order": ("data", "task", "batch"),
    "evaluation": ("data", "task", "batch", "eval"),
}
"""Hash of a run -> configuration groups that determine the hash, with the seed."""

FAILURE = "exit code {exit_code}: {error}"


@dataclass(slots=True, kw_only=True)
class CellResult:
    """Result of one run."""

    row: str
    column: str = ""
    seed: int
    state: Literal["finished", "partial", "failed", "missing"]
    reason: str = ""
    step: int = 0
    steps: int = 0
    tokens: float = 0.0
    """Tokens, or other units of the task."""
    seconds: float = 0.0
    date: str = ""
    parameters: int = 0
    """Parameters of the model; 0: not recorded."""
    sparse_matmuls: float | None = None
    """2:4 matmuls per sparse layer, of three, mean over the run; null: not counted."""
    flops: float | None = None
    """FLOPs of the run if a 2:4 matmul costs half a dense one; null: not counted."""
    entries: int = 0
    """Parameters without embeddings; 0: not counted."""
    nonzero: int = 0
    """Nonzero ones of ``entries`` at the end."""
    average: float = 0.0
    """Nonzero ones of ``entries`` in the forward weights, mean over the steps; 0: not counted."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Metrics of finished runs; null: not finite."""
    missing: dict[str, str] = field(default_factory=dict)
    """Metric -> reason why a finished run has no value."""
    curves: dict[str, Curve] = field(default_factory=dict)
    flip_interval: int = 1
    """Steps between two compared masks."""
    hashes: dict[str, str | None] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Name of a hash -> digest of the settings that determine the hash."""
    command: str = ""
    """Command that trains the run, with a directory below ``runs``."""
    commit: str = ""
    config: str = ""
    hardware: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``row`` or ``row @ column``."""
        return cell_name(self.row, self.column)


@dataclass(slots=True, kw_only=True)
class TableResults:
    """Results of all runs of a table at one scale."""

    name: str
    scale: Scale | None = None
    """null: the table has no runs of its own."""
    seeds: list[int] = field(default_factory=list)
    unit: str = "tokens"
    overrides: list[str] = field(default_factory=list)
    """Overrides of all cells in addition to those of the table."""
    cells: list[CellResult] = field(default_factory=list)
    tuning: list[CellResult] = field(default_factory=list)
    """Runs that choose the setting of each row; their column is the setting."""
    configs: dict[str, str] = field(default_factory=dict)
    """Hash of a run's configuration -> the hashed configuration, see :func:`freeze.experiment`."""
    parts: list[TableResults] = field(default_factory=list)

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """Return cell -> seed -> finite number of a finished run."""
        by_seed: dict[str, dict[int, float]] = {}
        for cell in self.cells:
            value = cell.metrics.get(metric)
            if value is not None:
                by_seed.setdefault(cell.name, {})[cell.seed] = value
        return by_seed

    def compared(self, metric: str, table: Table) -> dict[str, dict[int, float]]:
        """Return the numbers that claims are about, see ``percent_of`` of a metric."""
        values = self.values(metric)
        reference = table.metrics[metric].percent_of
        if reference is None:
            return values
        by_seed: dict[str, dict[int, float]] = {}
        for cell in self.cells:
            at = cell_name(reference, cell.column) if reference in table.rows else reference
            value, base = (values.get(name, {}).get(cell.seed) for name in (cell.name, at))
            if value is not None and base:
                by_seed.setdefault(cell.name, {})[cell.seed] = 100 * (value / base - 1)
        return by_seed

    def costs(self, baseline: str | None) -> dict[str, tuple[float, float]]:
        """Return cell -> 2:4 matmuls per layer and FLOPs in percent of the baseline, if counted.

        In a table with columns, of the baseline in the same column.
        """
        by_cell: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for cell in self.cells:
            if cell.sparse_matmuls is not None and cell.flops is not None:
                at = cell.row, cell.column
                by_cell.setdefault(at, []).append((cell.sparse_matmuls, cell.flops))
        means = {at: np.mean(pairs, axis=0).tolist() for at, pairs in by_cell.items()}
        bases = {column: flops for (row, column), (_, flops) in means.items() if row == baseline}
        return {
            cell_name(row, column): (matmuls, 100 * flops / bases[column])
            for (row, column), (matmuls, flops) in means.items()
            if column in bases
        }

    def gaps(self, metric: str) -> dict[str, str]:
        """Return cell -> seeds without a number and the reason; "all": one reason for all runs."""
        by_reason: dict[str, dict[str, list[int]]] = {}
        for cell in self.cells:
            if cell.metrics.get(metric) is None:
                about = cell.missing.get(metric) or cell.reason
                why = "" if cell.state == "finished" else f"{cell.state}: " if about else cell.state
                by_reason.setdefault(cell.name, {}).setdefault(why + about, []).append(cell.seed)
        whys = {why for at in by_reason.values() for why in at}
        if len(whys) == 1 and all(cell.metrics.get(metric) is None for cell in self.cells):
            return {"all": whys.pop()}
        return {
            at: ", ".join(
                f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} {why}"
                for why, seeds in reasons.items()
            )
            for at, reasons in by_reason.items()
        }

    def renamed(self, labels: Mapping[str, str]) -> TableResults:
        """Return the results with other names of rows and columns."""

        def named(cells: Sequence[CellResult]) -> list[CellResult]:
            return [
                dataclasses.replace(
                    cell,
                    row=labels.get(cell.row, cell.row),
                    column=labels.get(cell.column, cell.column),
                )
                for cell in cells
            ]

        return dataclasses.replace(self, cells=named(self.cells), tuning=named(self.tuning))

    def all(self) -> list[TableResults]:
        """Return the results of all parts, or these."""
        return self.parts or [self]


def collect(name: str, scale: Scale | None, asked: Selection) -> TableResults:
    """Read the runs of a table, failed and missing runs included, except seeds without any run.

    ``scale`` None: nano if the table has it.
    """
    table = load_table(name, asked.config_dirs)
    overrides = [override for override in asked.overrides if not override.startswith("runs_dir=")]
    result = TableResults(name=name, overrides=overrides)
    if table.parts:
        result.parts = [collect(part, scale, asked) for part in table.parts]
    elif table.scales:
        result.scale = scale or ("nano" if "nano" in table.scales else "paper")
        record = record_of(name, table, result.scale, asked)
        _, result.tuning, wanted = selected(name, table, result.scale, asked, record)
        measured = [_collect(cell, table, result.scale, record) for cell in wanted]
        for stage in table.scales[result.scale].staged.values():
            made = _pruned if stage.prune is not None else _tuned
            measured += [
                made(source, cell, stage, run, table)
                for source, (cell, run) in zip(wanted, measured[: len(wanted)], strict=True)
            ]
        begun = {cell.seed for cell, _ in measured if cell.state != "missing"}
        result.cells = [cell for cell, _ in measured if cell.seed in begun]
        final_only = result.tuning or table.match or (table.scaling and table.columns)
        if final_only or table.scales[result.scale].staged:
            for cell, _ in measured:
                cell.curves = {}  # pages of these tables show final values only
        if final_only or table.scaling:
            costs: dict[tuple[Any, ...], Cost] = {}
            for cell, data in measured:
                if cell.state == "finished" and data is not None:
                    # seeds cost the same, unless the optimizer decides when a method is sparse
                    phases = [(line["step"], line.get("sparse")) for line in data.records]
                    key = cell.config, *phases
                    if key not in costs:
                        costs[key] = run_cost(validate(data.config), data.records)
                    cost = costs[key]
                    cell.sparse_matmuls = cost.sparse_matmuls
                    cell.flops = cost.flops
                    cell.entries = cost.entries
                    cell.nonzero = cost.nonzero
                    cell.average = cost.average
        result.seeds = sorted(begun)
        configs = {cell.config: run.config for cell, run in measured if run is not None}
        kept = {cell.config for cell in result.cells} & record.configs.keys()
        frozen = {key: record.configs[key] for key in kept}
        frozen |= {key: freeze.experiment(config) for key, config in configs.items()}
        result.configs = dict(sorted(frozen.items()))
        result.unit = next((run.unit for _, run in measured if run is not None), record.unit)
    return result


def record_of(name: str, table: Table, scale: Scale, asked: Selection) -> TableResults:
    """Return the record of a table below ``asked.records``, empty without one.

    Raises:
        DataError: the file is not a record of the table.
        ConfigError: there is no record, or the table has stages, whose runs a record does not tell
            apart.
    """
    empty = TableResults(name=name)
    if asked.records is None or scale not in table.scales:
        return empty
    if table.scales[scale].stages:
        raise ConfigError(
            f"--records: the runs of {name} have stages: leave it out, they run again"
        )
    file = asked.records / f"{name}.json.gz"
    if not file.is_file():
        raise ConfigError(
            f"--records: {asked.records} has no {file.name}: expected the directory of that "
            "record; without one leave --records out"
        )
    return read_record(file)


def not_recorded(tried: Sequence[Cell], record: TableResults) -> list[Cell]:
    """Return the runs that a record has not finished, with the same configuration."""
    return [cell for cell in tried if _recorded(cell, record) is None]


def count_outdated(tried: Sequence[Cell], record: TableResults) -> int:
    """Return how many finished runs of a record have the place of a run and do not count as it."""
    done = (found for found in record.cells if found.state == "finished")
    places = {(found.row, found.column, found.seed) for found in done}
    left = {(cell.row, cell.column, cell.seed) for cell in tried}
    return len(places & left)


def _recorded(cell: Cell, record: TableResults) -> CellResult | None:
    """Return the finished run of a record with the configuration and seed of a cell."""
    at = (cell.row, cell.column, cell.seed)
    for found in (*record.cells, *record.tuning):
        if (found.row, found.column, found.seed) == at and found.state == "finished":
            return found if found.config == freeze.identity(resolve_steps(cell.run)) else None
    return None


def selected(
    name: str, table: Table, scale: Scale, asked: Selection, record: TableResults
) -> tuple[list[Cell], list[CellResult], list[Cell]]:
    """Return the runs that tune rows, their results, and the runs of a table.

    Rows with unfinished tuning runs have no other runs.
    """
    equal = None
    if table.match:
        equal = matched(name, table, scale, asked)
    tune = table.scales[scale].tune if scale in table.scales else None
    if tune is None:
        return [], [], cells(name, table, scale, asked, matched=equal)
    tried = tuning_cells(name, table, scale, tune, asked, equal)
    tuning = trials(tried, table, scale, record)
    settings = chosen(tuning, table)
    return tried, tuning, cells(name, table, scale, asked, matched=equal, settings=settings)


def trials(
    tried: Sequence[Cell], table: Table, scale: Scale, record: TableResults
) -> list[CellResult]:
    """Read the runs that choose settings, without their curves."""
    results = []
    for cell in tried:
        result, _ = _collect(cell, table, scale, record)
        failure = RunDirectory.of(cell.run).failures().get("train")
        if failure and failure["exit_code"] == DivergedError.exit_code:
            result.metrics = dict.fromkeys(table.metrics)  # means() counts None as the worst
        results.append(dataclasses.replace(result, curves={}, versions={}, command=""))
    return results


def means(tuning: Sequence[CellResult], table: Table) -> dict[str, dict[str, float]]:
    """Return row -> setting -> mean of the first metric over seeds, of complete rows.

    If a run of a setting diverged, the mean is ∞, or -∞ if higher is better.
    """
    metric = next(iter(table.metrics))
    worst = math.inf if table.metrics[metric].better == "lower" else -math.inf
    by_row: dict[str, dict[str, list[float]]] = {}
    incomplete = {result.row for result in tuning if metric not in result.metrics}
    for result in tuning:
        if result.row not in incomplete:
            value = result.metrics[metric]
            values = by_row.setdefault(result.row, {}).setdefault(result.column, [])
            values.append(worst if value is None else value)
    return {
        row: {setting: sum(values) / len(values) for setting, values in by_setting.items()}
        for row, by_setting in by_row.items()
    }


def chosen(tuning: Sequence[CellResult], table: Table) -> dict[str, str]:
    """Return row -> best setting, without rows that are unfinished or have no finite mean."""
    best = min if table.metrics[next(iter(table.metrics))].better == "lower" else max
    settings = {}
    for row, by_setting in means(tuning, table).items():
        setting = best(by_setting, key=lambda tried: by_setting[tried])
        if math.isfinite(by_setting[setting]):
            settings[row] = setting
    return settings


def _collect(
    cell: Cell, table: Table, scale: Scale, record: TableResults
) -> tuple[CellResult, RunData | None]:
    if (known := _recorded(cell, record)) is not None:
        return known, None
    run = cell.run
    if not run.steps:  # epochs decide; counting steps needs the data
        run = resolve_steps(run)
    directory = RunDirectory.of(run)
    plain = run.plain
    # readers of the page do not have the author's directory
    home = word("runs_dir", f"runs/{Path(run.runs_dir).name}")
    words = [home if text.startswith("runs_dir=") else text for text in cell.words]
    result = CellResult(
        row=cell.row,
        column=cell.column,
        seed=cell.seed,
        state="missing",
        steps=run.steps,
        command=shell_line(["sparsepretrain", "train", *words]),
        config=freeze.identity(run),
        settings=_digests(plain),
    )
    data = None
    try:
        data = load(directory.path)
        _fill(result, data, evaluated=run.eval.batches != 0)
    except (ConfigError, DataError) as error:
        if directory.record_file.is_file() and directory.record_file.stat().st_size:
            result.state = "failed"
            result.reason = one_line(error)
    if result.state == "finished" and data is not None:
        for name, metric in table.metrics.items():
            _measure(result, name, metric, data, table.scales[scale])
    elif failure := directory.failures().get("train"):
        result.state = "failed"
        result.reason = FAILURE.format(**failure)
    return result, data


def _digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Return name of a hash -> digest of the settings that determine it, see :data:`SHARED`."""
    return {
        name: freeze.hash_of(json.dumps({key: config[key] for key in keys}, sort_keys=True))
        for name, keys in SHARED.items()
    }


def _fill(result: CellResult, data: RunData, *, evaluated: bool) -> None:
    last = data.records[-1]
    result.step = data.end
    result.tokens = float(last.get("tokens", 0))
    result.seconds = round(max(line.get("time") or 0.0 for line in data.records), 1)
    written = data.path / RunDirectory.record_file.name
    result.date = f"{datetime.fromtimestamp(written.stat().st_mtime, UTC):%Y-%m-%d}"
    about = data.environment
    result.commit = about.get("commit") or ""
    result.versions = about.get("packages") or {}
    result.hashes = about.get("hashes") or {}
    result.parameters = about.get("parameters") or 0
    hardware = about.get("hardware") or {}
    result.hardware = ", ".join(f"{k} {v}" for k, v in hardware.items() if v is not None)
    for key, split in CURVES.items():
        result.curves |= {key: curve} if (curve := data.curve(key, split)) else {}
    result.flip_interval = data.flip_interval()
    done = [line for line in data.records if line["step"] >= result.steps]
    if done and (not evaluated or any("split" in line for line in done)):
        result.state = "finished"
    else:
        result.state = "partial"
        result.reason = f"step {result.step} of {result.steps}"


def pruned_results(directory: RunDirectory, step: int, stage: Stage) -> dict[str, Any] | None:
    """Return ``prune.json`` of a stage on the checkpoint of ``step``; None if it has not run.

    Results of other settings under the same name are not those of the stage.
    """
    results = directory.pruning(step, stage.name) or {}
    settings = results.get("settings", {})
    wanted = {"method": stage.prune, "pattern": stage.pattern, "overrides": stage.overrides}
    same = all(settings.get(key) == value for key, value in wanted.items())
    same = same and stage.options.items() <= settings["options"].items()
    return results if same else None


def tuned_run(directory: RunDirectory, step: int, stage: Stage) -> RunDirectory | None:
    """Return the newest fine-tuning of a run's checkpoint of ``step`` by a stage, or None.

    Those that began before the stage was changed, with other values of its overrides, are none.
    """
    parsed = filter(None, map(parse, stage.overrides))
    typed = {override.key_or_group: override.value() for override in parsed}  # the last one wins
    for tuned in directory.finetuned(stage.name, step):
        own = freeze.flat(tuned.config())
        # a choice of a group is no key of its own, and is not compared
        if all(own.get(key, value) == value for key, value in typed.items()):
            return tuned
    return None


def _tuned(
    source: Cell, cell: CellResult, stage: Stage, data: RunData | None, table: Table
) -> tuple[CellResult, RunData | None]:
    """Return the result and the run of a row whose runs are those of another row, fine-tuned."""
    result = dataclasses.replace(
        cell, row=str(stage.row), state="missing", metrics={}, missing={}, command="", step=0
    )
    if cell.state != "finished" or data is None:
        return result, None
    directory = RunDirectory(data.path)
    tuned = tuned_run(directory, cell.steps, stage)
    if tuned is None:
        if failure := directory.failures().get(stage.name):
            result.state = "failed"
            result.reason = f"{stage.name}: {FAILURE.format(**failure)}"
        return result, None
    run = Path("runs", *data.path.parts[-3:])
    words = [w for w in stage_words(source, stage) if not w.startswith("runs_dir=")]
    home = word("runs_dir", f"runs/{Path(source.run.runs_dir).name}")
    result.command = shell_line(["sparsepretrain", "finetune", str(run), *words, home])
    try:
        found = load(tuned.path)
    except (ConfigError, DataError) as error:
        result.state = "failed"
        result.reason = f"{stage.name}: {one_line(error)}"
        return result, None
    # it began with the run of another row: no path of this machine in records
    start = found.config["init"]
    start["path"] = str(start["path"]).replace(str(data.path.resolve()), str(run))
    result.steps = found.config.get("steps") or found.end
    result.config = freeze.identity(validate(found.config))
    result.settings = _digests(found.config)
    _fill(result, found, evaluated=True)
    if result.state == "finished":
        for name, metric in table.metrics.items():
            value = measured(metric, found, result.steps)
            if value is None:
                result.missing[name] = f"{stage.name} has no such number"
            else:
                result.metrics[name] = metric.factor * value if math.isfinite(value) else None
    return result, found


def _pruned(
    source: Cell, cell: CellResult, stage: Stage, data: RunData | None, table: Table
) -> tuple[CellResult, RunData | None]:
    """Return the result and the run of a row whose runs are those of another row, pruned."""
    result = dataclasses.replace(
        cell, row=str(stage.row), state="missing", metrics={}, missing={}, command=""
    )
    if cell.state != "finished" or data is None:
        return result, data
    directory = RunDirectory(data.path)
    run = Path("runs", *data.path.parts[-3:])
    words = pruning_words(stage, str(run))
    result.command = shell_line(["sparsepretrain", "prune", str(run), *words])
    found = pruned_results(directory, cell.steps, stage)
    if found is None:
        if failure := directory.failures().get(stage.name):
            result.state = "failed"
            result.reason = f"{stage.name}: {FAILURE.format(**failure)}"
        return result, data
    result.state = "finished"
    for name, metric in table.metrics.items():
        value = found["perplexity"]["after"][0].get(metric.key)
        if value is None:
            result.missing[name] = f"{stage.name} has no such number"
        else:
            result.metrics[name] = metric.factor * float(value)
    return result, data


def _measure(result: CellResult, name: str, metric: Metric, data: RunData, size: Size) -> None:
    """Store a metric of training, or its mean over stages."""
    directory = RunDirectory(data.path)
    values = []
    stages: list[Stage | None] = [None]
    if metric.stage is not None:
        stages = [stage for stage in size.stages if fnmatchcase(stage.name, metric.stage)]
    for stage in stages:
        value = None
        if stage is None:
            value = measured(metric, data, result.steps)
        elif stage.finetune is None:
            if stage.lm_eval is not None:
                found = directory.harness_result(result.steps, stage.name) or {}
            elif stage.prune is not None:  # of the dense run, on the text of the pruned ones
                results = pruned_results(directory, result.steps, stage) or {}
                found = results["perplexity"]["before"][0] if results else {}
            else:
                line = directory.evaluation(stage.evaluate, stage.overrides, stage.average) or {}
                found = line.get("metrics", {}) if line.get("step") == result.step else {}
            if metric.key in found:
                value = math.nan if found[metric.key] is None else float(found[metric.key])
        elif (tuned := tuned_run(directory, result.step, stage)) is not None:
            with contextlib.suppress(ConfigError, DataError):
                run = load(tuned.path)
                if run.end >= (total := run.config.get("steps") or run.end):
                    value = measured(metric, run, total)
        if value is None:
            failure = directory.failures().get(stage.name) if stage is not None else None
            why = f"failed: {FAILURE.format(**failure)}" if failure else "has no such number"
            missing = f"the runs record no {metric.key}" if stage is None else f"{stage.name} {why}"
            result.missing[name] = missing
            return
        values.append(value)
    if not values:
        result.missing[name] = f"this scale has no stage {metric.stage}"
        return
    mean = metric.factor * sum(values) / len(values)
    result.metrics[name] = mean if math.isfinite(mean) else None
    if not math.isfinite(mean):
        result.missing[name] = f"{metric.label} is not finite"


def measured(metric: Metric, run: RunData, total: int) -> float | None:
    """Return a metric of a run of ``total`` steps; None if not recorded, NaN if not finite."""
    steps, values = run.series(metric.key, metric.split)

    def mean(part: tuple[float, float]) -> float:
        inside = values[(steps > part[0] * total) & (steps <= part[1] * total)]
        return float(np.mean(inside)) if len(inside) else math.nan

    if not len(values):
        return None
    value = float(values[-1]) if metric.over is None else mean(metric.over)
    below = 1.0 if metric.relative_to is None else mean(metric.relative_to)
    return value / below if below else math.nan


def write_record(results: TableResults, file: Path) -> None:
    """Write results compressed; equal results give equal bytes."""
    text = json.dumps(_drop_empty(dataclasses.asdict(results)), ensure_ascii=False, sort_keys=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    write_atomic(file, packed, tag=writer_tag())


def read_record(file: Path) -> TableResults:
    """Read a file of :func:`write_record`.

    Raises:
        DataError: it is missing, damaged, or the record of a table of another name.
    """
    if not file.exists():
        raise DataError(f"there is no {file}: `report TABLE --record` writes the record of a table")
    try:
        results = strict.build(TableResults, parse_json(gzip.decompress(file.read_bytes())))
        _check_record(results, file.name.partition(".")[0])
    except (OSError, EOFError, ValueError, ConfigError, zlib.error) as error:
        raise DataError(f"{file} is not a record of a table: {one_line(error)}") from error
    return results


def _check_record(results: TableResults, name: str) -> None:
    """Raise ValueError for what :func:`write_record` does not write."""
    if results.name != name:
        raise ValueError(f"it is that of {results.name!r}, expected {name!r}")
    for part in results.all():
        for runs in (part.cells, part.tuning):
            places = Counter((run.row, run.column, run.seed) for run in runs)
            if twice := [place for place, number in places.items() if number > 1]:
                row, column, seed = twice[0]
                raise ValueError(f"{part.name}: {cell_name(row, column)}, seed {seed} occurs twice")
        for key, text in part.configs.items():
            if freeze.hash_of(text) != key:
                raise ValueError(f"{part.name}: the configuration {key} was changed")
        for run in part.cells:
            for key, axes in run.curves.items():
                if len({len(values) for values in axes}) > 1:
                    raise ValueError(f"{part.name}: {run.name}: {key} has lists of two lengths")


def _drop_empty(value: Any) -> Any:
    """Drop empty values; a missing key means empty."""
    if isinstance(value, dict):
        empty: tuple[Any, ...] = ("", [], {})
        return {k: _drop_empty(v) for k, v in value.items() if v not in empty}
    return [_drop_empty(v) for v in value] if isinstance(value, list | tuple) else value
