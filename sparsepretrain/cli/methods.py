"""The verb ``methods``: what each matrix product sees, as a table."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from sparsepretrain import registry
from sparsepretrain.cli._verb import ConfiguredVerb, in_columns
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register

WIDTH = 100
"""Columns that the table keeps to."""


@register("verb", "methods")
class Methods(ConfiguredVerb):
    summary = "list the methods: what each matrix product sees, and the paper"
    place = 6

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config import compose
        from sparsepretrain.sparsity.method import COLUMNS, Method

        plain = compose(args.overrides, args.config_dir)
        if problems := registry.load_plugins(plain["plugins"]):
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
        for line, more in zip(in_columns(rows), below, strict=True):
            print(line, *(f"    {text}" for text in more if text), sep="\n")
        print(
            "\nfprop Y = Xf(X)·A(W)ᵀ   dgrad dX = P(G)·B(W)   wgrad dW = U(G)ᵀ·Xw(X)\n"
            "the optimiser receives J(dW, W)"
        )
        return 0
