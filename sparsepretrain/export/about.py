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
        ``pattern`` (N:M; several as 1:4+2:4; None: dense), ``weights``, ``layers``, and
        ``patterns``, layer -> N:M, if there are several.
    """
    texts = {name: pattern_text(pattern) for name, pattern in patterns.items()}
    about: dict[str, Any] = {
        "pattern": pattern_text(*patterns.values()) if patterns else None,
        "weights": weights,
        "layers": list(layers),
    }
    if len({*texts.values()}) > 1:
        about["patterns"] = texts
    if dense:
        about["dense"] = list(dense)
    return about


def patterns_of(about: Mapping[str, Any]) -> dict[str, str]:
    """Return layer -> N:M of the entries of a file whose ``pattern`` is not None."""
    return dict(about.get("patterns") or dict.fromkeys(about["layers"], about["pattern"]))
