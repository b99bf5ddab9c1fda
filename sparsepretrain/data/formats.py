"""What prepared data holds, by the kind of its source: how it is counted, kept and opened.

Images open in :mod:`sparsepretrain.data.images`, windows of text in
:mod:`sparsepretrain.data.order`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparsepretrain import registry
from sparsepretrain.data.source import TRAIN, Shard, Source
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError

LABEL_BYTES = 2
"""A label is a little-endian integer in front of the pixels of a small image."""
CHUNK = 1 << 24
"""Tokens looked at in one go."""


class Format(NamedTuple):
    """What is counted, and of how many documents one consists."""

    unit: str
    """In the plural."""
    documents: int
    """0: tokens are counted."""


FORMATS = {
    "text": Format("tokens", 0),
    "pairs": Format("pairs", 2),  # pair i is documents 2i (source) and 2i + 1 (target)
    "records": Format("examples", 1),
    "images": Format("images", 1),
}
"""By ``Source.kind``."""


def format_of(source: Source) -> Format:
    """What the documents of ``source`` are; of a kind that a plug-in made up: tokens."""
    return FORMATS.get(source.kind, FORMATS["text"])


def count(source: Source, tokens: np.ndarray, end: int | None) -> int:
    """How many there are in the stream of a split whose documents end with ``end``."""
    documents = format_of(source).documents
    if source.kind == "images" and source.shape is not None:  # rows of equal length have no end
        return len(tokens) // (LABEL_BYTES + math.prod(source.shape))
    if not documents:
        return len(tokens)
    # a part at a time, since a split may not fit into memory
    chunks = (tokens[i : i + CHUNK] == end for i in range(0, len(tokens), CHUNK))
    return sum(int(np.count_nonzero(chunk)) for chunk in chunks) // documents


def raw_targets(source: Source, shards: Sequence[Shard]) -> dict[str, bytes]:
    """Split -> the targets of held-out pairs as they are, each ended by byte 0, for scores."""
    texts: dict[str, bytearray] = {}
    for shard in shards if source.kind == "pairs" else ():
        if shard.split != TRAIN:
            for text, _ in itertools.islice(source.documents(shard), 1, None, 2):
                line = text.encode() if isinstance(text, str) else text
                texts.setdefault(shard.split, bytearray()).extend(line + b"\0")
    return {split: bytes(text) for split, text in texts.items()}


def amounts(options: Any, data: TokenData) -> tuple[str, dict[str, int]]:
    """(unit in the plural, split -> how many) of what was prepared from a source's ``options``."""
    source: Any = registry.get("source", options.source)(options)
    counts = {split: count(source, t, data.end_of_text) for split, t in data.tokens.items()}
    return format_of(source).unit, counts


def records(data: TokenData, split: str) -> list[dict[str, Any]]:
    """The records of a split; none where the data has no such split."""
    if split not in data.tokens:
        return []
    return [json.loads(document) for document in data.tokens[split].tobytes().split(b"\0")[:-1]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of one split."""

    tokens: np.ndarray
    """The stream, as stored."""
    bounds: np.ndarray
    """(pairs, 3) int64: where the source begins, the target begins, and the target ends."""

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def lengths(self) -> np.ndarray:
        """(pairs, 2) int64: tokens of source and target, each with its end token."""
        return np.diff(self.bounds, axis=1)

    def source(self, pair: int) -> np.ndarray:
        """Tokens of the source, its end token last."""
        begin, middle, _ = self.bounds[pair]
        return self.tokens[begin:middle]

    def target(self, pair: int) -> np.ndarray:
        """Tokens of the target, its end token last."""
        _, middle, end = self.bounds[pair]
        return self.tokens[middle:end]


def pairs(data: TokenData, split: str) -> Pairs:
    """The pairs of ``split``.

    Raises:
        DataError: it has none, its documents do not pair up, or nothing ends a document.
    """
    file = data.directory / f"{split}.bin"
    tokens = data.tokens.get(split)
    if tokens is None or not len(tokens):
        raise DataError(
            f"{data.name} has no pairs in split {split!r}: set data.{split} (cldr_ende: "
            f"data.{split}_pairs), or do without the split (validation: eval.batches=0)"
        )
    if data.end_of_text is None:
        raise DataError(f"{data.name}: the tokenizer has no token that ends a sentence")
    ends = np.flatnonzero(tokens == data.end_of_text) + 1
    if len(ends) % 2 or not len(ends) or ends[-1] != len(tokens):
        raise DataError(f"{file} does not hold pairs of sentences: delete {data.directory}")
    begins = np.concatenate([[0], ends[:-1]])
    bounds = np.stack([begins[::2], begins[1::2], ends[1::2]], axis=1)
    return Pairs(tokens, bounds)


def references(data: TokenData, split: str) -> list[str] | None:
    """The raw targets of a held-out split, pair by pair; None: the data was prepared without.

    Raises:
        DataError: there are not as many as pairs.
    """
    file = data.references.get(split)
    if file is None:
        return None
    lines = file.read_bytes().decode(errors="replace").split("\0")[:-1]
    if len(lines) != len(pairs(data, split)):
        raise DataError(f"{file} does not belong to {split}.bin: delete {data.directory}")
    return lines
