"""Runs of every combination of values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsepretrain.config.cells import Part, grid
from sparsepretrain.config.compose import shell_line
from sparsepretrain.config.places import catalog
from sparsepretrain.config.tables import Table
from sparsepretrain.errors import ConfigError
from sparsepretrain.runs.directory import RunDirectory

MOST_RUNS = 10_000
"""Most runs of a sweep; checking more takes minutes."""

SHOWN = 10
"""Most runs named in a command."""


@dataclass(slots=True)
class Axes:
    """Parsed words of a sweep."""

    fixed: list[str] = field(default_factory=list)
    """Overrides of all runs."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """Key -> values as typed."""
    seeds: list[int] = field(default_factory=lambda: [0])

    def part(self, name: str, stop_after: int | None, config_dirs: Sequence[Path]) -> Part:
        """Return every combination of values and seeds."""
        words = [[f"{key}={value}" for value in self.values[key]] for key in self.values]
        combinations = itertools.product(*words)
        named = {(" ".join(chosen) or "run", ""): [*self.fixed, *chosen] for chosen in combinations}
        cells = grid(name, named, self.seeds, config_dirs)
        return Part(name, Table(title=name), None, cells, stop_after, config_dirs)


def read_axes(overrides: Sequence[str], config_dirs: Sequence[Path]) -> Axes:
    """Sort overrides into single values and lists of values.

    Lists are Hydra's sweeps ``a,b``, ``range(…)``, ``choice(…)`` and ``glob(…)``, and the integers
    ``LOW..HIGH``.
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
        if ends := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text):
            low, high = map(int, ends.groups())
            values = [*map(str, range(low, min(high, low + MOST_RUNS) + 1))]
            if not values:
                errors.append(f"{word}: the end of a range must not be below its start")
        elif parsed.is_interval_sweep():
            errors.append(f"{word}: expected values, such as {key}=a,b,c")
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
    runs = math.prod([len(axes.seeds), *map(len, axes.values.values())])
    if runs > MOST_RUNS:
        errors.append(f"a sweep takes at most {MOST_RUNS:,} runs")
    if not overrides:
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
