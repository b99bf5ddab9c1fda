"""Directories of the configuration's YAML files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import sparsepretrain
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import installed_plugins

ENVIRONMENT = "SPARSEPRETRAIN_CONFIG_DIR"
"""Environment variable with directories of a user's YAML files, separated like PATH."""


def shipped() -> Path:
    """Return the shipped YAML directory: in the package (wheel) or next to it (checkout).

    The running package decides: a checkout uses its own files even if a wheel is installed.
    """
    package = Path(sparsepretrain.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


TABLES = "table"
"""Directory of tables, which are sets of runs, see ``studies.tables``."""

PRESETS = "presets"
"""Shipped directory with optimizers and schedules of single recipes, laid out like ``configs/``."""


def search_path(config_dirs: Sequence[Path] = ()) -> list[Path]:
    """Return the shipped directory and its presets, then the user's, in search order.

    Presets have a directory of their own, and not a subdirectory of their group: Hydra 1.4 takes
    ``override /optim: preset/gpt2`` of a recipe for a choice in a group ``optim/preset``.
    """
    named = [Path(d) for d in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if d]
    users = dict.fromkeys(d.expanduser().resolve() for d in [*_plugin_dirs(), *named, *config_dirs])
    errors = [f"config directory {str(d)!r} does not exist" for d in users if not d.is_dir()]
    path = list(dict.fromkeys([shipped(), shipped() / PRESETS, *users]))
    seen: dict[str, Path] = {}
    for directory in path:
        for name in sorted(_files(directory)):
            if name not in seen:
                seen[name] = directory
                continue
            owner = "the shipped" if seen[name] in path[:2] else f"{seen[name]}'s"
            errors.append(f"{directory / name}.yaml would shadow {owner} {name!r}; rename the file")
    if errors:
        raise ConfigError(errors)
    return path


def catalog(config_dirs: Sequence[Path] = ()) -> dict[str, dict[str, Path]]:
    """Return the options of :func:`search_path`, see :func:`options_below`."""
    return options_below(search_path(config_dirs))


def options_below(path: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """Return group -> option -> directory, sorted, with presets of recipes at the end."""
    groups: dict[str, dict[str, Path]] = {}
    for directory in path:
        for name in _files(directory):
            group, _, option = name.partition("/")
            if option and group not in (TABLES, "hydra"):  # launchers and sweepers of `train -m`
                groups.setdefault(group, {})[option] = directory
    presets = shipped() / PRESETS
    return {
        group: dict(sorted(groups[group].items(), key=lambda item: (item[1] == presets, item[0])))
        for group in sorted(groups)
    }


def version(path: Sequence[Path]) -> str:
    """Return a hash of times and sizes of all YAML files; equal: none was written in between."""
    found = []
    for directory in path:
        for file in _yaml_files(directory):
            with contextlib.suppress(FileNotFoundError):  # removed now, or a link to nothing
                about = file.stat()
                found.append((str(file), about.st_mtime_ns, about.st_size))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def _yaml_files(directory: Path) -> list[Path]:
    """Return the YAML files of groups; an option may lie one directory deeper.

    Deeper ones are not looked for: a user's directory may have a whole checkout below it.
    """
    files = (file for depth in ("", "*/", "*/*/") for file in directory.glob(f"{depth}*.yaml"))
    return [file for file in files if not file.name.startswith(".")]


def _files(directory: Path) -> set[str]:
    """Return ``group/option`` (or ``name`` at the root) of the YAML files in ``directory``.

    An option may be ``finetune/glue/mrpc``. Files with a leading underscore are parts of others.
    """
    names = {
        file.relative_to(directory).with_suffix("").as_posix()
        for file in _yaml_files(directory)
        if not file.name.startswith("_")
    }
    if directory == shipped():  # its presets are a directory of the search path themselves
        names = {name for name in names if not name.startswith(f"{PRESETS}/")}
    return names


def _plugin_dirs() -> list[Path]:
    """Return ``configs/`` next to the module of each installed plug-in."""
    directories = []
    for module in installed_plugins():
        with contextlib.suppress(ImportError):  # validate reports it when loading the plug-in
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.origin is not None:
                directories.append(Path(spec.origin).parent / "configs")
    return [directory for directory in directories if directory.is_dir()]
