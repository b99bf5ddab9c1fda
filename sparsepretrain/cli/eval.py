"""Verb ``eval``: metrics of a checkpoint on a whole split."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sparsepretrain.cli._verb import ConfiguredVerb, read_settings
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register

DESCRIPTION = """\
Evaluate a checkpoint on every sample of a split, with the metrics of its task. CHECKPOINT is a run
directory (newest valid checkpoint), a directory in its checkpoints/, or a Hugging Face checkpoint
(a directory or a hub name, which needs task= and data=). Overrides change the configuration of the
run. The result is printed and appended as a JSON line to eval.jsonl of the run directory.
"""


@dataclass(slots=True, kw_only=True)
class Settings:
    """Keys of the verb; other words are overrides."""

    split: Literal["validation", "test"] = "validation"
    """Split of the data; training data is augmented and thus not a measure."""
    average: Annotated[int, "≥ 1"] = 1
    """Number of last checkpoints whose weights are averaged, up to the given one."""
    out: str | None = None
    """File for the JSON line instead of eval.jsonl of the run."""


@register("verb", "eval")
class Eval(ConfiguredVerb):
    summary = "metrics of a checkpoint on a whole split"
    settings = Settings

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        parser.add_argument(
            "checkpoint", metavar="CHECKPOINT", help="a run, checkpoint or hub name"
        )
        super().add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        overrides: list[str] = []
        settings = read_settings(Settings, args.overrides, others=overrides)
        if "=" in args.checkpoint and not Path(args.checkpoint).exists():
            raise ConfigError(f"{args.checkpoint!r} is not a checkpoint: name one before KEY=VALUE")
        from sparsepretrain.console import Console

        console = Console()
        console.loading(args.checkpoint)
        out = None if settings.out is None else Path(settings.out)
        from sparsepretrain.training.evaluation import evaluate_checkpoint

        evaluate_checkpoint(
            args.checkpoint,
            overrides,
            args.config_dir,
            split=settings.split,
            average=settings.average,
            out=out,
            console=console,
        )
        return 0
