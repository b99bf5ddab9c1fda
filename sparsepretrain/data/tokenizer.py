"""Tokenizers that ``data.tokenizer`` may name: their size and origin."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsepretrain.data.encoding import (
    SETTINGS,
    declare_end,
    declared_end,
    train_bpe,
    train_wordpiece,
)
from sparsepretrain.data.hub import hub_access
from sparsepretrain.errors import DataError, cannot_write, reason
from sparsepretrain.files import cache_directory, require_file, write_atomic, writer_tag
from sparsepretrain.registry import suggestion


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Known tokenizer, tokenizer.json file, or hub repository."""

    name: str
    vocab_size: int | None = None
    """Number of tokens; for trained tokenizers the default size. None: see its file."""
    has_mask: bool | None = None
    """True if there is a mask token; None: see its file."""
    training: str = ""
    """Algorithm that trains it on the train split during preparation; empty: not trained."""
    smallest: tuple[int, str] | None = None
    """Minimum size of a trained tokenizer, and the tokens that it comprises."""

    @property
    def origin(self) -> Literal["bytes", "file", "trained", "hub"]:
        """Origin of the vocabulary; with ``bytes``, byte 0 ends a document."""
        if self.name == BYTES:
            return "bytes"
        if self.name.endswith(".json"):
            return "file"
        return "trained" if self.training else "hub"

    def problems(
        self, vocab_size: int | None, end_of_text: str | None, *, hub: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield (key, message) of each conflict with a configuration.

        ``hub``: the source takes tokenizers of the hub.
        """
        if end_of_text is not None and self.origin in ("bytes", "trained"):
            own = "byte 0" if self.origin == "bytes" else "a token of its own"
            yield "end_of_text", f"must be null with tokenizer {self.name}, which has {own}"
        if self.origin == "hub" and not hub:
            known = [name for name, each in TOKENIZERS.items() if each.origin != "hub"]
            hint = suggestion(self.name, known)
            yield "tokenizer", f"must be {', '.join(known)} or a tokenizer.json file{hint}"
        elif vocab_size is None:
            yield "vocab_size", f"must be given for tokenizer {self.name!r}"
        elif self.smallest is not None:
            least, why = self.smallest
            if vocab_size < least:
                yield "vocab_size", f"must be ≥ {least} ({why}), got {vocab_size}"
        elif self.vocab_size not in (None, vocab_size):
            must = f"must be {self.vocab_size} (or null) for tokenizer {self.name}"
            yield "vocab_size", f"{must}, got {vocab_size}"
        elif vocab_size < 1:
            yield "vocab_size", f"must be > 0, got {vocab_size}"

    def read(self) -> str:
        """Return the tokenizer.json of a file or a hub repository."""
        try:
            path = self._path()
            require_file(path)  # a pipe would block
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # also not UTF-8, or no legal repository name
            hint = ""
            if self.origin == "hub":
                hint = " from the hub (or give a file, or data.tokenizer=gpt2_size_bpe)"
            raise DataError(
                f"data.tokenizer: cannot read {self.name}{hint}: {reason(error)}"
            ) from error

    def _path(self) -> Path:
        """Return the tokenizer.json of a file or a hub repository, whose settings lie beside it."""
        if self.origin == "file":
            return Path(self.name).expanduser()
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        with hub_access():
            for name in SETTINGS:
                # a repository may have none; without a network it may be in no cache
                with contextlib.suppress(EntryNotFoundError):
                    hf_hub_download(self.name, name)
            return Path(hf_hub_download(self.name, "tokenizer.json"))

    def declared_end(self) -> str | None:
        """Return the end-of-text token that the file or repository names, or None.

        Call this after :meth:`read`.
        """
        return declared_end(self._path()) if self.origin in ("file", "hub") else None

    def make(self, texts: Iterable[bytes | str], vocab_size: int) -> str:
        """Return the tokenizer.json, trained on ``texts``, which are iterated twice, or read."""
        if self.origin != "trained":
            return self.read()
        if self.training == "bpe":
            return train_bpe(texts, vocab_size)
        return train_wordpiece(texts, vocab_size, lowercase=self.training == "uncased wordpiece")

    def file(self) -> Path | None:
        """Return the path of the tokenizer.json, cached if from the hub; None: bytes."""
        if self.origin == "bytes":
            return None
        if self.origin == "file":
            return Path(self.name).expanduser()
        if self.origin == "trained":
            raise DataError(f"tokenizer {self.name} is made when data is prepared: give its file")
        content = self.read()
        end = self.declared_end()
        digest = hashlib.sha256(f"{content}{end}".encode()).hexdigest()[:16]
        file = cache_directory() / "tokenizers" / digest / "tokenizer.json"
        if not file.exists():
            tag = writer_tag()  # jobs that share a cache may all begin with the same checkpoint
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                if end is not None:
                    write_atomic(file.with_name(SETTINGS[0]), declare_end(end), tag=tag)
                write_atomic(file, content, tag=tag)
            except OSError as error:
                raise cannot_write(file, error) from error
        return file


BYTES = "bytes"
_WORDS = (6, "five special tokens and one more")

TOKENIZERS = {
    each.name: each
    for each in (
        Tokenizer(BYTES, 256, False),
        Tokenizer("bpe", 4096, False, "bpe", (257, "bytes and end of text")),
        Tokenizer("gpt2_size_bpe", 50257, False, "bpe"),
        Tokenizer("wordpiece", 32768, True, "uncased wordpiece", _WORDS),
        Tokenizer("wordpiece_cased", 32768, True, "wordpiece", _WORDS),
        Tokenizer("gpt2", 50257, False),
        Tokenizer("openai-community/gpt2", 50257, False),
        Tokenizer("bert-base-uncased", 30522, True),
        Tokenizer("google-bert/bert-base-uncased", 30522, True),
    )
}
"""Tokenizers known without a file."""


def tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that a configuration calls ``name``."""
    return TOKENIZERS.get(name) or Tokenizer(name)
