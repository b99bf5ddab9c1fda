"""Check a plain configuration: a :class:`schema.Run`, or every error."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config.compose import Overrides, build, read
from sparsepretrain.config.groups import GROUPS, REGISTERED, key_of, options_of
from sparsepretrain.config.schema import Run
from sparsepretrain.config.strict import walk
from sparsepretrain.errors import ConfigError


def load(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = (), *, nodes: int = 1) -> Run:
    """Compose (see :func:`compose.compose`) and check, reporting all errors together.

    ``nodes`` is the number of machines that the run will have.
    """
    parsed = read(overrides, config_dirs)
    parsed.nodes = nodes
    return load_parsed(parsed)


def load_parsed(parsed: Overrides) -> Run:
    """Do the same as :func:`load` for parsed overrides."""
    if parsed.broken & {"model", "experiment"}:  # other errors may follow from the missing recipe
        raise ConfigError(parsed.errors)
    plain, _ = build(parsed)
    run, errors = _check(plain, parsed.broken)  # skip groups whose choice was rejected
    if parsed.errors or errors or run is None:
        raise ConfigError([*parsed.errors, *errors])
    return run


def validate(plain: dict[str, Any], skip: Collection[str] = ()) -> Run:
    """Check a composed configuration against schema, registry and ranges, without a model.

    Groups in ``skip`` are ignored; they are None in the result.
    """
    run, errors = _check(plain, skip)
    if errors or run is None:
        raise ConfigError(errors)
    return run


def _check(plain: dict[str, Any], skip: Collection[str]) -> tuple[Run | None, list[str]]:
    errors = registry.load_plugins(plain.get("plugins"))
    if isinstance(plain.get("experiment"), dict):
        errors.append("the experiment file must begin with the line '# @package _global_'")
        plain = {**plain, "experiment": None}
    known = {f.name for f in fields(Run)}
    errors += [f"unknown key {key!r}{_near(key, plain)}" for key in plain if key not in known]
    root = {key: value for key, value in plain.items() if key in known}
    parts: list[str] = []
    with contextlib.suppress(ConfigError, AttributeError, KeyError, TypeError):  # reported by _part
        recipe: Any = registry.get("model", root["model"]["family"])
        task = registry.get("task", root["task"]["name"]) and root["task"]["name"]
        if not {"model", "task"} & set(skip) and task not in recipe.tasks:
            # the model's recipe sets keys that this task lacks: one message is enough
            listed = ", ".join(sorted(recipe.tasks))
            chosen = f"model={root['model'].get('name')}"
            parts.append(f"task {task} does not work with {chosen}: its tasks are {listed}")
            skip = {*skip, "task", "data"}
    for group in (*REGISTERED, *GROUPS):
        if group in root:
            root[group] = None if group in skip else _part(group, root[group], parts)
    if isinstance(root.get("probe"), dict):
        root["probe"] = dict(root["probe"])
        for name, options in root["probe"].items():
            try:
                cls = registry.options_of("probe", str(name))
                root["probe"][name] = walk(cls, options, f"probe.{name}", parts)
            except ConfigError as error:
                parts += [f"probe: {message}" for message in error.messages]
    run = walk(Run, root, "", errors)
    return run, errors + parts


def _part(group: str, data: Any, errors: list[str]) -> Any:
    """Build the options of ``group`` with the class that its key names."""
    key = key_of(group)
    problem = ""
    if not isinstance(data, dict):
        problem = f"{group} must be a mapping of keys, got {data!r}"
    elif key not in data:
        problem = f"missing key '{group}.{key}'"
    elif not isinstance(data[key], str):
        problem = f"{group}.{key} must be a string, got {data[key]!r}"
    if problem:
        errors.append(problem)
        return None
    try:
        options = options_of(group, data[key])
    except ConfigError as error:
        errors += [f"{group}.{key}: {message}" for message in error.messages]
        return None
    return walk(options, data, group, errors)


def _near(key: str, plain: dict[str, Any]) -> str:
    """Suggest the group that has an unknown root key, or a similar root key."""
    places = [f"{k}.{key}" for k, part in plain.items() if isinstance(part, dict) and key in part]
    if places:
        return f" (did you mean {' or '.join(map(repr, places))}?)"
    return registry.suggestion(key, [f.name for f in fields(Run)])
