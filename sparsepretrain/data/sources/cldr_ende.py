"""English and German sentences from a small grammar over CLDR's data: offline, endless, exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparsepretrain.data.sources._source import (
    TEST,
    TRAIN,
    VALIDATION,
    Document,
    Shard,
    Source,
    SourceOptions,
    TokenOptions,
)
from sparsepretrain.errors import DataError
from sparsepretrain.registry import register

GRAMMAR = 1
"""Version of the grammar: raised whenever its sentences change."""
SHARD_PAIRS = 8192
"""Pairs per shard: less than a second of byte-level BPE on one core."""
TRIES = 50
"""Sentences made per sentence kept before the grammar counts as exhausted."""


@dataclass(slots=True, kw_only=True)
class Options(TokenOptions):
    """Options of ``source: cldr_ende``."""

    source: Literal["cldr_ende"]
    train_pairs: int
    """Sentence pairs to train on."""
    validation_pairs: int
    """Sentence pairs of the validation split; 0: none."""
    test_pairs: int
    """Sentence pairs of the test split; 0: none."""
    seed: int
    """Decides which sentences there are; the order of training follows from the run's seed."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types."""
        yield from TokenOptions.problems(self)
        for key in ("validation_pairs", "test_pairs"):
            if getattr(self, key) < 0:
                yield key, f"must be ≥ 0, got {getattr(self, key)}"
        if self.train_pairs <= 0:
            yield "train_pairs", f"must be > 0, got {self.train_pairs}"
        if not 0 <= self.seed < 2**32:
            yield "seed", f"must lie in [0, 2^32), got {self.seed}"


@register("source", "cldr_ende")
class CldrEnDe(Source):
    """Dates, times, amounts, places and languages in clauses of a grammar of our own.

    No sentence comes twice, neither English nor German, so the splits share none. The held-out
    sentences come first: how many there are to train on does not change them.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "pairs"
    offline = True
    unit = "pairs"

    def state(self) -> list[Any]:
        """Versions of the grammar, of Babel (and so of its CLDR data) and of num2words.

        Raises:
            DataError: Babel or num2words is not installed.
        """
        from importlib.metadata import PackageNotFoundError, version

        try:
            return [GRAMMAR, version("babel"), version("num2words")]
        except PackageNotFoundError as error:
            raise DataError(
                f"{self.options.name} needs the packages babel and num2words: "
                "pip install 'sparsepretrain[mt]'"
            ) from error

    def shards(self) -> list[Shard]:
        """All sentences, made here: about a second for 10,000.

        Raises:
            DataError: so many different sentences do not exist.
        """
        from sparsepretrain.data.sources._cldr_grammar import Draw, sentence

        draw, options = Draw(self.options.seed), self.options
        seen: set[str] = set()
        shards = []
        sizes = {VALIDATION: options.validation_pairs, TEST: options.test_pairs}
        for split, size in (sizes | {TRAIN: options.train_pairs}).items():
            kept: list[tuple[str, str]] = []
            for _ in range(TRIES * size):
                if len(kept) == size:
                    break
                pair = sentence(draw)
                if seen.isdisjoint(pair):
                    seen.update(pair)
                    kept.append(pair)
            if len(kept) < size:
                raise DataError(f"data.{split}_pairs: the grammar ran out of new sentences")
            for index, begin in enumerate(range(0, size, SHARD_PAIRS)):
                part = tuple(kept[begin : begin + SHARD_PAIRS])
                shards.append(Shard(split, index, len(part), part))
        return shards

    def documents(self, shard: Shard) -> Iterator[Document]:
        """English and German in turn."""
        for pair in shard.items:
            yield from ((side, True) for side in pair)
