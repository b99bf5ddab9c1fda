"""References in a configuration, ``${…}``: counted before one is followed."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from sparsepretrain.config.freeze import flat
from sparsepretrain.errors import ConfigError, SparsePretrainWarning

if TYPE_CHECKING:
    from omegaconf import DictConfig

MOST_REFERENCES = 1000
"""References that all values together may come to."""


def resolve(composed: DictConfig) -> dict[str, Any]:
    """Plain values; warns where one comes from a variable that looks like a secret.

    Raises:
        ConfigError: see :func:`require_few`.
    """
    from omegaconf import OmegaConf

    text = require_few(composed)
    for name in dict.fromkeys(re.findall(r"\$\{oc\.env:(\w+)", text)):
        if re.search("TOKEN|KEY|SECRET|PASSWORD", name, re.IGNORECASE):
            warnings.warn(
                f"what ${name} holds becomes part of the configuration, which the run's directory, "
                "its checkpoints and its trackers keep: a secret does not belong there",
                SparsePretrainWarning,
                stacklevel=2,
            )
    plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in plain.items()}


def require_few(composed: DictConfig) -> str:
    """The configuration as text, unresolved.

    A reference to a value with references, and so on, doubles the work with every level: what each
    value comes to is counted before any is followed.

    Raises:
        ConfigError: they come to more than ``MOST_REFERENCES``.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(composed, resolve=False)
    leaves = flat(_keyed(plain))
    sizes: dict[str, int] = {}

    def size(key: str) -> int:
        """References that follow from what lies at ``key``, a value or a mapping."""
        if key not in sizes:
            sizes[key] = 0  # a circle is left to OmegaConf, which names it
            below = [key] if key in leaves else [k for k in leaves if k.startswith(f"{key}.")]
            for leaf in below:
                for text in re.findall(r"\$\{([^}]*)", str(leaves[leaf])):
                    for dots, name in re.findall(r"(\.*)([\w.\[\]]+)", text):
                        parent = leaf.split(".")[: -len(dots)] if dots else []
                        inner = re.findall(r"[^.\[\]]+", name)
                        sizes[key] += 1 + size(".".join([*parent, *inner]))
            if not below and "." in key:  # in what a reference stands for
                sizes[key] = size(key.rpartition(".")[0])
            if sizes[key] > MOST_REFERENCES:
                most = f"more than {MOST_REFERENCES} references (${{…}})"
                raise ConfigError(f"{key} comes to {most}: write the value itself")
        return sizes[key]

    if sum(map(size, leaves)) > MOST_REFERENCES:
        raise ConfigError(
            f"more than {MOST_REFERENCES} references (${{…}}): write values themselves"
        )
    return str(plain)


def _keyed(value: Any) -> Any:
    """Lists as mappings, as references see them."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {str(key): _keyed(item) for key, item in pairs}
    return value
