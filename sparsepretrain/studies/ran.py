"""Settings of the runs of a table, read from their frozen configurations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsepretrain.config import freeze
from sparsepretrain.studies.results import TableResults

GROUPS = ("model", "data", "task", "optim", "schedule", "precision", "batch")
"""Groups of the configuration that have a line each."""
SINGLE = ("steps", "clip", "ema")
"""Root keys that have a line each."""


def what_ran(results: TableResults) -> list[tuple[str, str]]:
    """Return (setting, value) of the runs; settings that differ name the cells of each value."""
    configs = {
        cell.name: freeze.flat(json.loads(results.configs[cell.config]))
        for cell in results.cells
        if cell.config in results.configs
    }
    if not configs:
        return []
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    values = {key: {at: config.get(key) for at, config in configs.items()} for key in keys}
    common = {key: next(iter(v.values())) for key, v in values.items() if _one(v)}
    rows: list[tuple[str, str]] = []
    for group in GROUPS:
        own = {k.partition(".")[2]: v for k, v in common.items() if k.startswith(f"{group}.")}
        name = own.pop("name", None)
        words = _pairs(own, zeros=group in ("data", "optim", "schedule"))
        rows.append((group, ", ".join([*filter(None, [name]), *words])))
    sizes = {cell.name: f"{cell.parameters:,}" for cell in results.cells if cell.parameters}
    rows.insert(1, ("parameters", _by_value(sizes, results)))
    rows += [(key, _text(common[key])) for key in SINGLE if common.get(key) is not None]
    rows += [
        (f"`{key}`", _by_value(v, results))
        for key, v in values.items()
        # the commands name the run that a stage begins with
        if not _one(v) and key not in ("name", "init.path") and not key.startswith("sparsity.")
    ]
    methods: dict[str, list[str]] = {}
    for at, config in configs.items():
        own = {k.partition(".")[2]: v for k, v in config.items() if k.startswith("sparsity.")}
        if (own.get("window.start", 0), own.get("window.stop", 1)) == (0, 1):
            own = {key: value for key, value in own.items() if not key.startswith("window.")}
        name = own.pop("name")
        n = own.pop("n")
        m = own.pop("m")
        pattern = "" if name == "dense" else f" {n}:{m}"
        words = [f"{name}{pattern}", *_pairs(own, zeros=True)]
        methods.setdefault(", ".join(words), []).append(at)
    rows += [(_named(places, results), text) for text, places in methods.items()]
    seeds = ", ".join(map(str, results.seeds))
    return [*((label, text) for label, text in rows if text), ("seeds", seeds)]


def _one(values: Mapping[str, Any]) -> bool:
    """Return True if all cells have one value."""
    return len({_text(value) for value in values.values()}) == 1


def _by_value(values: Mapping[str, Any], results: TableResults) -> str:
    """Return the value, or every value with its cells."""
    places: dict[str, list[str]] = {}
    for at, value in values.items():
        places.setdefault(_text(value), []).append(at)
    if len(places) < 2:
        return "".join(places)
    named = {text: _named(at, results) for text, at in places.items()}
    most = max(places, key=lambda text: len(places[text]))
    if 2 * len(places[most]) > len(values):
        named[most] = "all others"
    return "; ".join(f"{text} ({where})" for text, where in named.items())


def _named(places: Sequence[str], results: TableResults) -> str:
    """Return names of cells, or of whole rows or columns, or of these except some of the other.

    Cells that have not begun do not count.
    """
    begun = [cell for cell in results.cells if cell.config in results.configs]
    texts = []
    for axis, other in (("row", "column"), ("column", "row")):
        groups: dict[str, dict[str, str]] = {}
        for cell in begun:
            groups.setdefault(getattr(cell, axis), {})[cell.name] = getattr(cell, other)
        # rows (columns) that have the value in more than half of their cells
        mostly = {
            label: cells
            for label, cells in groups.items()
            if label and 2 * len(cells.keys() & set(places)) > len(cells)
        }
        pairs = [pair for cells in mostly.values() for pair in cells.items()]
        exceptions = dict.fromkeys(label for name, label in pairs if name not in places)
        if {name for name, label in pairs if label not in exceptions} == set(places):
            if not exceptions:
                return _quoted(mostly)
            texts.append(f"{_quoted(mostly)} except {_quoted(exceptions)}")
    return min([*texts, _quoted(places)], key=len)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' if "," in name else name for name in names)


def _pairs(values: Mapping[str, Any], *, zeros: bool) -> list[str]:
    """Return ``key value`` of what is set: not null, false or empty, and with ``zeros`` 0 too."""
    number = {key for key, v in values.items() if isinstance(v, int | float) and v is not False}
    shown = {key: v for key, v in values.items() if v or (zeros and key in number)}
    return [f"{key} {_text(value)}" for key, value in shown.items()]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
