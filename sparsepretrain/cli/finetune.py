"""Verb ``finetune``: ``train`` from the weights of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import UsageError
from sparsepretrain.cli.train import RunVerb
from sparsepretrain.registry import register

EXAMPLES = """\
examples:
  sparsepretrain finetune runs/gpt2_nano/HASH-s0 task=glue/mrpc
  sparsepretrain finetune DIRECTORY-OF-A-HUGGING-FACE-MODEL task=glue/mrpc sparsity=ste

`sparsepretrain configs finetune=OPTION` prints the keys of a recipe.
"""


@register("verb", "finetune")
class Finetune(RunVerb):
    summary = "fine-tune a run or a Hugging Face checkpoint on task=…"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        text = "run directory, checkpoint in it, or Hugging Face checkpoint"
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
        super().add_arguments(parser)
        parser.epilog = EXAMPLES

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.console import Console
        from sparsepretrain.training import derive

        if "=" in args.checkpoint and not Path(args.checkpoint).exists():
            raise UsageError(f"the checkpoint comes first, got {args.checkpoint!r}")
        run = derive.finetuned(args.checkpoint, args.overrides, args.config_dir, Console())
        return self.start(args, run)
