"""Text to token ids and back: raw bytes, or a tokenizer.json of the ``tokenizers`` library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparsepretrain.data.hub import reason
from sparsepretrain.errors import DataError

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "\0")
"""Names of the token after each document, in the order in which they are looked for; the last one
is that of :func:`byte_tokenizer`."""
MASKS = ("[MASK]", "<mask>")
"""Names of the token that hides another one, in the order in which they are looked for."""
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""First tokens of a trained WordPiece, in BERT's order; [SEP] ends a document."""
LETTERS = 1000
"""Most characters that a trained WordPiece knows, the most frequent ones; as BERT's in the library
``tokenizers``. Words with others are [UNK]."""


LONGEST_WORD = 1000
"""Characters that a tokenizer is trained on in a row without a boundary. The trainer's time grows
with the square of a word, so that one line of megabytes would take hours; longer ones are cut."""


def _runs(*classes: tuple[str, str]) -> re.Pattern[str]:
    """Longer runs of one class of characters; each is given with what must not precede it."""
    return re.compile("|".join(f"{b}{c}{{{LONGEST_WORD + 1},}}" for b, c in classes))


BPE_WORDS = _runs(
    (r"(?<![^\W\d_])", r"[^\W\d_]"),
    (r"(?<!\d)", r"\d"),
    (r"(?<![^\w\s])(?<!_)", r"(?:[^\w\s]|_)"),
    (r"(?<!\s)", r"\s"),
)
"""Too long for training: letters, digits, other marks, spaces; other words end where these do."""
WORDPIECE_WORDS = _runs((r"(?<![^\s!-/:-@\[-`{-~])", r"[^\s!-/:-@\[-`{-~]"))
"""The same of BERT: what is neither a space nor punctuation."""
NO_BREAK = _runs((r"(?<!\S)", r"\S"), (r"(?<!\s)", r"\s"))
"""Where a run of any class can be; quicker to look for."""


class Template(NamedTuple):
    """Special tokens around one text or two, in a model's own way."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    """Between the two texts."""
    suffix: tuple[int, ...]
    """After the second text."""
    end: tuple[int, ...]
    """After a text that is alone."""


class ByteCodec:
    """Tokens are bytes. Byte 0 ends a document: text does not contain it."""

    vocab_size = 256
    end_of_text: int | None = 0
    mask: int | None = None
    special = frozenset({0})
    """Tokens that are not text."""

    def encode(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """One uint8 array per text; strings become UTF-8."""
        raw = (text.encode() if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(text, dtype=np.uint8) for text in raw]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its tokens, and (tokens, 2) int64: the characters that each comes from."""
        spans = []
        for text, ids in zip(texts, self.encode(texts), strict=True):
            widths = np.array([len(character.encode()) for character in text], dtype=np.int64)
            place = np.repeat(np.arange(len(text)), widths)
            spans.append((ids, np.stack([place, place + 1], axis=1)))
        return spans

    def template(self) -> Template:
        """Byte 0 between the texts: in pre-training it separates documents."""
        return Template((), (0,), (), ())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes ``ids``; what is not UTF-8 becomes U+FFFD."""
        return bytes(ids).decode(errors="replace")


class FileCodec:
    """A tokenizer.json. Special tokens that occur in the text are read as ordinary text."""

    def __init__(self, file: Path) -> None:
        """Open ``file``.

        Raises:
            DataError: it is missing or not a tokenizer.
        """
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(f"{file} is not a tokenizer.json: {reason(error)}") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_text, self.mask = (
            next((vocabulary[name] for name in names if name in vocabulary), None)
            for names in (ENDS, MASKS)
        )
        added = self._tokenizer.get_added_tokens_decoder()
        named = [i for i in (self.end_of_text, self.mask) if i is not None]
        self.special = frozenset([*named, *(i for i, token in added.items() if token.special)])

    def encode(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """One int64 array per text; bytes that are not UTF-8 become U+FFFD."""
        strings = [_text(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its tokens, and (tokens, 2) int64: the characters that each comes from."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        pairs = ((each.ids, each.offsets) for each in encodings)
        return [(np.array(i, np.int64), np.array(o, np.int64).reshape(-1, 2)) for i, o in pairs]

    def template(self) -> Template:
        """The tokenizer's own, else [CLS] a [SEP] b [SEP], else end of text between the texts."""
        tokenizer = self._tokenizer
        if tokenizer.num_special_tokens_to_add(True):
            pair, single = tokenizer.encode("a", "a"), tokenizer.encode("a")
            first, second, alone = (
                [i for i, sequence in enumerate(encoding.sequence_ids) if sequence == text]
                for encoding, text in ((pair, 0), (pair, 1), (single, 0))
            )
            return Template(
                tuple(pair.ids[: first[0]]),
                tuple(pair.ids[first[-1] + 1 : second[0]]),
                tuple(pair.ids[second[-1] + 1 :]),
                tuple(single.ids[alone[-1] + 1 :]),
            )
        start, separator = map(tokenizer.token_to_id, ("[CLS]", "[SEP]"))
        if start is not None and separator is not None:
            return Template((start,), (separator,), (separator,), (separator,))
        return Template((), () if self.end_of_text is None else (self.end_of_text,), (), ())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens ``ids``, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


Codec = ByteCodec | FileCodec


def open_codec(file: Path | None) -> Codec:
    """The codec of a tokenizer.json, or of bytes when ``file`` is None.

    Raises:
        DataError: the file is missing or not a tokenizer.
    """
    return ByteCodec() if file is None else FileCodec(file)


def byte_tokenizer() -> str:
    """A tokenizer.json with the tokens of :class:`ByteCodec`; byte 0 is its end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # a byte is the character of its number where that is printable, else the next one from 256 on
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    letters[0] = "\0"  # as text has it: a special token is looked for there
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(letters[0], special=True, normalized=False)])
    return str(tokenizer.to_str())


def train_bpe(texts: Iterable[bytes | str], vocab_size: int) -> str:
    """Train a byte-level BPE as GPT-2 has it, and return its tokenizer.json.

    Small texts give fewer than ``vocab_size`` tokens. Token 0 is ``<|endoftext|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in _pieces(_text(text), BPE_WORDS))
    tokenizer.train_from_iterator(pieces, trainer=trainer)
    return str(tokenizer.to_str())


def train_wordpiece(texts: Iterable[bytes | str], vocab_size: int, *, lowercase: bool) -> str:
    """Train a WordPiece as BERT has it, and return its tokenizer.json.

    The library's own WordPieceTrainer breaks ties by the order of a hash table, so two runs give
    two vocabularies. This is the same rule, merging the most frequent pair, by its BPE trainer,
    which is repeatable: with a mark before each word, a token that begins with the mark begins a
    word, and any other one continues it (``##``). The mark is merged like a letter, so some words
    are learned as a continuation too.

    Small texts give fewer than ``vocab_size`` tokens; the first are ``WORDPIECE_SPECIAL``, then
    letters.

    Args:
        texts: read twice.
        vocab_size: most tokens, special ones included.
        lowercase: also strips accents, as BERT's uncased tokenizer does.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    words, mark = pre_tokenizers.BertPreTokenizer(), "\ue000"  # the normalizer leaves none of it
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(_text(text)))
    seen = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    letters = seen[: min(LETTERS, (vocab_size - len(WORDPIECE_SPECIAL)) // 2)]

    pairs = Tokenizer(models.BPE())
    pairs.normalizer = normalizer
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.Metaspace(mark, prepend_scheme="always", split=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=[mark, *letters],
        limit_alphabet=1 + len(letters),
        show_progress=False,
    )
    cut = (piece for text in texts for piece in _pieces(_text(text), WORDPIECE_WORDS))
    pairs.train_from_iterator(cut, trainer=trainer)

    merged = sorted(pairs.get_vocab().items(), key=lambda item: item[1])
    pieces = [t[1:] if t.startswith(mark) else f"##{t}" for t, _ in merged if t != mark]
    first = [*WORDPIECE_SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = list(dict.fromkeys([*first, *pieces]))[:vocab_size]
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(WORDPIECE_SPECIAL))
    return str(tokenizer.to_str())


def _pieces(text: str, runs: re.Pattern[str]) -> Iterator[str]:
    """``text``, cut in every one of ``runs`` after each ``LONGEST_WORD`` characters."""
    begin = 0
    for run in runs.finditer(text) if NO_BREAK.search(text) else ():
        for at in range(run.start() + LONGEST_WORD, run.end(), LONGEST_WORD):
            yield text[begin:at]
            begin = at
    yield text[begin:]


def _text(text: bytes | str) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")
