"""How much there is in prepared data, in the unit that its kind is counted in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparsepretrain import registry
from sparsepretrain.data.tokens import TokenData

DOCUMENTS = {"pairs": ("pairs", 2), "records": ("examples", 1), "images": ("images", 1)}
"""Kind of data -> what is counted, and the documents that make one; other kinds: tokens."""

LABEL_BYTES = 2
"""Before the pixels of a small image."""

CHUNK = 1 << 24
"""Tokens looked at in one go."""


def amounts(options: Any, data: TokenData) -> tuple[str, dict[str, int]]:
    """(unit in the plural, split -> how many) of prepared data.

    Args:
        options: of the source.
        data: what was prepared from it.
    """
    source: Any = registry.get("source", options.source)(options)
    if source.kind not in DOCUMENTS:
        return "tokens", {split: len(tokens) for split, tokens in data.tokens.items()}
    unit, documents = DOCUMENTS[source.kind]
    shape = source.shape  # rows of equal length have no terminator
    row = None if shape is None else LABEL_BYTES + math.prod(shape)
    return unit, {
        split: (_ends(tokens, data.end_of_text) if row is None else len(tokens) // row) // documents
        for split, tokens in data.tokens.items()
    }


def _ends(tokens: np.ndarray, end_of_text: int | None) -> int:
    """Documents in a stream of tokens; a part at a time, since it may not fit into memory."""
    return sum(
        int(np.count_nonzero(tokens[i : i + CHUNK] == end_of_text))
        for i in range(0, len(tokens), CHUNK)
    )
