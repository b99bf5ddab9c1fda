"""The verb ``configs``: the configuration groups, their options and the files they come from."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import Verb, add_config_dir, in_columns
from sparsepretrain.registry import register


@register("verb", "configs")
class Configs(Verb):
    summary = "list the configuration groups, their options and where they come from"
    place = 7

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config_dir(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.config.compose import build, read
        from sparsepretrain.config.places import catalogue, shipped

        _, defaults = build(read((), args.config_dir))
        rows = [["group", "option", "from"]]
        for group, options in catalogue(args.config_dir).items():
            for i, (option, directory) in enumerate(options.items()):
                marked = f"{option} *" if defaults.get(group) == option else option
                origin = "configs" if directory == shipped() else str(directory)
                rows.append(["" if i else group, marked, f"{origin}/{group}/{option}.yaml"])
        print(*in_columns(rows), sep="\n")
        print("\n* of a plain `sparsepretrain train`; model=… brings its own choices")
        return 0
