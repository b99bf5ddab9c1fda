"""From a plain configuration to a checked :class:`schema.Run`, or every reason why not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config.compose import Request, build, read
from sparsepretrain.config.groups import GROUPS, REGISTERED, choices_of, key_of, options_of
from sparsepretrain.config.schema import Run
from sparsepretrain.config.strict import walk
from sparsepretrain.errors import ConfigError


def load(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Run:
    """Compose and check in one go, so that wrong choices and wrong keys are reported together.

    The arguments are those of :func:`compose.compose`.

    Raises:
        ConfigError: every problem, one message each.
    """
    return load_request(read(overrides, config_dirs))


def load_request(request: Request) -> Run:
    """Like :func:`load`, for overrides that were read already."""
    plain, _ = build(request)
    # the rest is judged only where a refused choice cannot have caused it: a model or an
    # experiment brings settings for every group
    recipe = request.broken & {"model", "experiment"}
    skip = {*GROUPS, *REGISTERED} if recipe else request.broken
    run, errors = _check(plain, skip)
    if recipe:  # what is wrong with the rest may follow from the missing recipe
        errors = [error for error in errors if error.startswith("unknown key")]
    errors = [*request.errors, *_renamed(request, errors)]
    if errors or run is None:
        raise ConfigError(errors)
    return run


def validate(plain: dict[str, Any], skip: Collection[str] = ()) -> Run:
    """Check a composed configuration against the schema, the registry and the ranges.

    Torch is not imported: option classes and their rules are plain Python.

    Args:
        plain: see :func:`compose.compose`.
        skip: groups that are not looked at, and None in the result.

    Raises:
        ConfigError: every problem, one message each, naming the dotted key.
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
    if not {"model", "task"} & set(skip) and (misfit := _misfit(root)):
        # the model's recipe sets keys that this task does not have: one message is enough
        parts.append(misfit)
        skip = {*skip, "task", "data"}
    for group in (*REGISTERED, *GROUPS):
        if group in root:
            root[group] = None if group in skip else _part(group, root[group], parts)
    if isinstance(root.get("probe"), dict):
        root["probe"] = {k: _probe(k, part, parts) for k, part in root["probe"].items()}
    run = walk(Run, root, "", errors)
    return run, errors + parts


def _renamed(request: Request, errors: list[str]) -> list[str]:
    """``errors``, those of a group of which only the name was changed as one."""
    for key, value in request.values:
        group, _, leaf = key.partition(".")
        if leaf != "name" or key_of(group) != leaf:
            continue
        wrong = [e for e in errors if re.match(rf"(unknown|missing) key '{group}\.", e)]
        if wrong and value in request.options.get(group, ()):
            first, *_ = wrong
            said = f"{key}={value} leaves the other keys as they are: write {group}={value}"
            errors = [said if e is first else e for e in errors if e is first or e not in wrong]
    return errors


def _misfit(root: dict[str, Any]) -> str | None:
    model, task = (root.get(group) for group in ("model", "task"))
    if not isinstance(model, dict) or not isinstance(task, dict):
        return None
    family, name = model.get("family"), task.get("name")
    if family not in registry.names("model") or name not in registry.names("task"):
        return None
    recipe: Any = registry.get("model", family)
    if name in recipe.tasks:
        return None
    chosen = f"model={model.get('name')} (family {family})"
    return (
        f"task {name} does not work with {chosen}: its tasks are {', '.join(sorted(recipe.tasks))}"
    )


def _part(group: str, data: Any, errors: list[str]) -> Any:
    """Build the options of ``group`` with the class that its discriminating key names."""
    key, problem = key_of(group), ""
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
    foreign = _of_other_options(group, [k for k in data if k not in _keys(options)])
    errors += [f"unknown key '{group}.{k}' (belongs to {owners})" for k, owners in foreign.items()]
    return walk(options, {k: v for k, v in data.items() if k not in foreign}, group, errors)


def _probe(name: Any, data: Any, errors: list[str]) -> Any:
    try:
        options = registry.options_of("probe", str(name))
    except ConfigError as error:
        errors += [f"probe: {message}" for message in error.messages]
        return None
    return walk(options, data, f"probe.{name}", errors)


def _of_other_options(group: str, unknown: list[str]) -> dict[str, str]:
    """Those of the ``unknown`` keys that other options of ``group`` have -> these options."""
    if not unknown:
        return {}
    choices: dict[str, set[str]] = {}
    for name in choices_of(group):
        with contextlib.suppress(ConfigError):  # a plugin's without options
            choices[name] = _keys(options_of(group, name))
    owners = {k: [name for name, keys in choices.items() if k in keys] for k in unknown}
    # the option is what a user types, where its file has the name of what it chooses
    key = key_of(group)
    choice = group if key == "name" else f"{group}.{key}"
    return {k: f"{choice}={'|'.join(names)}" for k, names in owners.items() if names}


def _keys(options: Any) -> set[str]:
    return {f.name for f in fields(options)}


def _near(key: str, plain: dict[str, Any]) -> str:
    """A suggestion for an unknown root key: its place in a group, or a similar root key."""
    places = [f"{k}.{key}" for k, part in plain.items() if isinstance(part, dict) and key in part]
    if places:
        return f" (did you mean {' or '.join(map(repr, places))}?)"
    return registry.suggestion(key, [f.name for f in fields(Run)], listing="train --cfg job")
