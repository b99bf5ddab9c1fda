"""The verb ``eval``: the metrics of a checkpoint on a whole split."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sparsepretrain.cli._verb import ConfiguredVerb, read_settings
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register

DESCRIPTION = """\
Evaluate a checkpoint on a whole split, every sample once, with the metrics of its task. CHECKPOINT
is a run directory (its newest whole checkpoint), a directory in its checkpoints/, or a Hugging Face
checkpoint (a directory or a name on the hub; then task= and data= are needed). The run's own
configuration is used, with the data, task, precision, batch.micro, … that are given here. The
result is printed and appended as a line of JSON to eval.jsonl of the run directory.
"""


@dataclass(slots=True, kw_only=True)
class Settings:
    """Words of the verb's own; all others are overrides."""

    split: Literal["validation", "test"] = "validation"
    """Which part of the data; training data is augmented, mixed and cut, so no measure."""
    average: Annotated[int, "≥ 1"] = 1
    """Evaluate the mean of the weights of the last so many checkpoints of the run."""
    weights: Literal["sparse", "dense"] = "sparse"
    """sparse: as the method evaluates; dense: the same after densify, as it would be exported."""
    out: str | None = None
    """File for the line of JSON instead of the run's eval.jsonl."""


@register("verb", "eval")
class Eval(ConfiguredVerb):
    summary = "metrics of a checkpoint on a whole split; sparse or densified, averaged"
    place = 4
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
            raise ConfigError(f"{args.checkpoint!r} is no checkpoint: name one before KEY=VALUE")
        from sparsepretrain.tracking.console import Console

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
            dense=settings.weights == "dense",
            out=out,
            console=console,
        )
        return 0
