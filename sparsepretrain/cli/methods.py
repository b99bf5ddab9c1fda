"""Verb ``methods``: table of the operands of each matmul."""

from __future__ import annotations

import argparse
from typing import Any

from sparsepretrain import registry
from sparsepretrain.cli._verb import Verb
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register


@register("verb", "methods")
class Methods(Verb):
    summary = "list the methods: operands of each matmul, and the paper"

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.console import Console
        from sparsepretrain.sparsity.method import Method, typical_row
        from sparsepretrain.sparsity.operand_table import COLUMNS

        if problems := registry.load_plugins([]):
            raise ConfigError(problems)
        rows = []
        notes = []
        for name in registry.names("method"):
            method: Any = registry.get("method", name)
            if not issubclass(method, Method):  # of a plug-in; training rejects the class
                rows.append([name, *(["?"] * len(COLUMNS))])
                continue
            rows.append([name, *(operand.text for operand in typical_row(name, method))])
            words = [method.summary, method.paper]
            notes.append(f"{name}: {'; '.join(word for word in words if word != '–')}")
        console = Console()
        console.table("", rows, header=("method", *COLUMNS.values()), lines=False)
        console.info(
            "\nfprop Y = Xf(X)·A(W)ᵀ   dgrad dX = P(G)·B(W)   wgrad dW = U(G)ᵀ·Xw(X)\n"
            "the optimizer receives J(dW, W)\n"
        )
        console.info("\n".join(notes))
        return 0
