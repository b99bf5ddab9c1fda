"""The verb ``methods``: what each matrix product sees, as a table."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

from sparsepretrain import registry
from sparsepretrain.cli._verb import ConfiguredVerb
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register
from sparsepretrain.text import in_columns

NO_BREAK = "\u00a0"
WIDEST = 100
"""Columns of the table at most."""


@register("verb", "methods")
class Methods(ConfiguredVerb):
    summary = "list the methods: what each matrix product sees, and the paper"
    place = 6

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config import compose
        from sparsepretrain.sparsity.method import COLUMNS, Method, typical_row

        plain = compose(args.overrides, args.config_dir)
        if problems := registry.load_plugins(plain["plugins"]):
            raise ConfigError(problems)
        width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
        rows, below = [["method", *COLUMNS.values()]], [[""]]
        for name in registry.names("method"):
            method: Any = registry.get("method", name)
            if not issubclass(method, Method):  # a plugin's, which only training refuses
                rows.append([name, *"?" * len(COLUMNS)])
                below.append([])
                continue
            rows.append([name, *(operand.text for operand in typical_row(name, method))])
            words = [method.phases, method.summary, method.paper]
            below.append(textwrap.wrap("; ".join(w for w in words if w != "–"), width - 4))
        lines = [[line] for line in in_columns(rows)]
        if max(len(line) for (line,) in lines) > width:  # operands one after the other
            pairs = [_pairs(rows[0], row) for row in rows]
            each = zip(rows[1:], pairs[1:], strict=True)
            lines = [[], *([row[0], *_indented(text, width)] for row, text in each)]
        for line, more in zip(lines, below, strict=True):
            print(*line, *(f"    {text}" for text in more if text), sep="\n")
        print(
            "\nfprop Y = Xf(X)·A(W)ᵀ   dgrad dX = P(G)·B(W)   wgrad dW = U(G)ᵀ·Xw(X)\n"
            "the optimiser receives J(dW, W)"
        )
        return 0


def _pairs(names: list[str], row: list[str]) -> str:
    """Operands by name, each with spaces that no line ends at."""
    words = [f"{k} = {v}" for k, v in zip(names[1:], row[1:], strict=False)]
    return ", ".join(word.replace(" ", NO_BREAK) for word in words)


def _indented(text: str, width: int) -> list[str]:
    return [f"    {line.replace(NO_BREAK, ' ')}" for line in textwrap.wrap(text, width - 4)]
