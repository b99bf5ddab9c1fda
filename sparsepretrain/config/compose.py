"""Overrides and YAML files become one plain dictionary. Hydra does the composing.

Group choices are checked here, before Hydra sees them. Every other override is forced in, as if
typed with ``++``, so that unknown keys reach the strict pass, which reports all mistakes at once.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepretrain.config.freeze import flat
from sparsepretrain.config.places import (
    DEEPEST,
    catalogue,
    check_yaml,
    search_path,
    yaml_files,
)
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, SparsePretrainWarning, one_line
from sparsepretrain.registry import choices, suggestion

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

PAIRS = "model_method"
"""Directory of what a paper gives for a model and a method together; ``train.yaml`` includes it."""

PRIMARY = "train"
"""The YAML file at the root of the shipped configuration."""


@dataclass(slots=True)
class Request:
    """What the overrides ask for."""

    path: list[Path]  # where YAML files are searched; the shipped directory first
    options: dict[str, dict[str, Path]]  # what there is: group -> option -> directory
    choices: dict[str, str] = field(default_factory=dict)  # group -> option
    values: list[tuple[str, Any]] = field(default_factory=list)  # of all other keys, in order
    errors: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # groups whose choice was refused
    # group -> keys that take the place of the composed ones, before any value is set
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # values that neither the user nor a chosen file set, with where they come from
    notes: list[str] = field(default_factory=list)


def compose(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Compose the shipped and the user's YAML files with ``overrides`` into plain values.

    Args:
        overrides: ``group=option`` and ``key=value`` as typed in a shell; ``+`` and ``++`` in front
            change nothing. The last of several choices or values wins.
        config_dirs: directories laid out like ``configs/``, in addition to those named by
            ``SPARSEPRETRAIN_CONFIG_DIR`` and those of installed plugins.

    Returns:
        The resolved configuration, root keys in the order of :class:`schema.Run`.

    Raises:
        ConfigError: with all problems of the overrides, or the first one in a file.
    """
    request = read(overrides, config_dirs)
    if request.errors:
        raise ConfigError(request.errors)
    return build(request)[0]


def read(overrides: Iterable[str] = (), config_dirs: Sequence[Path] = ()) -> Request:
    """Sort overrides into group choices and values, and collect what cannot be either.

    Raises:
        ConfigError: a problem of the directories, see :func:`search_path`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    groups = catalogue(config_dirs)
    request = Request(search_path(config_dirs), groups)
    parser = OverridesParser.create()
    for text in overrides:
        text = text.strip()
        try:
            override = parser.parse_override(text)
        except (HydraException, RecursionError):
            request.errors.append(_syntax(text))
            continue
        except ValueError as error:  # an integer of more digits than Python reads
            request.errors.append(f"override {_shortened(text)!r} cannot be read: {error}")
            continue
        key = override.key_or_group
        if override.type == OverrideType.DEL:
            problem = f"{text!r}: keys cannot be removed; leave it out and {key} has its default"
        elif not key:
            problem = f"override {text!r} has no key; write key=value"
        elif key.split(".")[0] == "hydra":
            problem = f"{key!r}: Hydra's own settings have no effect here; leave it out"
        elif override.package is not None:
            problem = f"{text!r}: packages (@) are not supported; write {key}=option"
        elif key.count(".") >= DEEPEST:
            problem = f"override {_shortened(text)!r}: more than {DEEPEST} levels"
        elif override.is_sweep_override():
            problem = f"{text!r} asks for several runs; give one value (lists: {key}=[a,b])"
        elif key in groups:
            problem = _choose(request, key, override.value(), list(groups[key]))
        elif "/" in key:
            problem = f"unknown group {key!r}{suggestion(key.split('/')[0], groups)}"
        else:
            problem = ""
            request.values.append((key, override.value()))
        if problem:
            request.errors.append(problem)
            request.broken.add(key)
    return request


def build(request: Request) -> tuple[dict[str, Any], dict[str, str]]:
    """Let Hydra compose a request.

    Returns:
        The resolved plain configuration, and the option that each group ended with.

    Raises:
        ConfigError: a file that cannot be read or composed, or a value that does not fit.
    """
    import hydra
    from omegaconf import OmegaConf, open_dict

    ours = request.path[0]
    # a group of the user's own is not in the primary defaults list: it is appended
    overrides = [
        f"{'' if (ours / group).is_dir() else '+'}{group}={quote(option)}"
        for group, option in request.choices.items()
    ]
    with _composing(request) as search:
        composed = hydra.compose(PRIMARY, [*overrides, search], return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        typed = {key for key, _ in request.values}
        if "epochs" in typed and "steps" not in typed:  # the recipe's steps are another length
            composed.steps = 0
        for group, block in request.blocks.items():
            OmegaConf.update(composed, group, block, merge=False, force_add=True)
        plain = _resolved(composed, request.values)
    # the file's label; a mapping here means a file without the _global_ package, see validate
    if not isinstance(plain.get("experiment"), dict):
        plain["experiment"] = choices.get("experiment")
    request.notes = _of_the_pair(request, f"_{choices['model']}_{choices['sparsity']}.yaml", plain)
    chosen = {group: option for group, option in choices.items() if "hydra/" not in group}
    return dict.fromkeys(f.name for f in fields(Run) if f.name in plain) | plain, chosen


def _of_the_pair(request: Request, name: str, plain: Any) -> list[str]:
    """``key=value, source`` of what the file for this model and this method has decided."""
    from omegaconf import OmegaConf

    files = [f for directory in request.path if (f := directory / PAIRS / name).is_file()]
    if not files:
        return []
    given, now = flat(OmegaConf.to_container(OmegaConf.load(files[0]))), flat(plain)
    return [
        f"{key}={value}: from {PAIRS}/{name}, for this model and method"
        for key, value in given.items()
        if now.get(key) == value
    ]


def amend(plain: dict[str, Any], request: Request) -> dict[str, Any]:
    """A resolved configuration with other choices of groups and other values.

    A chosen group is what its file says: no recipe or experiment has a part in it.

    Raises:
        ConfigError: a file that cannot be read or composed, or a value that does not fit.
    """
    import hydra
    from omegaconf import OmegaConf

    with _composing(request) as search:
        amended = OmegaConf.create(plain)
        for group, option in request.choices.items():
            chosen = hydra.compose(None, [f"+{group}={quote(option)}", search])
            amended[group] = OmegaConf.select(chosen, group)
        return _resolved(amended, request.values)


@contextmanager
def _composing(request: Request) -> Iterator[str]:
    """Hydra at work, with its override for the user's directories; what it raises is one line."""
    import hydra
    import yaml
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    ours, *users = request.path
    for file in (file for directory in users for file in yaml_files(directory)):
        check_yaml(file)
    try:
        with hydra.initialize_config_dir(str(ours), job_name=PRIMARY, version_base="1.3"):
            yield f"hydra.searchpath=[{','.join(quote(f'file://{user}') for user in users)}]"
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_problem(error)) from error
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file)
        near = suggestion(missing.rpartition("/")[2], error.options or ())
        raise ConfigError(f"{missing}.yaml does not exist{near}") from error
    except InterpolationKeyError as error:
        raise ConfigError(_absent(request, error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        files = ", ".join(map(str, _chosen_files(request)))
        raise ConfigError(f"the defaults list of {files} comes back to itself") from error
    except ConfigError:
        raise
    except (HydraException, OSError, ValueError) as error:
        raise ConfigError(_unreadable(request) or one_line(error)) from error


def _resolved(composed: DictConfig, values: list[tuple[str, Any]]) -> dict[str, Any]:
    """Plain values, after each of ``values`` was forced in as by ``++``; all errors at once."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors = []
    for key, value in values:
        try:
            merge = isinstance(value, dict) and OmegaConf.is_dict(OmegaConf.select(composed, key))
            OmegaConf.update(composed, key, value, merge=merge, force_add=True)
        except OmegaConfBaseException as error:
            errors.append(f"{key}: {str(error).splitlines()[0]}")
        except (ValueError, TypeError, AssertionError):
            parent = key.rpartition(".")[0] or key
            errors.append(f"{key} cannot be set: {parent} has no keys of its own")
    if errors:
        raise ConfigError(errors)
    _warn_of_secrets(str(OmegaConf.to_container(composed, resolve=False)))
    plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in plain.items()}


def _warn_of_secrets(text: str) -> None:
    """Warn if a value comes from an environment variable that looks like a secret."""
    for name in dict.fromkeys(re.findall(r"\$\{oc\.env:(\w+)", text)):
        if re.search("TOKEN|KEY|SECRET|PASSWORD", name, re.IGNORECASE):
            warnings.warn(
                f"what ${name} holds becomes part of the configuration, which the run's directory, "
                "its checkpoints and its trackers keep: a secret does not belong there",
                SparsePretrainWarning,
                stacklevel=2,
            )


def _choose(request: Request, group: str, value: Any, options: list[str]) -> str:
    """Record a group choice; return what is wrong with it."""
    if value is None and group in ("experiment", "finetune"):
        request.choices.pop(group, None)
        return ""
    if isinstance(value, dict | list):
        listed = choices(options, "configs")
        return f"{group} takes the name of an option ({listed}), or write {group}.KEY=…"
    choice = "null" if value is None else str(value)
    if choice in options:
        request.choices[group] = choice
        return ""
    near = suggestion(choice, options, listing="configs")
    listed = "" if "choose from" in near else f"; choose from {choices(options, 'configs')}"
    return f"{group} has no option {choice!r}{near}{listed}"


def quote(text: str) -> str:
    """A string of Hydra's grammar, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${") + "'"


def shell_line(words: Iterable[str]) -> str:
    """Words as a line for a POSIX shell; what :func:`quote` made stands in double quotes."""
    return " ".join(
        # shlex would write '"'"' for each quote in it
        f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)
        for word in words
    )


def _absent(request: Request, error: OmegaConfBaseException) -> str:
    text = str(error).splitlines()[0]
    wanted = re.search(r"'([\w.]+)'", text)
    source = wanted[1].partition(".")[0] if wanted else ""
    reader = str(error.full_key).partition(".")[0]
    choice, own = request.choices.get(source), request.choices.get(reader)
    if wanted is None or choice is None or source == reader:
        return f"{error.full_key}: {text}"
    name = f"{reader}={own}" if own else reader
    return f"{source}={choice} does not go with {name}: {error.full_key} follows {wanted[1]}"


def _unreadable(request: Request) -> list[str]:
    """The user's chosen files that are not YAML mappings; asked only after composing has failed."""
    import yaml
    from omegaconf import OmegaConf

    problems = []
    for file in _chosen_files(request):
        try:
            if not OmegaConf.is_dict(OmegaConf.load(file)):
                problems.append(f"{file} must be a mapping of keys (key: value lines)")
        except UnicodeDecodeError:
            problems.append(f"{file} is not UTF-8 text")
        except (OSError, ValueError) as error:
            problems.append(f"{file} cannot be read: {one_line(error)}")
        except yaml.YAMLError as error:
            problems.append(_yaml_problem(error))
    return problems


def _chosen_files(request: Request) -> list[Path]:
    named = [f"{group}/{option}.yaml" for group, option in request.choices.items()]
    return [d / name for name in named for d in request.path[1:] if (d / name).is_file()]


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _syntax(text: str) -> str:
    if "=" not in text:
        return f"override {text!r} has no value; write {text or 'key'}=value"
    key, _, _ = text.partition("=")
    shown = _shortened(text)
    if not re.fullmatch(r"[+~]*[A-Za-z_]\w*([./@][A-Za-z_]\w*)*", key):
        return f"override {shown!r}: {key!r} is not a key; write a.b.c=value"
    return (
        f"override {shown!r} cannot be read: close every bracket and quote, and put a value with "
        f"special characters in quotes: {key}='\"…\"'"
    )


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"YAML error: {one_line(error)}"
    problem = getattr(error, "problem", None) or getattr(error, "context", None)
    return f"{mark.name}:{mark.line + 1}: YAML error: {problem}"
