"""Compose overrides and YAML files into one plain dictionary, with Hydra.

Group choices are checked before Hydra sees them. All other overrides are set as if typed with
``++``, so that unknown keys reach the strict check, which reports all mistakes at once.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepretrain.config.freeze import flat, from_yaml
from sparsepretrain.config.places import options_below, search_path, version
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.processes import started
from sparsepretrain.registry import choices, suggestion

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

PAIRS = "model_method"
"""Directory of published settings for a model with a method; ``train.yaml`` includes it."""

PRIMARY = "train"
"""YAML file at the root of the shipped configuration."""


@dataclass(slots=True)
class Overrides:
    """Parsed overrides."""

    path: list[Path]  # directories of YAML files; the shipped one first
    options: dict[str, dict[str, Path]]  # group -> option -> directory
    choices: dict[str, str] = field(default_factory=dict)  # group -> option
    values: list[tuple[str, Any]] = field(default_factory=list)  # other keys, in order
    errors: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # groups with a rejected choice
    # group -> keys that replace the composed ones, before values are set
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # values from the file of a model and a method, with their source
    notes: list[str] = field(default_factory=list)
    nodes: int = 1  # machines with parallel.nproc ranks each


ORDERED = ("sparsity.patterns",)
"""Mappings whose order counts: a given one replaces that of files instead of being merged."""


def compose(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Compose the shipped and the user's YAML files with ``overrides``.

    Args:
        overrides: ``group=option`` and ``key=value`` as typed in a shell; a leading ``+`` or ``++``
            has no effect. The last of several choices or values wins.
        config_dirs: directories laid out like ``configs/``, in addition to those named by
            ``SPARSEPRETRAIN_CONFIG_DIR`` and those of installed plugins.
    """
    parsed = read(overrides, config_dirs)
    if parsed.errors:
        raise ConfigError(parsed.errors)
    return build(parsed)[0]


@functools.cache
def _parser() -> OverridesParser:
    """Return Hydra's parser; making one takes half as long as using it, and tables parse often."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def parse(word: str) -> Override | None:
    """Parse an override with Hydra's grammar; None if it cannot be read."""
    from hydra.errors import HydraException

    try:
        return _parser().parse_override(word)
    except (HydraException, RecursionError, ValueError):
        return None


def read(overrides: Iterable[str] = (), config_dirs: Sequence[Path] = ()) -> Overrides:
    """Sort overrides into group choices, values and errors."""
    from hydra.core.override_parser.types import OverrideType

    path = search_path(config_dirs)
    groups = options_below(path)
    parsed = Overrides(path, groups)
    for text in overrides:
        text = text.strip()
        override = parse(text)
        if override is None:
            parsed.errors.append(_syntax(text))
            continue
        key = override.key_or_group
        if not key:
            problem = f"override {text!r} has no key; write key=value"
        elif key.replace("/", ".").split(".")[0] == "hydra":
            problem = f"{text!r} is for several runs: `sparsepretrain train -m`; leave it out"
        elif override.type == OverrideType.DEL or override.package is not None:
            problem = f"{text!r}: this syntax of Hydra is not supported; leave it out"
        elif override.is_sweep_override():
            problem = (
                f"{text!r} asks for several runs: `sparsepretrain train -m` trains them; give one "
                f"value here (lists: {key}=[a,b])"
            )
        elif key in groups:
            problem = _choose(parsed, key, override.value(), list(groups[key]))
        elif "/" in key:
            problem = f"unknown group {key!r}{suggestion(key.split('/')[0], groups)}"
        else:
            problem = ""
            parsed.values.append((key, override.value()))
        if problem:
            parsed.errors.append(problem)
            parsed.broken.add(key)
    if parsed.broken & set(groups) and any(key == "plugins" for key, _ in parsed.values):
        parsed.errors.append("plugins: give --config-dir DIR with the YAML files of their options")
    return parsed


def build(parsed: Overrides) -> tuple[dict[str, Any], dict[str, str]]:
    """Compose parsed overrides with Hydra.

    Returns:
        The resolved plain configuration, and the final option of each group.
    """
    from omegaconf import OmegaConf, open_dict

    ours = parsed.path[0]
    # a user's group is not in the primary defaults list: append it
    overrides = [
        f"{'' if (ours / group).is_dir() else '+'}{group}={quote(option)}"
        for group, option in parsed.choices.items()
    ]
    with _composing(parsed) as search:
        composed = pickle.loads(_from_files((*overrides, search), version(parsed.path)))
        choices = dict(composed.hydra.runtime.choices)
        _refuse_late(choices, composed.hydra)
        with open_dict(composed):
            del composed["hydra"]
        typed = {key for key, _ in parsed.values}
        if "epochs" in typed and "steps" not in typed:  # steps > 0 of a recipe override epochs
            composed.steps = 0
        for group, block in parsed.blocks.items():
            OmegaConf.update(composed, group, block, merge=False, force_add=True)
        plain = _resolved(composed, parsed.values)
    # If it is a mapping, the experiment file lacks `# @package _global_`; validate reports that.
    if not isinstance(plain.get("experiment"), dict):
        plain["experiment"] = choices.get("experiment")
    parsed.notes = _pair_notes(parsed, f"_{choices['model']}_{choices['sparsity']}.yaml", plain)
    if "batch.micro" not in typed:
        parsed.notes += _share_batch(plain, parsed.nodes)
    chosen = {group: option for group, option in choices.items() if "hydra/" not in group}
    return dict.fromkeys(f.name for f in fields(Run) if f.name in plain) | plain, chosen


@functools.lru_cache(maxsize=128)
def _from_files(overrides: tuple[str, ...], files: str) -> bytes:
    """Compose group choices with Hydra and return the result, pickled: callers change it.

    Kept, since the cells and seeds of a table have the same choices and Hydra takes a tenth of a
    second for each.

    Args:
        overrides: choices and the search path.
        files: version of those of the search path.
    """
    import hydra

    return pickle.dumps(hydra.compose(PRIMARY, [*overrides], return_hydra_config=True))


def chosen_by_experiment(parsed: Overrides) -> dict[str, str]:
    """Return group -> option of the defaults lists of ``experiment`` and of those it includes."""
    found: dict[str, str] = {}
    pending = [parsed.choices.get("experiment")]
    seen: set[str] = set()
    while pending:
        name = str(pending.pop() or "").removeprefix("/experiment/")
        directory = parsed.options["experiment"].get(name)
        if directory is None or name in seen:
            continue
        seen.add(name)
        for entry in from_yaml(directory / "experiment" / f"{name}.yaml").get("defaults", []):
            if isinstance(entry, str):
                pending.append(entry)
                continue
            for key, option in entry.items():
                group = key.removeprefix("override ").strip().removeprefix("/")
                if option is not None:
                    found.setdefault(group, str(option))
    return found


def _refuse_late(choices: dict[str, Any], node: Any) -> None:
    """Refuse a launcher or sweeper that a file of the run's configuration chooses."""
    for group in ("hydra/launcher", "hydra/sweeper"):
        if choices[group] != "basic":
            raise ConfigError(
                f"{group}={choices[group]} in a file comes too late, after the runs are known: "
                "type it after `sparsepretrain train -m`"
            )
    if node.sweeper.get("params"):
        raise ConfigError(
            "hydra.sweeper.params in a file comes too late, after the runs are known: write a file "
            "hydra/sweeper/NAME.yaml and type hydra/sweeper=NAME after `sparsepretrain train -m`"
        )


def _pair_notes(parsed: Overrides, name: str, plain: Any) -> list[str]:
    """Return ``key=value: source`` of each value from the file for this model and method."""
    from omegaconf import OmegaConf

    files = [f for directory in parsed.path if (f := directory / PAIRS / name).is_file()]
    if not files:
        return []
    published = flat(OmegaConf.to_container(OmegaConf.load(files[0])))
    composed = flat(plain)
    return [
        f"{key}={value}: from {PAIRS}/{name}, for this model and method"
        for key, value in published.items()
        if composed.get(key) == value
    ]


def _share_batch(plain: Any, nodes: int) -> list[str]:
    """Lower the recipe's batch.micro until the processes can share the batch; say so in a note."""
    match plain:
        case {
            "batch": {"size": int(size), "micro": int(micro)},
            "parallel": {"name": str(name), "nproc": int() | None as per_node},
        }:
            processes = nodes * (per_node or 1) if name != "single" else 1
            if name != "single" and started():  # torchrun counts: a template gives it no nproc
                processes = int(os.environ["WORLD_SIZE"])
            if micro <= 0 or processes <= 1 or size % processes:
                return []
            fitting = math.gcd(micro, size // processes)
            plain["batch"]["micro"] = fitting
            if fitting < micro:
                return [f"batch.micro={fitting}: {processes} processes share batch.size={size}"]
    return []


def amend(plain: dict[str, Any], parsed: Overrides) -> dict[str, Any]:
    """Return a resolved configuration with other group choices and values.

    A chosen group has the values of its YAML file, without those of the recipe or experiment.
    """
    import hydra
    from omegaconf import OmegaConf

    with _composing(parsed) as search:
        amended = OmegaConf.create(plain)
        for group, option in parsed.choices.items():
            chosen = hydra.compose(None, [f"+{group}={quote(option)}", search])
            amended[group] = OmegaConf.select(chosen, group)
        return _resolved(amended, parsed.values)


@contextmanager
def _composing(parsed: Overrides) -> Iterator[str]:
    """Initialize Hydra; yield the override of the search path. Errors become one line."""
    import hydra
    import yaml
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    ours, *others = parsed.path
    locations = [quote(f"file://{directory}") for directory in others]
    # Hydra 1.3 behaves like 1.1 without version_base, which Hydra 1.4 deprecates.
    base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
    try:
        with hydra.initialize_config_dir(str(ours), job_name=PRIMARY, **base):
            yield f"hydra.searchpath=[{','.join(locations)}]"
    except yaml.YAMLError as error:
        raise ConfigError(f"YAML error: {one_line(error)}") from error
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file)
        near = suggestion(missing.rpartition("/")[2], error.options or ())
        raise ConfigError(f"{missing}.yaml does not exist{near}") from error
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        absent = re.search(r"'(\w+)\.[\w.]+' not found", text)
        if absent and (choice := parsed.choices.get(absent[1])):
            text = f"does not go with {absent[1]}={choice}: {text}"
        raise ConfigError(f"{error.full_key}: {text}") from error
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(
            "a defaults list includes itself, or a key is nested too deeply"
        ) from error
    except (HydraException, OSError, ValueError) as error:
        for group, option in parsed.choices.items():
            from_yaml(parsed.options[group][option] / group / f"{option}.yaml")  # names the file
        raise ConfigError(one_line(error)) from error


def _resolved(composed: DictConfig, values: list[tuple[str, Any]]) -> dict[str, Any]:
    """Set ``values`` as ``++`` does and return a plain dictionary; report all errors at once."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors = []
    for key, value in values:
        try:
            is_block = isinstance(value, dict) and key not in ORDERED
            merge = is_block and OmegaConf.is_dict(OmegaConf.select(composed, key))
            OmegaConf.update(composed, key, value, merge=merge, force_add=True)
        except OmegaConfBaseException as error:
            errors.append(f"{key}: {str(error).splitlines()[0]}")
        except (ValueError, TypeError, AssertionError):
            parent = key.rpartition(".")[0] or key
            errors.append(f"{key} cannot be set: {parent} has no keys of its own")
    if errors:
        raise ConfigError(errors)
    plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in plain.items()}


def _choose(parsed: Overrides, group: str, value: Any, options: list[str]) -> str:
    """Record a group choice; return the error or an empty string."""
    if value is None and group in ("experiment", "finetune"):
        parsed.choices.pop(group, None)
        return ""
    if isinstance(value, dict | list):
        return f"{group} takes the name of an option ({choices(options)}), or write {group}.KEY=…"
    choice = "null" if value is None else str(value)
    if choice in options:
        parsed.choices[group] = choice
        return ""
    problem = f"{group} has no option {choice!r}{suggestion(choice, options)}"
    if group == "teacher":
        problem += f"; for a checkpoint write teacher=checkpoint teacher.path={choice}"
    return problem


def quote(text: str) -> str:
    """Quote a string in Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${") + "'"


def literal(value: Any) -> str:
    """Return a plain value in Hydra's grammar."""
    if isinstance(value, str):
        bare = re.fullmatch(r"[A-Za-z_][\w./-]*", value)
        return value if bare and value.lower() not in ("null", "true", "false") else quote(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def shell_line(words: Iterable[str]) -> str:
    """Return words as a line for a POSIX shell; results of :func:`quote` in double quotes."""
    return " ".join(
        # shlex would write '"'"' for each single quote
        f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)
        for word in words
    )


def _syntax(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals:
        return f"override {text!r} has no value; write {text or 'key'}=value"
    value = text.partition("=")[2]
    quoted = f"'{key}=[\"…\"]'" if value.startswith("[") else f"'{key}=\"…\"'"
    if value.startswith("{"):
        quoted = f'\'{key}={{a: "…", b: "…"}}\', keys without quotes'
    return (
        f"override {text[:60]!r} cannot be read: write a.b.c=value, close every bracket and quote, "
        f"and quote values with special characters: {quoted}"
    )
