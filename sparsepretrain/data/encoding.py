"""Text to token ids and back: raw bytes, or a tokenizer.json of the ``tokenizers`` library."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparsepretrain.errors import DataError, reason
from sparsepretrain.files import lfs_pointer, require_file

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "\0")
"""Names of the end-of-document token, in order of preference; the last one is the name in
:func:`byte_tokenizer`."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files of transformers beside a tokenizer.json that name its end-of-text token, ``eos_token``."""
MASKS = ("[MASK]", "<mask>")
"""Names of the mask token, in order of preference."""
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""First tokens of a trained WordPiece in BERT's order; [SEP] ends a document."""
LETTERS = 1000
"""Maximum number of distinct characters in a trained WordPiece, most frequent first; BERT's limit
in ``tokenizers``. Words with other characters become [UNK]."""
LONGEST_WORD = 1000
"""Maximum length of a training word. Training time is quadratic in it: one unbroken line of a few
megabytes would take hours. Longer words are split."""


class Template(NamedTuple):
    """Special tokens around one text or a pair of texts."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    """Between the two texts."""
    suffix: tuple[int, ...]
    """After the second text."""
    end: tuple[int, ...]
    """After a single text."""


class ByteCodec:
    """Codec whose tokens are bytes. Byte 0, which text does not contain, ends a document."""

    vocab_size = 256
    end_of_text: int | None = 0
    mask: int | None = None
    special = frozenset({0})
    """Tokens that are not text."""

    def encode(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """Return one uint8 array per text; strings are encoded as UTF-8."""
        raw = (text.encode() if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(text, dtype=np.uint8) for text in raw]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each text's tokens and their character ranges, (tokens, 2) int64."""
        spans = []
        for text, ids in zip(texts, self.encode(texts), strict=True):
            widths = np.array([len(character.encode()) for character in text], dtype=np.int64)
            place = np.repeat(np.arange(len(text)), widths)
            spans.append((ids, np.stack([place, place + 1], axis=1)))
        return spans

    def template(self) -> Template:
        """Put byte 0 between the texts, as between documents in pre-training."""
        return Template((), (0,), (), ())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes ``ids``; invalid UTF-8 becomes U+FFFD.

        Ids above 255 are left out: a model may have more rows than its tokenizer has tokens.
        """
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileCodec:
    """Codec of a tokenizer.json. Names of special tokens within a text are ordinary text."""

    def __init__(self, file: Path) -> None:
        """Open ``file``."""
        from tokenizers import Tokenizer

        try:
            require_file(file)  # a pipe would block
            if problem := lfs_pointer(file):
                raise ValueError(f"it {problem}")
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(f"{file} is not a tokenizer.json: {reason(error)}") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.declared = declared_end(file)
        """Token that a file beside it names as the end of text; the vocabulary may lack it."""
        self.ends = [name for name in ENDS if name in vocabulary]
        """Tokens that may end a document; the first one does."""
        self.lacks_declared = self.declared is not None and self.declared not in vocabulary
        if self.declared is not None and not self.lacks_declared:
            self.ends = [self.declared]
        self.end_of_text = vocabulary[self.ends[0]] if self.ends else None
        self.mask = next((vocabulary[name] for name in MASKS if name in vocabulary), None)
        added = self._tokenizer.get_added_tokens_decoder()
        used = [i for i in (self.end_of_text, self.mask) if i is not None]
        self.special = frozenset([*used, *(i for i, token in added.items() if token.special)])

    def special_names(self) -> list[str]:
        """Return the names of the tokens that are not text."""
        return [str(self._tokenizer.id_to_token(i)) for i in sorted(self.special)]

    def encode(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """Return one int64 array per text; invalid UTF-8 becomes U+FFFD."""
        strings = [_text(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each text's tokens and their character ranges, (tokens, 2) int64."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        pairs = ((each.ids, each.offsets) for each in encodings)
        return [(np.array(i, np.int64), np.array(o, np.int64).reshape(-1, 2)) for i, o in pairs]

    def template(self) -> Template:
        """Return the tokenizer's own template, else BERT's, else end of text between the texts."""
        tokenizer = self._tokenizer
        if tokenizer.num_special_tokens_to_add(True):
            pair = tokenizer.encode("a", "a")
            single = tokenizer.encode("a")
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
        """Return the text of the tokens ``ids``, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


Codec = ByteCodec | FileCodec


def open_codec(file: Path | None) -> Codec:
    """Return the codec of a tokenizer.json, or of bytes if ``file`` is None."""
    return ByteCodec() if file is None else FileCodec(file)


def token_ids(file: Path | None) -> dict[str, int]:
    """Return token -> id of a tokenizer.json; None: of :func:`byte_tokenizer`."""
    from tokenizers import Tokenizer

    if file is None:
        return dict(Tokenizer.from_str(byte_tokenizer()).get_vocab())
    return dict(Tokenizer.from_file(str(file)).get_vocab())


def declared_end(file: Path) -> str | None:
    """Return the end-of-text token that a file beside a tokenizer.json names, or None.

    Raises:
        DataError: such a file is no JSON object.
    """
    for name in SETTINGS:
        path = file.with_name(name)
        if not path.is_file():
            continue
        try:
            end = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is no JSON object: {reason(error)}") from error
        if isinstance(end, dict):  # an added token with its properties
            end = end.get("content")
        if end:
            return str(end)
    return None


def declare_end(end: str) -> str:
    """Return a tokenizer_config.json that :func:`declared_end` reads."""
    return json.dumps({"eos_token": end}) + "\n"


def byte_tokenizer() -> str:
    """Return a tokenizer.json with the tokens of :class:`ByteCodec`; byte 0 is its end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # special tokens are searched in the raw text
    letters: dict[int, str] = bytes_to_unicode() | {0: "\0"}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(letters[0], special=True, normalized=False)])
    return str(tokenizer.to_str())


def train_bpe(texts: Iterable[bytes | str], vocab_size: int) -> str:
    """Train GPT-2's byte-level BPE and return its tokenizer.json.

    Small texts yield fewer than ``vocab_size`` tokens. Token 0 is ``<|endoftext|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.FixedLength(LONGEST_WORD)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _interruptible(lambda: tokenizer.train_from_iterator(map(_text, texts), trainer=trainer))
    tokenizer.pre_tokenizer = words
    return str(tokenizer.to_str())


def train_wordpiece(texts: Iterable[bytes | str], vocab_size: int, *, lowercase: bool) -> str:
    """Train BERT's WordPiece and return its tokenizer.json.

    The library's WordPieceTrainer breaks ties in hash-table order, so its vocabularies differ
    between runs. Its BPE trainer merges by the same rule, the most frequent pair, and is
    repeatable. A mark precedes each word: a token with the mark starts a word, others continue one
    (``##``). The mark is merged like a letter, so some words are also learned as continuations.

    Args:
        texts: iterated twice. Small texts yield fewer than ``vocab_size`` tokens.
        vocab_size: maximum number of tokens, special ones included.
        lowercase: lowercase and strip accents, as BERT's uncased tokenizer does.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    words = pre_tokenizers.BertPreTokenizer()
    mark = "\ue000"  # the normalizer removes private-use characters
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(_text(text)))
    seen = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    letters = seen[: min(LETTERS, (vocab_size - len(WORDPIECE_SPECIAL)) // 2)]

    pairs = Tokenizer(models.BPE())
    pairs.normalizer = normalizer
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            words,
            pre_tokenizers.FixedLength(LONGEST_WORD),
            pre_tokenizers.Metaspace(mark, prepend_scheme="always", split=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=[mark, *letters],
        limit_alphabet=1 + len(letters),
        show_progress=False,
    )
    _interruptible(lambda: pairs.train_from_iterator(map(_text, texts), trainer=trainer))

    merged = sorted(pairs.get_vocab().items(), key=lambda item: item[1])
    pieces = [t[1:] if t.startswith(mark) else f"##{t}" for t, _ in merged if t != mark]
    first = [*WORDPIECE_SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = list(dict.fromkeys([*first, *pieces]))[:vocab_size]
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(WORDPIECE_SPECIAL))
    return str(tokenizer.to_str())


def _interruptible(work: Callable[[], object]) -> None:
    """Do ``work``, minutes in a native library, in a thread: Ctrl-C reaches the one that waits."""
    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a process that ends does not wait for it
    outcome.result()


def _text(text: bytes | str) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")
