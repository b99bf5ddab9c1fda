"""The resolved configuration as text, as an identity, and as a difference."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sparsepretrain.config.places import check_yaml
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.files import require_file

NOT_IDENTITY = (
    *("resume", "runs_dir", "tracker", "seed", "workers", "backend", "deterministic"),
    "checkpoint.background",
)
"""Keys that leave the result alone, but for rounding; the seed stands next to the hash in the
directory name."""

Config = Run | dict[str, Any]


def to_yaml(plain: dict[str, Any]) -> str:
    """The configuration as YAML, in the order of its keys; :func:`from_yaml` is the inverse."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(plain))


def from_yaml(file: Path) -> dict[str, Any]:
    """Read a frozen configuration.

    Raises:
        ConfigError: the file is missing, endless or not a YAML mapping.
    """
    import yaml
    from omegaconf import OmegaConf

    try:
        require_file(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from error
    check_yaml(file)
    try:
        plain = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{file} is not a configuration: it must be a mapping of keys")
    return {str(key): value for key, value in plain.items()}


def identity(config: Config) -> str:
    """Return eight hexadecimal digits that are equal for equal experiments.

    The hash leaves out the keys of ``NOT_IDENTITY``, so all seeds of an experiment share it. Of
    ``parallel`` it keeps the device only, so that a run can continue on another number of ranks. Of
    ``compile`` it keeps only whether the value is true, the one mode that changes rounding. The
    order of keys and the spelling of numbers (``1`` or ``1.0``) make no difference.

    Args:
        config: a run, or a mapping as ``Run.plain`` returns it.
    """
    plain = _canonical(_plain(config))
    for group, _, key in (dotted.rpartition(".") for dotted in NOT_IDENTITY):
        (plain[group] if group else plain).pop(key, None)
    plain["compile"] = plain.get("compile") is True
    plain["parallel"] = {"name": "single", "device": plain["parallel"]["device"]}
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_directory(config: Config) -> Path:
    """``<runs_dir>/<name>/<hash8>-s<seed>``: the same for the same configuration, every time."""
    plain = _plain(config)
    return Path(plain["runs_dir"]) / plain["name"] / f"{identity(config)}-s{plain['seed']}"


def diff(old: Config, new: Config) -> list[str]:
    """``key: old -> new`` for every dotted key that differs, in the order of the keys."""
    left, right = flat(_canonical(_plain(old))), flat(_canonical(_plain(new)))
    keys = list(dict.fromkeys([*left, *right]))
    return [
        f"{key}: {_show(left, key)} -> {_show(right, key)}"
        for key in keys
        if key not in left or key not in right or left[key] != right[key]
    ]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value of every leaf of a plain configuration."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        key: leaf
        for name, item in value.items()
        for key, leaf in flat(item, f"{path}.{name}" if path else name).items()
    }


def _plain(config: Config) -> dict[str, Any]:
    return config.plain if isinstance(config, Run) else config


def _show(leaves: dict[str, Any], key: str) -> str:
    """A value as it is typed."""
    value = leaves.get(key, "absent")
    return value if isinstance(value, str) else json.dumps(value)


def _canonical(value: Any) -> Any:
    """Equal settings as equal JSON: integral floats as integers."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
