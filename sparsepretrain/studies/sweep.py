"""Runs of every combination of values, and searches for the best one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsepretrain.config.cells import Part, grid
from sparsepretrain.config.compose import shell_line
from sparsepretrain.config.freeze import hash_of
from sparsepretrain.config.places import catalog
from sparsepretrain.config.tables import Table
from sparsepretrain.errors import ConfigError, DivergedError, needs
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies import engine
from sparsepretrain.studies.reproduce import study_of, to_run
from sparsepretrain.tracking.console import Console

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"

MOST_RUNS = 10_000
"""Most runs of a sweep; checking more takes minutes."""

SHOWN = 10
"""Number of best trials printed at the end of a search."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a number in a search."""

    low: float
    high: float
    log: bool
    whole: bool

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{', logarithmic' * self.log}"


@dataclass(slots=True)
class Axes:
    """Parsed words of a sweep."""

    fixed: list[str] = field(default_factory=list)
    """Overrides of all runs."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """Key -> values as typed."""
    ranges: dict[str, Range] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])

    def first(self) -> Axes:
        """Return the first values of a search: one trial."""
        first: dict[str, Any] = {key: limits.low for key, limits in self.ranges.items()}
        first |= {key: typed[0] for key, typed in self.values.items()}
        words = [f"{key}={value}" for key, value in first.items()]
        return Axes([*self.fixed, *words], seeds=self.seeds)

    def part(self, name: str, stop_after: int | None, config_dirs: Sequence[Path]) -> Part:
        """Return every combination of values and seeds."""
        words = [[f"{key}={value}" for value in self.values[key]] for key in self.values]
        combinations = itertools.product(*words)
        named = {(" ".join(chosen) or "run", ""): [*self.fixed, *chosen] for chosen in combinations}
        cells = grid(name, named, self.seeds, config_dirs)
        return Part(name, Table(title=name), None, cells, stop_after, config_dirs)


def read_axes(overrides: Sequence[str], config_dirs: Sequence[Path], *, search: bool) -> Axes:
    """Sort overrides into single values, lists of values and ranges.

    Lists are Hydra's sweeps ``a,b``, ``range(…)``, ``choice(…)`` and ``glob(…)``, and the integers
    ``LOW..HIGH``. In a search, ``LOW..HIGH`` is a range, logarithmic for positive numbers that are
    not integers, and ``interval(LOW,HIGH)`` a linear one.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    axes, errors = Axes(), []
    parser = OverridesParser.create()
    for word in map(str.strip, overrides):
        key, _, text = word.partition("=")
        key = key.lstrip("+")
        try:
            parsed: Any = parser.parse_override(word)
        except (HydraException, RecursionError):
            axes.fixed.append(word)  # composing reports the error
            continue
        values: list[str] = []
        if ends := re.fullmatch(rf"({NUMBER})\.\.({NUMBER})", text):
            whole = not any(set(".eE") & set(end) for end in ends.groups())
            low, high = (int(end) if whole else float(end) for end in ends.groups())
            if low >= high:
                errors.append(f"{word}: the end of a range must be above its start")
            elif whole and (not search or key == "seed"):
                values = [*map(str, range(int(low), min(int(high), int(low) + MOST_RUNS) + 1))]
            else:
                axes.ranges[key] = Range(low, high, low > 0 and not whole, whole)
        elif parsed.is_interval_sweep():
            sweep = parsed.value()
            axes.ranges[key] = Range(sweep.start, sweep.end, "log" in sweep.tags, whole=False)
        elif not parsed.is_sweep_override():
            values = [text]
        elif parsed.is_discrete_sweep() and hasattr(parsed.value(), "filter"):
            values = parsed.value().filter(list(catalog(config_dirs).get(key, ())))
            if not values:
                errors.append(f"{word} matches no option of {key}")
        else:
            values = list(itertools.islice(parsed.sweep_string_iterator(), MOST_RUNS + 1))
        if key == "seed" and all(value.isdigit() for value in values):
            axes.seeds = list(dict.fromkeys(map(int, values)))
        elif key == "name":
            errors.append("name= names a run: a sweep takes --name")
        elif len(values) == 1:
            axes.fixed.append(word if text == values[0] else f"{key}={values[0]}")
        elif values:
            axes.values[key] = list(dict.fromkeys(values))
    if axes.ranges and not search:
        text = "is a range to search in: give --search TRIALS, or values"
        errors += [f"{key}={axes.ranges[key]} {text}: {key}=a,b,c" for key in axes.ranges]
    if search and not axes.ranges and not axes.values:
        errors.append("a search needs a range (optim.lr=1e-4..1e-2) or values (sparsity=ste,sste)")
    runs = math.prod([len(axes.seeds), *map(len, axes.values.values())])
    if runs > MOST_RUNS:
        errors.append(f"a sweep takes at most {MOST_RUNS:,} runs")
    if not overrides and not search:
        errors.append(
            "a sweep needs several values: sparsepretrain sweep sparsity=ste,sste seed=0..2"
        )
    if errors:
        raise ConfigError(errors)
    return axes


def report_words(found: Part) -> str:
    """Return the words after ``sparsepretrain report`` for the runs of a sweep."""
    runs = dict.fromkeys(str(RunDirectory.of(cell.run)) for cell in found.cells)
    return shell_line(runs if len(runs) <= SHOWN else [found.cells[0].run.runs_dir])


@dataclass(frozen=True, slots=True)
class Search:
    """Search by Optuna; a trial has a run per seed."""

    first: Part
    """One trial, checked."""
    axes: Axes
    trials: int
    metric: str
    """Key in the last record line of the validation split."""
    maximize: bool

    def run(self, console: Console, *, jobs: int | None = None) -> str:
        """Run (or continue) the search; return the command that trains with the best values.

        Trials are kept in ``search.journal`` in the directory of the runs, apart from those of
        other ranges, values or metrics with the same name.
        """
        with needs("--search", "optuna", "sweep", error=ConfigError):
            import optuna
            from optuna.storages import journal

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first, name = self.first.cells[0].run, self.first.name
        folder = Path(first.runs_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {folder} ({error.strerror}): set runs_dir") from error
        axes, ranges = self.axes, {key: str(limits) for key, limits in self.axes.ranges.items()}
        stop_after = self.first.stop_after
        same = [axes.fixed, axes.values, axes.seeds, self.metric, stop_after, ranges]
        backend = journal.JournalFileBackend(str(folder / "search.journal"))
        study = optuna.create_study(
            study_name=hash_of(json.dumps(same)),
            storage=optuna.storages.JournalStorage(backend),
            direction="maximize" if self.maximize else "minimize",
            load_if_exists=True,
        )
        # seeded by the number of trials: a continued search repeats no draw
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=True)
        states = optuna.trial.TrialState
        with study_of(f"{name}: search", [first], console, jobs) as runs:
            while True:
                open_ = study.get_trials(states=(states.RUNNING,))
                left = self.trials - (len(study.trials) - len(open_))
                for _ in range(min(runs.jobs, left) - len(open_)):
                    study.ask(self._distributions(optuna.distributions))
                open_ = study.get_trials(states=(states.RUNNING,))[: max(0, left)]
                if not open_:
                    break
                for trial, value in self._measured(runs, open_, console).items():
                    failed = math.isnan(value)
                    study.tell(trial, *([None, states.FAIL] if failed else [value]))
            runs.show_all()
        done = [(t.value, t) for t in study.trials if t.value is not None]
        done = [(value, trial) for value, trial in done if math.isfinite(value)]
        if not done:
            raise ConfigError(f"no trial has validation {self.metric}: see the failed ones above")
        done.sort(key=lambda pair: pair[0], reverse=self.maximize)
        keys = list(self._distributions(optuna.distributions))
        rows = [
            (trial.number, *(f"{v:.4g}" if isinstance(v, float) else v for v in (value, *chosen)))
            for value, trial in done[:SHOWN]
            for chosen in [[trial.params[key] for key in keys]]
        ]
        console.table(f"{name}: best", rows, ("trial", f"validation {self.metric}", *keys))
        flags = [word for d in self.first.config_dirs for word in ("--config-dir", str(d))]
        best = [f"{key}={value}" for key, value in done[0][1].params.items()]
        return shell_line(["sparsepretrain", "train", *flags, *self.axes.fixed, *best])

    def _distributions(self, make: Any) -> dict[str, Any]:
        found = {key: make.CategoricalDistribution(v) for key, v in self.axes.values.items()}
        for key, r in self.axes.ranges.items():
            number = make.IntDistribution if r.whole else make.FloatDistribution
            found[key] = number(r.low, r.high, log=r.log)
        return found

    def _measured(
        self, study: engine.Study, trials: Sequence[Any], console: Console
    ) -> dict[int, float]:
        """Return trial number -> metric, the mean over seeds; NaN if failed."""
        cells: dict[int, list[engine.StudyCell]] = {}
        for trial in trials:
            chosen = [f"{key}={value}" for key, value in trial.params.items()]
            place = {(f"trial {trial.number}", ""): [*self.axes.fixed, *chosen]}
            try:
                made = grid(self.first.name, place, self.axes.seeds, self.first.config_dirs)
            except ConfigError as error:  # incompatible values
                console.warn("; ".join(error.messages))
                cells[trial.number] = []
                continue
            cells[trial.number] = to_run([dataclasses.replace(self.first, cells=made)], console)
        study.run([cell for own in cells.values() for cell in own])
        return {
            number: statistics.fmean(map(self._value, own)) if own else math.nan
            for number, own in cells.items()
        }

    def _value(self, cell: engine.StudyCell) -> float:
        if cell.exit_code == DivergedError.exit_code:
            return -math.inf if self.maximize else math.inf
        if cell.state != cell.goal:
            return math.nan
        lines = [line for line in cell.directory.record() if line.get("split") == "validation"]
        value = lines[-1].get(self.metric) if lines else None
        return math.nan if value is None else float(value)
