"""What a source of data is: options, a cheap description of its state, shards of documents."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sparsepretrain.data.tokenizer import BYTES, Tokenizer, tokenizer
from sparsepretrain.files import is_plain_name
from sparsepretrain.limits import Problems

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)

Document = tuple[bytes | str, bool]
"""Text, and whether the document ends with it (large documents come in several pieces)."""


@dataclass(slots=True, kw_only=True)
class SourceOptions:
    """Keys that every source has. ``seed`` is checked here where a source has one."""

    name: str
    """Name of the prepared data: the first part of its directory in the cache."""
    source: str

    about: ClassVar[frozenset[str]] = frozenset({"name"})
    """Keys that do not change the prepared data, so that they are no part of its identity."""

    def problems(self) -> Problems:
        """Rules beyond types, as (key, message)."""
        if not is_plain_name(self.name):
            yield "name", f"must be a plain directory name, got {self.name!r}"
        if not 0 <= (seed := getattr(self, "seed", 0)) < 2**32:
            yield "seed", f"must lie in [0, 2^32), got {seed}"


@dataclass(slots=True, kw_only=True)
class TokenOptions(SourceOptions):
    """Keys of every source whose documents become tokens of a vocabulary."""

    tokenizer: str
    vocab_size: int | None

    hub_tokenizers: ClassVar[bool] = False
    """Whether a tokenizer may also be named as on the Hugging Face hub."""

    def __post_init__(self) -> None:
        if self.vocab_size is None:
            self.vocab_size = tokenizer(self.tokenizer).vocab_size

    @property
    def has_mask(self) -> bool | None:
        """Whether the tokenizer has a mask token; None: only its file knows."""
        return tokenizer(self.tokenizer).has_mask

    def problems(self) -> Problems:
        """Rules beyond types, as (key, message)."""
        yield from SourceOptions.problems(self)
        yield from tokenizer(self.tokenizer).problems(self.vocab_size, hub=self.hub_tokenizers)


@dataclass(slots=True, kw_only=True)
class TextOptions(TokenOptions):
    """Keys of every source of plain text."""

    validation: float
    seed: int

    def problems(self) -> Problems:
        """Rules beyond types, as (key, message)."""
        fraction = self.validation  # sources may also take the name of what is held out
        if isinstance(fraction, float) and not 0 <= fraction < 1:
            yield "validation", f"must lie in [0, 1), got {self.validation}"
        yield from TokenOptions.problems(self)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one split that one worker turns into tokens at a time."""

    split: str
    index: int
    """Place in the split."""
    size: int
    """Amount of text in the source's unit, for progress."""
    items: tuple[Any, ...]
    """What the source needs to read the documents again, in any process."""


def ranges(split: str, total: int, size: int) -> list[Shard]:
    """Shards of ``size`` rows, the last one of what is left; their items are (begin, end)."""
    bounds = ((begin, min(begin + size, total)) for begin in range(0, total, size))
    return [Shard(split, i, end - begin, (begin, end)) for i, (begin, end) in enumerate(bounds)]


class GeneratedSource(ABC):
    """Base of the sources whose samples are computed when asked for: nothing is ever prepared."""

    Options: ClassVar[type[SourceOptions]]
    kind: ClassVar[str]
    """What a task finds in the samples."""
    unit: ClassVar[str]
    """What a sample is, in the plural."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hexadecimal digits: equal ones, equal samples."""

    @abstractmethod
    def count(self, split: str) -> int | None:
        """Samples of a split; None: without end."""

    @abstractmethod
    def samples(self, split: str, seed: int, numbers: Any) -> tuple[Any, ...]:
        """Arrays of the samples ``numbers`` (int64, from 0), a function of these and ``seed``."""


class Source(ABC):
    """Base of the sources. Instances are sent to worker processes, so they must pickle."""

    Options: ClassVar[type[SourceOptions]]
    kind: ClassVar[str] = "text"
    """What a task finds in the documents, see :data:`sparsepretrain.data.formats.FORMATS`."""
    offline: ClassVar[bool]
    """Whether preparing needs no network, so that training may do it on its own."""
    unit: ClassVar[str]
    """Unit of ``Shard.size``."""
    shape: ClassVar[tuple[int, int, int] | None] = None
    """Of small images, (height, width, channels): documents are a label (2 bytes, little-endian)
    and the pixels, without a terminator."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    def tokenizer(self) -> Tokenizer:
        """What documents become; bytes for records (one JSON object each) and images."""
        return tokenizer(getattr(self.options, "tokenizer", BYTES))

    @property
    def vocab_size(self) -> int:
        """Every token is below this."""
        return int(getattr(self.options, "vocab_size", 256))

    @abstractmethod
    def state(self) -> list[Any]:
        """What is there to be read, as JSON values; cheap, since every start asks for it.

        Raises:
            DataError: a local file or directory of the options is missing.
        """

    @abstractmethod
    def shards(self) -> list[Shard]:
        """All shards in order; the same list for the same options and state.

        Raises:
            DataError: the text cannot be found, fetched or split.
        """

    @abstractmethod
    def documents(self, shard: Shard) -> Iterator[Document]:
        """The text of one shard.

        Raises:
            DataError: it cannot be read.
        """

    @staticmethod
    def numbered(shards: Iterable[Shard]) -> list[Shard]:
        """The shards with their places in their splits."""
        counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        return [replace(shard, index=next(counts[shard.split])) for shard in shards]

    def missing(self) -> str:
        """The message when nothing is prepared and training may not prepare on its own."""
        words = f"sparsepretrain prepare data={self.options.name}"
        if self.tokenizer.origin == "file":
            words += f" data.tokenizer={self.tokenizer.name} data.vocab_size={self.vocab_size}"
        return f"{self.options.name} is not prepared: run `{words}`"
