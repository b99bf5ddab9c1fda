"""Verb ``export``: write a run for other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import Verb
from sparsepretrain.cli.train import illustrate
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
        text = "add low-rank adapters to the weights, which are then not N:M"
        parser.add_argument("--merge-adapters", action="store_true", help=text)
        text = "default: RUN/export/hf, RUN/export/merged with --merge-adapters"
        parser.add_argument("--out", type=Path, metavar="DIR", help=text)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.runs.directory import RunDirectory
        from sparsepretrain.tracking.console import Console

        console = Console()
        console.loading(args.run)
        from sparsepretrain.export import export_run

        directory = RunDirectory(Path(args.run))
        if directory.record_file.is_file():
            illustrate(directory)  # the figure of the card
        export_run(args.run, merge=args.merge_adapters, out=args.out, console=console)
        return 0
