"""Where the YAML files of the configuration lie, and which of them are too large to read."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import sparsepretrain
from sparsepretrain.errors import ConfigError

ENVIRONMENT = "SPARSEPRETRAIN_CONFIG_DIR"
"""Directories with a user's own configuration files, separated like PATH."""

MOST_BYTES = 1_000_000

DEEPEST = 50
"""Levels of a file."""


def shipped() -> Path:
    """The directory of the shipped YAML files: inside the package (wheel) or next to it (checkout).

    Relative to the running package, so that ``python -m sparsepretrain`` in a checkout uses the
    checkout's files while a wheel is installed.
    """
    package = Path(sparsepretrain.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


TABLES = "table"
"""The directory of files that are no part of a run but sets of runs, see ``config.tables``."""


def search_path(config_dirs: Sequence[Path] = ()) -> list[Path]:
    """The shipped directory, then the user's, in the order in which they are searched.

    Raises:
        ConfigError: a directory that does not exist, or a file that exists in two of them.
    """
    named = [Path(d) for d in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if d]
    users = dict.fromkeys(d.expanduser().resolve() for d in [*_plugin_dirs(), *named, *config_dirs])
    errors = [f"config directory {str(d)!r} does not exist" for d in users if not d.is_dir()]
    path = list(dict.fromkeys([shipped(), *users]))
    seen: dict[str, Path] = {}
    for directory in path:
        for name in sorted(_files(directory)):
            if name not in seen:
                seen[name] = directory
                continue
            owner = "the shipped" if seen[name] == path[0] else f"{seen[name]}'s"
            errors.append(f"{directory / name}.yaml would shadow {owner} {name!r}; rename the file")
    if errors:
        raise ConfigError(errors)
    return path


def catalogue(config_dirs: Sequence[Path] = ()) -> dict[str, dict[str, Path]]:
    """Group -> option -> the directory that it comes from; options sorted within a group."""
    groups: dict[str, dict[str, Path]] = {}
    for directory in search_path(config_dirs):
        for name in _files(directory):
            group, _, option = name.partition("/")
            if option and group != TABLES:
                groups.setdefault(group, {})[option] = directory
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups)}


def _files(directory: Path) -> set[str]:
    """``group/option`` of every YAML file below ``directory``, and ``name`` of those at its root.

    An option may lie one directory deeper: ``finetune/glue/mrpc``.
    A leading underscore hides a file: it is a part of others.
    """
    return {
        file.relative_to(directory).with_suffix("").as_posix()
        for file in yaml_files(directory)
        if not file.name.startswith(("_", "."))
    }


def yaml_files(directory: Path) -> list[Path]:
    """Those of ``directory``, of its groups, and one directory deeper."""
    return [file for depth in ("", "*/", "*/*/") for file in directory.glob(f"{depth}*.yaml")]


def _plugin_dirs() -> list[Path]:
    """``configs/`` next to the module of each installed plugin, where there is one."""
    found = []
    for entry in entry_points(group="sparsepretrain.plugins"):
        with contextlib.suppress(ImportError):  # validate says so when it loads the plugin
            spec = importlib.util.find_spec(entry.module)
            if spec is not None and spec.origin is not None:
                found.append(Path(spec.origin).parent / "configs")
    return [directory for directory in found if directory.is_dir()]


def check_yaml(file: Path, *, aliases: bool = False) -> None:
    """Reject a YAML file that would take too long to read; other faults are left to its reader.

    Args:
        file: YAML.
        aliases: allow ``*name``, which can stand for more values than a file has bytes.

    Raises:
        ConfigError: the file is too large or too deep, or has an alias.
    """
    import yaml

    depth = 0
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{file}: larger than {MOST_BYTES:,} bytes: this is no configuration")
        with open(file, "rb") as stream:
            for event in yaml.parse(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                if isinstance(event, yaml.AliasEvent) and not aliases:
                    raise _refused(file, event, f"the alias *{event.anchor} is not supported")
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > DEEPEST:
                    raise _refused(file, event, f"more than {DEEPEST} levels")
    except (OSError, yaml.YAMLError):
        return


def _refused(file: Path, event: object, why: str) -> ConfigError:
    line = event.start_mark.line + 1  # type: ignore[attr-defined]
    return ConfigError(f"{file}, line {line}: {why}")
