"""The verb ``eval``: its words, and from there to the measurement."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError

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
    average: int = 1
    """Evaluate the mean of the weights of the last so many checkpoints of the run."""
    weights: Literal["sparse", "dense"] = "sparse"
    """sparse: as the method evaluates; dense: the same after densify, as it would be exported."""
    out: str | None = None
    """File for the line of JSON instead of the run's eval.jsonl."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        if self.average < 1:
            yield "average", f"must be ≥ 1, got {self.average}"


KEYS = tuple(f.name for f in fields(Settings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb to ``parser``."""
    parser.description = DESCRIPTION
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run, checkpoint or hub name")
    defaults = " ".join(f"{f.name}={f.default}" for f in fields(Settings))
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help=f"group=option or key=value; also {defaults}",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, print and write.

    Raises:
        ConfigError, DataError, CheckpointError: with one line for the user.
    """
    settings, overrides = read(args.overrides)
    if "=" in args.checkpoint and not Path(args.checkpoint).exists():
        raise ConfigError(f"{args.checkpoint!r} is no checkpoint: name one before KEY=VALUE")
    from sparsepretrain import training

    training.evaluate(
        args.checkpoint,
        overrides,
        args.config_dir,
        split=settings.split,
        average=settings.average,
        dense=settings.weights == "dense",
        out=None if settings.out is None else Path(settings.out),
    )
    return 0


def read(words: Sequence[str]) -> tuple[Settings, list[str]]:
    """Tell the verb's own settings from overrides of the configuration.

    Raises:
        ConfigError: a value that a setting cannot have.
    """
    given: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS or not equals:
            overrides.append(word)
        else:
            given[key] = int(value) if key == "average" and value.isdigit() else value
    return build(Settings, given), overrides
