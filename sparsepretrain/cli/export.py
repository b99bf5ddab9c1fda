"""The verb ``export``: a run as files for other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import Verb
from sparsepretrain.cli.train import illustrate
from sparsepretrain.registry import register

DESCRIPTION = """\
Write the weights that a run evaluates with as safetensors which transformers or timm load, with
configuration, tokenizer and model card. Before anything gets its name the files are loaded again:
sparse layers are proven N:M with +0.0, logits are compared with evaluation's.
"""


@register("verb", "export")
class Export(Verb):
    summary = "write a run for transformers or timm, proven sparse, with a model card"
    place = 9

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.add_argument("run", metavar="RUN", help="a run directory or one of its checkpoints")
        parser.add_argument(
            "--format",
            choices=["hf", "semi_structured"],
            default="hf",
            help="semi_structured: refuse what sparsepretrain.export.load_semi_structured cannot "
            "load on a GPU",
        )
        parser.add_argument(
            "--merge-adapters",
            action="store_true",
            help="add low-rank adapters to the weights, which are no longer N:M then",
        )
        parser.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help="default: RUN/export/FORMAT, RUN/export/merged with --merge-adapters",
        )

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.runs.directory import RunDirectory
        from sparsepretrain.tracking.console import Console

        console = Console()
        console.loading(args.run)
        from sparsepretrain.export import export_run

        directory = RunDirectory(Path(args.run))
        if directory.record_file.is_file():
            illustrate(directory)  # the figure of the card
        export_run(
            args.run, form=args.format, merge=args.merge_adapters, out=args.out, console=console
        )
        return 0
