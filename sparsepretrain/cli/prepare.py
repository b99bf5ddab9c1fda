"""Verb ``prepare``: download and tokenize data."""

from __future__ import annotations

import argparse
import time

from sparsepretrain import registry
from sparsepretrain.cli._verb import ConfiguredVerb, integer_from
from sparsepretrain.registry import register


@register("verb", "prepare")
class Prepare(ConfiguredVerb):
    summary = "download, tokenize and store a data set without training"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--workers", type=integer_from(1), help="threads; default: one per core"
        )

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config import compose, validate
        from sparsepretrain.config.groups import GROUPS, REGISTERED
        from sparsepretrain.console import Console, count
        from sparsepretrain.data.formats import amounts
        from sparsepretrain.data.preparation import prepare
        from sparsepretrain.data.source import GeneratedSource

        plain = compose(args.overrides, args.config_dir)
        # model and task are ignored
        options = validate(plain, {*GROUPS, *REGISTERED} - {"data"}).data
        console = Console()
        if issubclass(registry.get("source", options.source), GeneratedSource):
            console.info(f"{options.name} is generated during training: nothing to prepare")
            return 0
        start = time.monotonic()
        prepared = prepare(options, workers=args.workers, on_progress=console.progress)
        console.stop()
        seconds = time.monotonic() - start
        unit, sizes = amounts(options, prepared)
        total = sum(sizes.values())
        parts = ", ".join(f"{split} {count(size)}" for split, size in sizes.items())
        console.info(f"prepared {count(total)} {unit} ({parts}) in {prepared.directory}")
        console.info(f"{seconds:.1f} s, {count(total / max(seconds, 1e-9))} {unit}/s")
        return 0
