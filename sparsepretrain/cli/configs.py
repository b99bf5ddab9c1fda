"""Verb ``configs``: configuration groups, their options and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from sparsepretrain.cli._verb import Verb, add_config_dir
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register, suggestion


@register("verb", "configs")
class Configs(Verb):
    summary = "list the configuration groups and their options, or print the keys of some"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        text = "print the file of an option, with comments: sparsity=sste"
        parser.add_argument("options", nargs="*", metavar="GROUP=OPTION", help=text)
        add_config_dir(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config.compose import build, read
        from sparsepretrain.config.places import catalog, shipped
        from sparsepretrain.console import Console

        if args.options:
            print("\n".join(_files(args.options, catalog(args.config_dir))), end="")
            return 0

        _, defaults = build(read((), args.config_dir))
        rows = []
        for group, options in catalog(args.config_dir).items():
            for i, (option, directory) in enumerate(options.items()):
                marked = f"{option} *" if defaults.get(group) == option else option
                inside = directory.is_relative_to(shipped())
                origin = directory.relative_to(shipped().parent) if inside else directory
                rows.append(["" if i else group, marked, f"{origin}/{group}/{option}.yaml"])
        console = Console()
        console.table("", rows, header=("group", "option", "from"), lines=False)
        console.info("\n* default of `sparsepretrain train`; model=… has its own choices")
        return 0


def _files(words: list[str], groups: dict[str, dict[str, Path]]) -> Iterator[str]:
    """Yield the files of ``GROUP=OPTION``, each after a line with its path."""
    for word in words:
        group, _, option = word.partition("=")
        if group not in groups:
            raise ConfigError(f"there is no group {group!r}{suggestion(group, groups)}")
        if option not in groups[group]:
            near = suggestion(option, groups[group], f"{group}=")
            raise ConfigError(f"group {group} has no option {option!r}{near}")
        file = groups[group][option] / group / f"{option}.yaml"
        yield f"# {file}\n{file.read_text(encoding='utf-8')}"
