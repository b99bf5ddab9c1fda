"""Runs of every combination of values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.cells import Part, grid
from sparsepretrain.studies.tables import Table


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


def read_axes(overrides: Sequence[str]) -> Axes:
    """Sort overrides into single values and lists of values.

    Lists are Hydra's ``a,b``, ``range(…)`` and ``choice(…)``, and the integers ``LOW..HIGH``.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    axes = Axes()
    errors = []
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
            values = [*map(str, range(low, high + 1))]
            if not values:
                errors.append(f"{word}: the end of a range must not be below its start")
        elif not parsed.is_sweep_override():
            values = [text]
        elif parsed.is_interval_sweep() or isinstance(parsed.value(), Glob):
            errors.append(f"{word}: expected values, such as {key}=a,b,c")
        else:
            values = list(parsed.sweep_string_iterator())
        if key == "seed" and all(value.isdigit() for value in values):
            axes.seeds = list(dict.fromkeys(map(int, values)))
        elif key == "name":
            errors.append("name= names a run: a sweep takes --name")
        elif len(values) == 1:
            axes.fixed.append(word if text == values[0] else f"{key}={values[0]}")
        elif values:
            axes.values[key] = list(dict.fromkeys(values))
    if not overrides:
        errors.append(
            "a sweep needs several values: sparsepretrain sweep sparsity=ste,sste seed=0..2"
        )
    if errors:
        raise ConfigError(errors)
    return axes
