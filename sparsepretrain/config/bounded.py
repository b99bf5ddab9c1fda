"""YAML files of users are bounded: aliases and nesting can make a short text endless."""

from __future__ import annotations

from pathlib import Path

from sparsepretrain.errors import ConfigError

MOST_VALUES = 20_000
"""Values and keys of a file, every alias counted as what it stands for: about a second of work."""

DEEPEST = 50
"""Levels of a file."""


def check_yaml(file: Path) -> None:
    """Refuse a YAML file that would take without end to read; anything else is left to its reader.

    Raises:
        ConfigError: it has too many values or levels, or an alias inside what it stands for.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes: dict[str | None, int] = {}  # anchor -> values, aliases counted in full
    levels: list[tuple[str | None, int]] = []  # anchor, values before it
    total = 0
    try:
        with open(file, "rb") as stream:
            for event in yaml.parse(stream, Loader=loader):
                if isinstance(event, yaml.AliasEvent):
                    if any(event.anchor == anchor for anchor, _ in levels):
                        raise _refused(file, event, f"*{event.anchor} is inside &{event.anchor}")
                    total += sizes.get(event.anchor, 0)
                elif isinstance(event, yaml.CollectionStartEvent):
                    levels.append((event.anchor, total))
                    total += 1
                elif isinstance(event, yaml.CollectionEndEvent):
                    anchor, before = levels.pop()
                    if anchor is not None:
                        sizes[anchor] = total - before
                elif isinstance(event, yaml.ScalarEvent):
                    total += 1
                    if event.anchor is not None:
                        sizes[event.anchor] = 1
                if total > MOST_VALUES:
                    raise _refused(file, event, f"more than {MOST_VALUES} values, aliases included")
                if len(levels) > DEEPEST:
                    raise _refused(file, event, f"more than {DEEPEST} levels")
    except (OSError, yaml.YAMLError):
        return  # its reader says more


def _refused(file: Path, event: object, why: str) -> ConfigError:
    line = event.start_mark.line + 1  # type: ignore[attr-defined]
    return ConfigError(f"{file}, line {line}: {why}: this is no configuration")
