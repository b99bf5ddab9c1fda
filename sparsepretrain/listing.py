"""What there is to choose from, as plain tables: the verbs ``methods`` and ``configs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain import config, registry
from sparsepretrain.config.compose import build, catalogue, read, shipped
from sparsepretrain.config.validate import load_plugins
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.row import COLUMNS


def print_methods(overrides: Sequence[str], config_dirs: Sequence[Path]) -> None:
    """Print every method: what each matrix product sees, and the paper.

    Args:
        overrides, config_dirs: ``plugins=[…]`` among them adds a user's methods.
    """
    plain = config.compose(overrides, config_dirs)
    if problems := load_plugins(plain["plugins"]):
        raise ConfigError(problems)
    rows = [["method", *COLUMNS.values(), "phases", "summary", "paper"]]
    for name in registry.names("method"):
        method: Any = registry.get("method", name)
        row = method.typical_row(name)
        rows.append(
            [name]
            + [operand.text for operand in row]
            + [method.phases, method.summary, method.paper]
        )
    _table(rows)
    print(
        "\nfprop Y = Xf(X)·A(W)ᵀ   dgrad dX = P(G)·B(W)   wgrad dW = U(G)ᵀ·Xw(X)   "
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
    _table(rows)
    print("\n* of a plain `sparsepretrain train`; model=… brings its own choices")


def _table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
