"""Verb ``export``: write a run for other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import Verb
from sparsepretrain.registry import register

DESCRIPTION = """\
Write the evaluated weights of a run as safetensors for transformers or timm, with configuration,
tokenizer and model card. The files are reloaded before they get their names: sparse layers must be
N:M with +0.0, and logits must equal those of the evaluation.
"""


@register("verb", "export")
class Export(Verb):
    summary = "write a run for transformers or timm, proven sparse, with a model card"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.add_argument("run", metavar="RUN", help="a run directory or one of its checkpoints")
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export/hf")

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.tracking.console import Console

        console = Console()
        console.loading(args.run)
        from sparsepretrain.export import export_run

        export_run(args.run, out=args.out, console=console)
        return 0
