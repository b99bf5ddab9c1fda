"""The verb ``bench``: times and memory as JSON."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from sparsepretrain.cli._verb import Verb, add_settings, read_settings, setting_words
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register, suggestion


@dataclass(slots=True, kw_only=True)
class Settings:
    """Words of the verb."""

    suite: str = "cpu"
    """Which measurements."""
    out: str | None = None
    """JSON file for the results."""
    quick: bool = False
    """Fewer repetitions: does it run, not how fast."""


@register("verb", "bench")
class Bench(Verb):
    summary = "measure step times and memory; writes JSON"
    place = 9

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_settings(parser, Settings)

    def words(self, before: list[str], current: str) -> list[str]:
        from sparsepretrain.bench import SUITES

        return [*setting_words(Settings, current), *(f"suite={name}" for name in SUITES)]

    def run(self, args: argparse.Namespace) -> int:
        settings = read_settings(Settings, args.settings)
        from sparsepretrain import bench

        if settings.suite not in bench.SUITES:
            hint = suggestion(settings.suite, bench.SUITES)
            raise ConfigError(f"unknown suite {settings.suite!r}{hint}")
        out = Path(settings.out) if settings.out else None
        result = bench.run(suite=settings.suite, out=out, quick=settings.quick)
        return 0 if result["within_limits"] else 1
