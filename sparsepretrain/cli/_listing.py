"""What there is to choose from, as plain tables: the verbs ``methods`` and ``configs``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain import config, registry
from sparsepretrain.config.compose import build, catalogue, read, shipped
from sparsepretrain.config.validate import load_plugins
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.row import COLUMNS

WIDTH = 100
"""Columns that the table of the methods keeps to."""


def print_methods(overrides: Sequence[str], config_dirs: Sequence[Path]) -> None:
    """Print every method: what each matrix product sees, below it a summary and the paper.

    Args:
        overrides, config_dirs: ``plugins=[…]`` among them adds a user's methods.
    """
    plain = config.compose(overrides, config_dirs)
    if problems := load_plugins(plain["plugins"]):
        raise ConfigError(problems)
    rows, below = [["method", *COLUMNS.values()]], [[""]]
    for name in registry.names("method"):
        method: Any = registry.get("method", name)
        if not issubclass(method, Method):  # a plugin's, which only training refuses
            rows.append([name, *"?" * len(COLUMNS)])
            below.append([])
            continue
        rows.append([name, *(operand.text for operand in method.typical_row(name))])
        words = [method.phases, method.summary, method.paper]
        below.append(textwrap.wrap("; ".join(w for w in words if w != "–"), WIDTH - 4))
    for line, more in zip(_lines(rows), below, strict=True):
        print(line, *(f"    {text}" for text in more if text), sep="\n")
    print(
        "\nfprop Y = Xf(X)·A(W)ᵀ   dgrad dX = P(G)·B(W)   wgrad dW = U(G)ᵀ·Xw(X)\n"
        "the optimiser receives J(dW, W)"
    )


def print_configs(config_dirs: Sequence[Path]) -> None:
    """Print the configuration groups, their options and the files that these come from."""
    groups = catalogue(config_dirs)
    _, defaults = build(read((), config_dirs))
    rows = [["group", "option", "from"]]
    for group, options in groups.items():
        for i, (option, directory) in enumerate(options.items()):
            marked = f"{option} *" if defaults.get(group) == option else option
            origin = "configs" if directory == shipped() else str(directory)
            rows.append(["" if i else group, marked, f"{origin}/{group}/{option}.yaml"])
    print(*_lines(rows), sep="\n")
    print("\n* of a plain `sparsepretrain train`; model=… brings its own choices")


def _lines(rows: list[list[str]]) -> list[str]:
    """Rows of equal length as columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in aligned]
