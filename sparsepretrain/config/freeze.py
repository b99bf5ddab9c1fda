"""The resolved configuration as text, as an identity, and as a difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsepretrain.config.groups import key_of
from sparsepretrain.config.places import check_yaml
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.files import require_file

NOT_IDENTITY = (
    *("resume", "runs_dir", "tracker", "seed", "workers", "backend", "deterministic"),
    "checkpoint.background",
    "replay_every",
)
"""Keys that leave the result alone, but for rounding; the seed stands next to the hash in the
directory name."""

Table = dict[tuple[str, str | None], dict[str, Any]]

ADDED: Table = {
    ("model", "gpt2"): {"activation": "gelu_tanh"},
    ("model", "bert"): {"activation": "gelu"},
    ("model", "marian"): {"activation": "relu"},
    ("model", "timm_image"): {"activation": None, "zero_init_last": None},
    ("task", "causal_lm"): {"replacement": False},
    ("task", "image_classification"): {"lighting": 0.0},
    **{("schedule", n): {"start": None} for n in ("cosine", "linear", "inverse_sqrt", "constant")},
    ("precision", "fp8_sim"): {"init_scale": 65536.0, "growth_interval": 2000, "tf32": False},
    ("precision", "fp32"): {"tf32": False},
    ("sparsity", "slope"): {"adapters": {"rank": 0, "start": 0.99}},
    ("checkpoint", None): {"keep_every": 0, "keep_best": 0, "background": False},
    ("parallel", "single"): {"reduction": "fast"},
    ("parallel", "fsdp"): {"gather": "operand"},
}
"""(Group, what is chosen in it; None: nothing is) -> key -> what a configuration without it means.

A configuration that was frozen before the key existed is read as if it had this value, and the hash
leaves the key out at this value, so that a new key makes no new experiments of old ones.
"""

CHANGED: Table = {("sparsity", "sdgp"): {"epsilon": 1.0e-4}}
"""The same for keys whose default is another one now: they are in the hash at every value."""

ADDED_AT_ROOT: dict[str, Any] = {"probe": {}}
"""The same as ``ADDED`` for keys of the root: at these values they are not in the hash."""

Config = Run | dict[str, Any]


def to_yaml(plain: dict[str, Any]) -> str:
    """The configuration as YAML, in the order of its keys; :func:`from_yaml` is the inverse."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(plain))


def from_yaml(file: Path) -> dict[str, Any]:
    """Read a frozen configuration; keys that it is too old for get the value they had in effect.

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
    result = {str(key): value for key, value in plain.items()}
    for table in (ADDED, CHANGED):
        for part, key, value in _meant(result, table):
            part.setdefault(key, value)
    return result


def identity(config: Config) -> str:
    """Eight hexadecimal digits that are equal for equal experiments.

    What ``NOT_IDENTITY`` names is left out, so the seeds of one experiment share it, and of
    ``parallel`` everything but the device, so that a run can go on with other processes; of
    ``compile`` all values but true, which always was another experiment, are one. The order of keys
    and the spelling of numbers (``1`` or ``1.0``) make no difference.
    A mapping is expected as ``Run.plain`` gives it.
    """
    chosen = {k: v for k, v in _plain(config).items() if v != ADDED_AT_ROOT.get(k, ...)}
    plain = _canonical(chosen)
    for group, _, key in (dotted.rpartition(".") for dotted in NOT_IDENTITY):
        (plain[group] if group else plain).pop(key, None)
    for part, key, value in _meant(plain, ADDED):
        if part.get(key) == _canonical(value):
            part.pop(key, None)
    # false is what the other modes say in older configurations
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


def _meant(plain: dict[str, Any], table: Table) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(group of ``plain``, key, value) of what ``table`` says about the choices of ``plain``."""
    for (group, name), keys in table.items():
        part = plain.get(group)
        if isinstance(part, dict) and part.get(key_of(group)) == name:
            for key, value in keys.items():
                yield part, key, value


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
