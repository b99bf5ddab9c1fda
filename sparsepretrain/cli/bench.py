"""The verb ``bench``: times and memory as JSON."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsepretrain.cli._verb import UsageError, Verb, add_settings, read_settings, setting_words
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
    methods: str | None = None
    """Of the suites linear, block, train and hours: these only, with commas between them."""
    backend: Literal["emulate", "auto"] | None = None
    """Of those: whether products are sparse where that is faster."""
    fp8: bool = False
    """Of those but hours: whether sparse layers multiply in fp8."""
    budget: float | None = None
    """Seconds after which no further case is begun."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Words of ``bench compare OLD NEW``."""

    threshold: float = 0.1
    """A case regressed if it is worse by more than this part."""


@register("verb", "bench")
class Bench(Verb):
    summary = "measure step times and memory; writes JSON; compares two of its files"
    place = 9

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_settings(parser, Settings)
        parser.epilog = (
            "bench compare OLD NEW [threshold=0.1]: two results files of one suite and machine, "
            "case by case; exit code 1 if one is lost, or regressed by more than the threshold"
        )

    def words(self, before: list[str], current: str) -> list[str]:
        if before[:1] == ["compare"]:
            return setting_words(Comparison, current)
        from sparsepretrain.bench import SUITES

        return ["compare", *setting_words(Settings, current), *(f"suite={name}" for name in SUITES)]

    def run(self, args: argparse.Namespace) -> int:
        if args.settings[:1] == ["compare"]:
            return self._compare(args.settings[1:])
        settings = read_settings(Settings, args.settings)
        from sparsepretrain import bench

        if settings.suite not in bench.SUITES:
            hint = suggestion(settings.suite, bench.SUITES)
            raise ConfigError(f"unknown suite {settings.suite!r}{hint}")
        out = Path(settings.out) if settings.out else None
        choice = None
        if settings.methods or settings.backend or settings.fp8:
            if settings.suite not in bench.CHOOSE:
                several = ", ".join(bench.CHOOSE)
                raise ConfigError(f"methods, backend and fp8 are for suite={several}")
            if settings.fp8 and settings.suite == "hours":
                raise ConfigError("suite=hours measures recipes as they are: leave fp8 out")
            methods = tuple(filter(None, (settings.methods or "").split(",")))
            choice = bench.Choice(methods, settings.backend or "emulate", settings.fp8)
        result = bench.run(
            suite=settings.suite,
            out=out,
            quick=settings.quick,
            choice=choice,
            budget=settings.budget,
        )
        return 0 if result["within_limits"] else 1

    def _compare(self, words: list[str]) -> int:
        files: list[str] = []
        settings = read_settings(Comparison, words, others=files)
        if len(files) != 2:
            given = " ".join(files) or "none"
            raise UsageError(f"bench compare takes two results files, OLD and NEW, got {given}")
        from sparsepretrain.bench.compare import compare

        changes = compare(Path(files[0]), Path(files[1]), settings.threshold)
        return int(any(change.verdict in ("regressed", "lost") for change in changes))
