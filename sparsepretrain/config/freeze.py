"""Text, identity and differences of resolved configurations."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.files import require_file

NOT_IDENTITY = (
    *("resume", "runs_dir", "tracker", "seed", "workers", "sparse_matmuls", "deterministic"),
    "checkpoint.background",
)
"""Keys without effect on the result except rounding; the seed is part of the directory name."""

Config = Run | dict[str, Any]


def to_yaml(plain: dict[str, Any]) -> str:
    """Return the configuration as YAML, keys in order; :func:`from_yaml` is the inverse."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(plain))


def from_yaml(file: Path) -> dict[str, Any]:
    """Read a frozen configuration."""
    import yaml
    from omegaconf import OmegaConf

    try:
        require_file(file)  # a pipe would block
        plain = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{file} is not a configuration: it must be a mapping of keys")
    return {str(key): value for key, value in plain.items()}


def identity(config: Config) -> str:
    """Return eight hexadecimal digits, equal for equal experiments.

    The order of keys and the spelling of numbers (``1`` or ``1.0``) have no effect.
    """
    return hash_of(experiment(config))


def hash_of(text: str) -> str:
    """Return eight hexadecimal digits: of an :func:`experiment`, its identity."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def experiment(config: Config) -> str:
    """Return what determines the results of a run, as JSON with sorted keys.

    It omits the keys of ``NOT_IDENTITY``. ``parallel`` counts by device, and by ``sync_batchnorm``
    if that is on: a run may continue on another number of ranks. ``compile`` counts if it is
    ``model``, which changes rounding. The order of ``sparsity.patterns`` counts; an empty one is
    omitted.
    """
    plain = _canonical(config)
    for group, _, key in (dotted.rpartition(".") for dotted in NOT_IDENTITY):
        (plain[group] if group else plain).pop(key, None)
    plain["compile"] = plain.get("compile") == "model"
    patterns = plain["sparsity"].pop("patterns", {})
    if patterns != {}:  # as text, whose order is kept: the first match decides
        plain["sparsity"]["patterns"] = json.dumps(patterns)
    parallel = plain["parallel"]
    plain["parallel"] = {"name": "single", "device": parallel["device"]}
    if parallel.get("sync_batchnorm"):
        plain["parallel"]["sync_batchnorm"] = True
    return json.dumps(plain, sort_keys=True)


def run_directory(config: Config) -> Path:
    """Return ``<runs_dir>/<name>/<hash8>-s<seed>``."""
    plain = config.plain if isinstance(config, Run) else config
    return Path(plain["runs_dir"]) / plain["name"] / f"{identity(config)}-s{plain['seed']}"


def diff(old: Config, new: Config) -> list[str]:
    """Return ``key: old -> new`` for every dotted key that differs, in the order of keys."""
    left = flat(_canonical(old))
    right = flat(_canonical(new))
    pairs = {key: (left.get(key, "absent"), right.get(key, "absent")) for key in left | right}
    return [
        f"{key}: " + " -> ".join(v if isinstance(v, str) else json.dumps(v) for v in pair)
        for key, pair in pairs.items()
        if pair[0] != pair[1]
    ]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return dotted key -> value of every leaf of a plain configuration."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        key: leaf
        for name, item in value.items()
        for key, leaf in flat(item, f"{path}.{name}" if path else name).items()
    }


def _canonical(value: Any) -> Any:
    """Return equal JSON values for equal settings: integral floats become integers."""
    if isinstance(value, Run):
        value = value.plain
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
