"""Base classes of data sources: options, a cheap description of their state, document shards."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from sparsepretrain.config.compose import compose, literal, shell_line
from sparsepretrain.config.strict import build
from sparsepretrain.data.tokenizer import BYTES, Tokenizer, tokenizer
from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.files import is_plain_name

if TYPE_CHECKING:
    from PIL.Image import Image

TRAIN = "train"
VALIDATION = "validation"
TEST = "test"
SPLITS = (TRAIN, VALIDATION, TEST)

Document = tuple[bytes | str, bool]
"""Text, and True if the document ends with it (large documents come in several pieces)."""


@dataclass(slots=True, kw_only=True)
class SourceOptions:
    """Keys of every source."""

    name: str
    """Name of the prepared data: the first part of its directory in the cache."""
    source: str

    about: ClassVar[frozenset[str]] = frozenset({"name", "size_gb"})
    """Keys that do not change the prepared data and are excluded from its identity."""

    def problems(self) -> Problems:
        """Yield violations of rules beyond types, as (key, message)."""
        if not is_plain_name(self.name):
            yield "name", f"must be a plain directory name, got {self.name!r}"


@dataclass(slots=True, kw_only=True)
class TokenOptions(SourceOptions):
    """Keys of every source with tokenized documents."""

    tokenizer: str
    vocab_size: int | None
    end_of_text: str | None = None

    hub_tokenizers: ClassVar[bool] = False
    """True if a tokenizer may be a repository of the Hugging Face hub."""

    def __post_init__(self) -> None:
        if self.vocab_size is None:
            self.vocab_size = tokenizer(self.tokenizer).vocab_size

    @property
    def has_mask(self) -> bool | None:
        """True if the tokenizer has a mask token; None: unknown before its file is read."""
        return tokenizer(self.tokenizer).has_mask

    def problems(self) -> Problems:
        yield from SourceOptions.problems(self)
        yield from tokenizer(self.tokenizer).problems(
            self.vocab_size, self.end_of_text, hub=self.hub_tokenizers
        )


@dataclass(slots=True, kw_only=True)
class TextOptions(TokenOptions):
    """Keys of every source of plain text."""

    validation: float
    seed: Annotated[int, "[0, 2^32)"]

    def problems(self) -> Problems:
        fraction = self.validation  # in subclasses also the name of a split, or files
        if isinstance(fraction, float) and not 0 <= fraction < 1:
            yield "validation", f"must lie in [0, 1), got {self.validation}"
        yield from TokenOptions.problems(self)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of one split that is tokenized at a time."""

    split: str
    size: int
    """Amount of text in the source's unit, for progress."""
    items: tuple[Any, ...]
    """Arguments from which the source reads the documents."""
    index: int = 0
    """Position among all shards, set by the preparation."""


def ranges(split: str, total: int, size: int) -> list[Shard]:
    """Divide ``total`` rows into shards of ``size`` whose items are (begin, end)."""
    bounds = ((begin, min(begin + size, total)) for begin in range(0, total, size))
    return [Shard(split, end - begin, (begin, end)) for begin, end in bounds]


class GeneratedSource(ABC):
    """Base of sources that compute samples on demand; nothing is prepared."""

    Options: ClassVar[type[SourceOptions]]
    kind: ClassVar[str]
    """Kind of the samples, matched with ``Task.kind``."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the samples."""

    @abstractmethod
    def count(self, split: str) -> int | None:
        """Return the number of samples in a split; None: unlimited."""

    @abstractmethod
    def samples(self, split: str, seed: int, numbers: Any) -> tuple[Any, ...]:
        """Return arrays of the samples ``numbers`` (int64, from 0) under ``seed``."""


class Source(ABC):
    """Base of prepared sources."""

    Options: ClassVar[type[SourceOptions]]
    kind: ClassVar[str] = "text"
    """Kind of the documents, see :data:`sparsepretrain.data.formats.FORMATS`."""
    offline: ClassVar[bool]
    """True if preparing needs no network: training then prepares on its own."""
    unit: ClassVar[str]
    """Unit of ``Shard.size``."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the documents; bytes for records (one JSON object each) and images."""
        return tokenizer(getattr(self.options, "tokenizer", BYTES))

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the tokens."""
        return int(getattr(self.options, "vocab_size", 256))

    @property
    def end_of_text(self) -> str | None:
        """Name of the token after each document; None: it is found."""
        end: str | None = getattr(self.options, "end_of_text", None)
        return end

    @abstractmethod
    def state(self) -> list[Any]:
        """Describe the input in JSON values; called at every start, so it must be cheap.

        Raises:
            DataError: a local file or directory of the options is missing.
        """

    @abstractmethod
    def shards(self) -> list[Shard]:
        """Return all shards in an order that options and state determine.

        Raises:
            DataError: the text cannot be found, fetched or split.
        """

    @abstractmethod
    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield the text of one shard; raise DataError if unreadable."""

    def missing(self) -> str:
        """Return the message for data that training may not prepare on its own."""
        return f"{self.options.name} is not prepared: run {prepare_command(self.options)}"


def prepare_command(options: Any) -> str:
    """Return the shell command that prepares the data of ``options``, in backticks."""
    own = json.loads(json.dumps(dataclasses.asdict(options)))
    command = f"sparsepretrain prepare data={options.name}"
    try:
        plain = compose([f"data={options.name}"])["data"]
        default = dataclasses.asdict(build(type(options), plain))
    except ConfigError:  # the YAML file has another name, or is in a directory of the user's
        return f"`{command}` (with the data options of this run)"
    default = json.loads(json.dumps(default))
    changed = {key: value for key, value in own.items() if value != default.get(key)}
    if changed.get("vocab_size") == tokenizer(getattr(options, "tokenizer", BYTES)).vocab_size:
        del changed["vocab_size"]  # the tokenizer brings it
    words = [f"data.{key}={literal(value)}" for key, value in changed.items()]
    return f"`{shell_line([*command.split(), *words])}`"


class IndexSource(Source):
    """Base of sources of images, which stay in place: the prepared data is an index of them."""

    kind = "images"
    unit = "images"

    @abstractmethod
    def entries(self, shard: Shard) -> Iterator[dict[str, Any]]:
        """Yield the index entries of one shard."""

    @abstractmethod
    def read(self, entry: dict[str, Any]) -> Image:
        """Return the stored image of an index entry."""

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield one JSON object per index entry."""
        for entry in self.entries(shard):
            yield json.dumps(entry, ensure_ascii=True, separators=(",", ":")), True


SHARD_PAIRS = 16384
"""Sentence pairs per shard: 1 to 2 s of byte-level BPE on one core, lost by an interruption."""

Pairs = list[tuple[str, str]]
"""Sentences of the source and the target language."""


class PairSource(Source):
    """Base of offline sources of sentence pairs that fit into memory."""

    kind = "pairs"
    offline = True
    unit = "pairs"

    @abstractmethod
    def pairs(self) -> dict[str, Pairs]:
        """Return the pairs of each split; raise DataError if unreadable."""

    def shards(self) -> list[Shard]:
        return [
            replace(shard, items=tuple(pairs[slice(*shard.items)]))
            for split, pairs in self.pairs().items()
            for shard in ranges(split, len(pairs), SHARD_PAIRS)
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        """Yield source and target in turn."""
        for pair in shard.items:
            yield from ((side, True) for side in pair)
