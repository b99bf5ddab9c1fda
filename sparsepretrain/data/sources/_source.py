"""What a source of data is: options, a cheap description of its state, shards of documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.files import is_plain_name
from sparsepretrain.registry import suggestion

BYTES = "bytes"
"""Tokenizer whose tokens are the bytes of the text; byte 0 ends a document."""
TRAINED = ("bpe", "gpt2_size_bpe", "wordpiece", "wordpiece_cased")
"""Tokenizers trained on the train split when the data is prepared."""
VOCABULARY = {
    BYTES: 256,
    "bpe": 4096,
    "gpt2_size_bpe": 50257,
    "gpt2": 50257,
    "openai-community/gpt2": 50257,
    "wordpiece": 32768,
    "wordpiece_cased": 32768,
    "bert-base-uncased": 30522,
    "google-bert/bert-base-uncased": 30522,
}
"""Tokenizer -> ``vocab_size`` where the configuration says null."""
MASKED = frozenset(
    {"wordpiece", "wordpiece_cased", "bert-base-uncased", "google-bert/bert-base-uncased"}
)
"""Those of ``VOCABULARY`` that have a mask token."""
SMALLEST = {
    "bpe": (257, "bytes and end of text"),
    "wordpiece": (6, "five special tokens and one more"),
    "wordpiece_cased": (6, "five special tokens and one more"),
}
"""Trained tokenizer of any size -> its smallest ``vocab_size``, and what that holds."""

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)

Document = tuple[bytes | str, bool]
"""Text, and whether the document ends with it (large documents come in several pieces)."""


@dataclass(slots=True, kw_only=True)
class SourceOptions:
    """Keys that every source has."""

    name: str
    """Name of the prepared data: the first part of its directory in the cache."""
    source: str

    about: ClassVar[frozenset[str]] = frozenset({"name"})
    """Keys that do not change the prepared data, so that they are no part of its identity."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types, as (key, message)."""
        if not is_plain_name(self.name):
            yield "name", f"must be a plain directory name, got {self.name!r}"


@dataclass(slots=True, kw_only=True)
class TokenOptions(SourceOptions):
    """Keys of every source whose documents become tokens of a vocabulary."""

    tokenizer: str
    """bytes, bpe, gpt2_size_bpe, wordpiece, wordpiece_cased, or a tokenizer.json file."""
    vocab_size: int | None
    """Number of token ids; null: filled in for tokenizers whose size is known."""

    hub_tokenizers: ClassVar[bool] = False
    """Whether a tokenizer may also be named as on the Hugging Face hub."""

    def __post_init__(self) -> None:
        if self.vocab_size is None:
            self.vocab_size = VOCABULARY.get(self.tokenizer)

    @property
    def has_mask(self) -> bool | None:
        """Whether the tokenizer has a mask token; None: only its file knows."""
        return self.tokenizer in MASKED if self.tokenizer in VOCABULARY else None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types, as (key, message)."""
        yield from SourceOptions.problems(self)
        yield from self._tokenizer_problems()

    def _tokenizer_problems(self) -> Iterator[tuple[str, str]]:
        known = (BYTES, *TRAINED)
        other = self.tokenizer not in known
        if other and not self.tokenizer.endswith(".json") and not self.hub_tokenizers:
            hint = suggestion(self.tokenizer, known)
            yield "tokenizer", f"must be {', '.join(known)} or a tokenizer.json file{hint}"
        elif self.vocab_size is None:
            yield "vocab_size", f"must be given for tokenizer {self.tokenizer!r}"
        elif self.tokenizer in SMALLEST:
            least, why = SMALLEST[self.tokenizer]
            if self.vocab_size < least:
                yield "vocab_size", f"must be ≥ {least} ({why}), got {self.vocab_size}"
        elif self.tokenizer in VOCABULARY and self.vocab_size != VOCABULARY[self.tokenizer]:
            size = VOCABULARY[self.tokenizer]
            yield (
                "vocab_size",
                f"must be {size} (or null) for tokenizer {self.tokenizer}, got {self.vocab_size}",
            )
        elif self.vocab_size < 1:
            yield "vocab_size", f"must be > 0, got {self.vocab_size}"


@dataclass(slots=True, kw_only=True)
class TextOptions(TokenOptions):
    """Keys of every source of plain text."""

    validation: float
    """Fraction of the text that is held out, in [0, 1)."""
    seed: int
    """Decides which text is held out; the order of training follows from the run's seed."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types, as (key, message)."""
        fraction = self.validation  # sources may also take the name of what is held out
        if isinstance(fraction, float) and not 0 <= fraction < 1:
            yield "validation", f"must lie in [0, 1), got {self.validation}"
        if not 0 <= self.seed < 2**32:
            yield "seed", f"must lie in [0, 2^32), got {self.seed}"
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


class Source(ABC):
    """Base of the sources. Instances are sent to worker processes, so they must pickle."""

    Options: ClassVar[type[SourceOptions]]
    kind: ClassVar[str] = "text"
    """What a task finds in the documents: text, pairs (source, then target), images, records."""
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
    def tokenizer(self) -> str:
        """What documents become; bytes for records (one JSON object each) and images."""
        return str(getattr(self.options, "tokenizer", BYTES))

    @property
    def vocab_size(self) -> int:
        """Every token is below this."""
        return int(getattr(self.options, "vocab_size", VOCABULARY[BYTES]))

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

    def missing(self) -> str:
        """The message when nothing is prepared and training may not prepare on its own."""
        return f"{self.options.name} is not prepared: run `{self.command()}`"

    def command(self) -> str:
        """What prepares this data, with a tokenizer that was given as a file."""
        words = f"sparsepretrain prepare data={self.options.name}"
        if self.tokenizer.endswith(".json"):
            words += f" data.tokenizer={self.tokenizer} data.vocab_size={self.vocab_size}"
        return words
