"""Verb ``prune``: one-shot masks for a checkpoint, with calibration text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.cli._verb import ConfiguredVerb, integer_from, read_settings
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register

DESCRIPTION = """\
Prune the linear layers of a checkpoint to N:M in one shot, block by block, and write it for stock
transformers with masks and a report. CHECKPOINT is a Hugging Face checkpoint (a directory or a hub
name) or a run. A run is calibrated with its own training data, others with data=…: c4_shard,
text_files, document_files, python_source (offline). The same command goes on after an interruption.
"""
EXAMPLES = """\
examples:
  sparsepretrain prune DIRECTORY --method wanda --out OUT data=c4_shard task.sequence_length=2048
  sparsepretrain prune runs/gpt2_nano/HASH-s0 --method sparsegpt --pattern 4:8 --out OUT
  sparsepretrain prune DIRECTORY --method magnitude --layers ffn --out OUT
"""


@register("verb", "prune")
class PruneVerb(ConfiguredVerb):
    summary = "prune a checkpoint to N:M in one shot: magnitude, wanda, sparsegpt, ria"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.epilog = EXAMPLES
        text = "Hugging Face checkpoint, run directory, or checkpoint in it"
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
        text = "magnitude, wanda, sparsegpt or ria; KEY=VALUE also sets its options"
        parser.add_argument("--method", required=True, metavar="METHOD", help=text)
        text = "N of every M consecutive inputs are kept; default: 2:4"
        parser.add_argument("--pattern", default="2:4", metavar="N:M", help=text)
        text = "globs of layers, or ffn, attention, all (default); '!GLOB' leaves layers out"
        parser.add_argument("--layers", nargs="+", default=[], metavar="GLOB", help=text)
        text = "calibration sequences of task.sequence_length tokens; default: 128"
        parser.add_argument(
            "--sequences", type=integer_from(1), default=128, metavar="N", help=text
        )
        text = "output directory, new or empty"
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
        super().add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.export.claims import read_pattern

        try:
            n, m = read_pattern(args.pattern)
        except ValueError as error:
            raise ConfigError(f"--pattern: {error}") from error
        try:
            cls: Any = registry.get("pruning", args.method)
        except ConfigError as error:
            raise ConfigError([f"--method: {text}" for text in error.messages]) from error
        overrides: list[str] = []
        # no glob has a =, and --layers takes all words that follow it
        words = [word for word in args.layers if "=" in word]
        layers = [word for word in args.layers if "=" not in word]
        options = read_settings(cls.Options, [*args.overrides, *words], others=overrides)
        if "=" in args.checkpoint and not Path(args.checkpoint).exists():
            raise ConfigError(f"{args.checkpoint!r} is not a checkpoint: name one before KEY=VALUE")
        from sparsepretrain.console import Console
        from sparsepretrain.errors import own_warnings
        from sparsepretrain.export.prune import Request, prune_checkpoint

        console = Console()
        console.loading(args.checkpoint)
        request = Request(
            checkpoint=args.checkpoint,
            name=args.method,
            method=cls(options, n, m),
            out=args.out,
            layers=layers,
            sequences=args.sequences,
            overrides=overrides,
            config_dirs=args.config_dir,
        )
        with own_warnings(console.warn):
            prune_checkpoint(request, console)
        return 0
