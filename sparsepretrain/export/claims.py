"""Sparsity that the files beside a checkpoint declare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparsepretrain.errors import CheckpointError
from sparsepretrain.export.about import ABOUT, layers_by_pattern
from sparsepretrain.files import read_json
from sparsepretrain.sparsity.patterns import pattern_in

CONFIG = "config.json"


@dataclass(frozen=True)
class Claim:
    """Statement of a file about the zeros of a checkpoint."""

    source: str
    """File, and key in it."""
    pattern: tuple[int, int] | None
    """(N, M); None: dense, or zeros without a pattern."""
    layers: tuple[str, ...] | None = None
    """Names of the layers; None: those of the targets that are not ignored."""
    targets: tuple[str, ...] = ()
    """Names, classes (``Linear``) or ``re:`` and an expression, as compressed-tensors has them."""
    ignored: tuple[str, ...] = ()
    zeros: float | None = None
    """Share of zeros in these layers."""

    def covers(self, layer: str, kind: str) -> bool:
        """Return True if the claim is about a layer, of class ``kind``."""
        if self.layers is not None:
            return layer in self.layers
        if any(_is_meant(target, layer, kind) for target in self.ignored):
            return False
        return any(_is_meant(target, layer, kind) for target in self.targets)


def _is_meant(target: str, layer: str, kind: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target in (layer, kind) or fnmatchcase(layer, target)


def read_claims(directory: Path) -> list[Claim]:
    """Return the claims of ``sparsity.json`` and ``config.json``.

    Raises:
        CheckpointError: a file is not JSON, or an entry has another form.
    """
    claims: list[Claim] = []
    for name, reader in ((ABOUT, _of_about), (CONFIG, _of_config)):
        file = directory / name
        if not file.exists():
            continue
        try:
            claims += reader(read_json(file))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
            raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    return claims


def _of_about(about: Mapping[str, Any]) -> Iterator[Claim]:
    groups = layers_by_pattern(about)
    for text, layers in groups.items():
        yield Claim(ABOUT, pattern_in(text), tuple(layers))
    if not groups:
        yield Claim(ABOUT, None, ())


def _of_config(config: Mapping[str, Any]) -> Iterator[Claim]:
    for key in ("quantization_config", "compression_config"):
        outer = config.get(key) or {}
        entry = outer.get("sparsity_config") or {}
        structure = entry.get("sparsity_structure")
        if structure is None:
            continue
        is_pattern = re.fullmatch(r"\d+:\d+", structure) is not None and structure != "0:0"
        yield Claim(
            f"{CONFIG}: {key}.sparsity_config",
            read_pattern(structure) if is_pattern else None,
            targets=_names(entry.get("targets"), ("Linear",)),
            ignored=_names(entry.get("ignore"), ()),
            zeros=entry.get("global_sparsity"),
        )


def _names(value: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(value) if value else default


def read_pattern(text: str) -> tuple[int, int]:
    """Return (N, M) of ``2:4``; raise ValueError if it is not a pattern."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"expected N:M with 0 < N < M, such as 2:4, got {text!r}")
    return int(match[1]), int(match[2])
