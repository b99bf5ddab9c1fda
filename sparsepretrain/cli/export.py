"""Verb ``export``: write a run for other libraries."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sparsepretrain.cli._verb import Verb, read_settings
from sparsepretrain.registry import register

DESCRIPTION = """\
Write the evaluated weights of a run as safetensors for transformers or timm, with configuration,
tokenizer and model card. The files are reloaded before they get their names: sparse layers must be
N:M with +0.0, and logits must equal those of the evaluation. average=5 writes the mean of the last
five checkpoints, as `eval RUN average=5` evaluates it. --onnx also writes model.onnx: its weights
must be N:M too, and ONNX Runtime on the CPU must compute the same (extra: onnx).
"""


@dataclass(slots=True, kw_only=True)
class Settings:
    """Keys of the verb."""

    average: Annotated[int, "≥ 1"] = 1
    """Number of last checkpoints whose weights are averaged, up to the given one."""


@register("verb", "export")
class Export(Verb):
    summary = "write a run for transformers or timm, proven sparse, with a model card"
    settings = Settings

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.add_argument("run", metavar="RUN", help="a run directory or one of its checkpoints")
        parser.add_argument(
            "settings",
            nargs="*",
            metavar="KEY=VALUE",
            help="average=N: the mean of the last N checkpoints",
        )
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export/hf")
        parser.add_argument("--onnx", action="store_true", help="also write model.onnx")

    def run(self, args: argparse.Namespace) -> int:
        settings = read_settings(Settings, args.settings)
        from sparsepretrain.console import Console

        console = Console()
        console.loading(args.run)
        from sparsepretrain.export import export_run

        export_run(
            args.run, average=settings.average, out=args.out, onnx=args.onnx, console=console
        )
        return 0
