"""``sparsity.json``: description of exported weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepretrain.sparsity.patterns import Pattern, pattern_text

ABOUT = "sparsity.json"
"""File that describes the exported weights."""


def sparsity_of(
    patterns: Mapping[str, Pattern], layers: Sequence[str], dense: Sequence[str], weights: str
) -> dict[str, Any]:
    """Return the entries about sparse layers.

    Args:
        patterns: sparse layer -> (N, M) that its weights have; empty: they are dense.
        layers: all layers that the method trained.
        dense: layers that ``sparsity.patterns`` left dense; they have an entry if there are any.
        weights: the proof in words.

    Returns:
        ``pattern`` (N:M; several as 1:4+2:4; None: dense), ``weights``, ``layers``, and if there
        are several ``patterns``, N:M -> layers.
    """
    about: dict[str, Any] = {
        "pattern": pattern_text(*patterns.values()) if patterns else None,
        "weights": weights,
        "layers": list(layers),
    }
    if len(groups := grouped(patterns)) > 1:
        about["patterns"] = {pattern_text(pattern): names for pattern, names in groups.items()}
    if dense:
        about["dense"] = list(dense)
    return about


def grouped(patterns: Mapping[str, Pattern]) -> dict[Pattern, list[str]]:
    """Return the layers of each pattern."""
    groups: dict[Pattern, list[str]] = {}
    for name, pattern in patterns.items():
        groups.setdefault(pattern, []).append(name)
    return groups


def layers_by_pattern(about: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return N:M -> layers of the content of a file; empty: the weights are dense."""
    if about["pattern"] is None:
        return {}
    return dict(about.get("patterns") or {about["pattern"]: about["layers"]})
