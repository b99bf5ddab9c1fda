"""Contents of prepared data by the kind of its source: records, images, sentence pairs.

Windows of text open in :mod:`sparsepretrain.data.order`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain import registry
from sparsepretrain.data.source import TRAIN, Shard, Source
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError, reason

if TYPE_CHECKING:
    from PIL.Image import Image

# pair i is documents 2i (source) and 2i + 1 (target)
FORMATS = {
    "pairs": ("pairs", 2),
    "images": ("images", 1),
    "labeled texts": ("examples", 1),
    "questions": ("examples", 1),
}
"""``Source.kind`` -> counted unit in the plural and documents per unit; other kinds: tokens."""


def raw_targets(source: Source, shards: Sequence[Shard]) -> dict[str, bytes]:
    """Return each held-out split's raw target sentences, each followed by byte 0, for BLEU."""
    texts: dict[str, bytearray] = {}
    for shard in shards if source.kind == "pairs" else ():
        if shard.split != TRAIN:
            for text, _ in itertools.islice(source.documents(shard), 1, None, 2):
                line = text.encode() if isinstance(text, str) else text
                texts.setdefault(shard.split, bytearray()).extend(line + b"\0")
    return {split: bytes(text) for split, text in texts.items()}


def amounts(options: Any, data: TokenData) -> tuple[str, dict[str, int]]:
    """Return the counted unit in the plural, and the number of units of each split."""
    source: Any = registry.get("source", options.source)
    if source.kind not in FORMATS:
        return "tokens", {split: len(tokens) for split, tokens in data.tokens.items()}
    unit, documents = FORMATS[source.kind]
    return unit, {split: data.documents(split) // documents for split in data.tokens}


def records(data: TokenData, split: str) -> list[dict[str, Any]]:
    """Return the records of a split, or an empty list if the split is missing."""
    if split not in data.tokens:
        return []
    return [json.loads(document) for document in data.tokens[split].tobytes().split(b"\0")[:-1]]


class Images:
    """Labeled images of one split, found by the index of an :class:`IndexSource`."""

    def __init__(self, options: Any, data: TokenData, split: str, classes: int) -> None:
        """Open a split of ``data``, prepared from the source of ``options``.

        Raises:
            DataError: it has no images, or the last one has a label that the model lacks.
        """
        if split not in data.tokens:
            raise DataError(f"{data.name} has no {split} split")
        self._source: Any = registry.get("source", options.source)(options)
        self._bytes = data.tokens[split]
        self._classes = classes
        self._where = f"{data.name}, {split} split"
        self._bounds = data.bounds[split]
        self.count = data.documents(split)
        """Number of images."""
        if not self.count:
            raise DataError(f"{self._where}: no images")
        self.label(self.count - 1)  # folders come in the order of their labels

    def label(self, index: int) -> int:
        """Return the class of an image; raise DataError if the model lacks it."""
        label = int(self._entry(index)["label"])
        if not 0 <= label < self._classes:
            raise DataError(
                f"{self._where}: image {index} has label {label}, out of range for "
                f"model.classes={self._classes}"
            )
        return label

    def image(self, index: int) -> Image:
        """Return an image in RGB and its own size; raise DataError if missing or damaged."""
        entry = self._entry(index)
        try:
            return to_rgb(self._source.read(entry))
        except Exception as error:  # Pillow's decoders raise many kinds of errors
            text = f"{self._where}: {entry} cannot be read: {reason(error)}"
            raise DataError(text) from error

    def _entry(self, index: int) -> Any:
        begin = self._bounds[index]
        end = self._bounds[index + 1]
        return json.loads(bytes(self._bytes[begin : end - 1]))  # byte 0 ends it


_BITS, _PHOTOMETRIC, _SAMPLES = 258, 262, 339
"""Tags of TIFF: bits per sample, meaning of 0, and type of the samples (2: signed integers)."""


def to_rgb(image: Image) -> Image:
    """Return an image in 8-bit RGB; an alpha channel is dropped, as torchvision does.

    Pillow's conversion would clip 16-bit gray values at 255, and floating-point ones too. Values
    are scaled by the range that the file declares: 12-bit values in a 16-bit PNG stay dark.

    Raises:
        ValueError: the values have no known range.
    """
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    bits = int(np.ravel(tags.get(_BITS, 16))[0])
    is_signed = int(np.ravel(tags.get(_SAMPLES, 1))[0]) == 2
    # Pillow has scaled the values of PGM to 16 bits; older versions read 16-bit PNG as 32 bits
    is_wide = image.mode == "I" and image.format in ("PNG", "PPM")
    if image.mode.startswith("I;16") or is_wide:
        from PIL import Image

        most = (1 << bits) - 1  # 12-bit TIFF is not scaled by Pillow
        values = np.asarray(image).astype(np.uint32)
        if tags.get(_PHOTOMETRIC) == 0:  # 0 is white; Pillow inverts up to 8 bits
            values = most - values
        return Image.fromarray(((values * 255 + most // 2) // most).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F") or is_signed:
        bits = bits if tags else 32
        kind = "floating-point numbers" if image.mode == "F" else "integers"
        sign = "signed " if is_signed else ""
        raise ValueError(
            f"its pixels are {sign}{bits}-bit {kind}: convert it to 8 or 16 bits without a sign"
        )
    return image.convert("RGB")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sentence pairs of one split."""

    tokens: np.ndarray
    """The stream, as stored."""
    bounds: np.ndarray
    """(pairs, 3) int64: source start, target start, target end."""

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def lengths(self) -> np.ndarray:
        """(pairs, 2) int64: tokens of source and target, end tokens included."""
        return np.diff(self.bounds, axis=1)

    def source(self, pair: int) -> np.ndarray:
        """Return the tokens of the source, end token included."""
        begin, middle, _ = self.bounds[pair]
        return self.tokens[begin:middle]

    def target(self, pair: int) -> np.ndarray:
        """Return the tokens of the target, end token included."""
        _, middle, end = self.bounds[pair]
        return self.tokens[middle:end]


def pairs(data: TokenData, split: str) -> Pairs:
    """Return the pairs of ``split``."""
    file = data.directory / f"{split}.bin"
    tokens = data.tokens.get(split)
    if tokens is None or not len(tokens):
        raise DataError(
            f"{data.name} has no pairs in split {split!r}: set data.{split} (cldr_ende: "
            f"data.{split}_pairs), or do without the split (validation: eval.batches=0)"
        )
    if data.end_of_text is None:
        raise DataError(f"{data.name}: the tokenizer has no token that ends a sentence")
    if data.documents(split) % 2 or tokens[-1] != data.end_of_text:
        raise DataError(f"{file} does not hold pairs of sentences: delete {data.directory}")
    bounds = data.bounds[split]
    return Pairs(tokens, np.stack([bounds[:-1:2], bounds[1::2], bounds[2::2]], axis=1))


def references(data: TokenData, split: str) -> list[str]:
    """Return the raw targets of a held-out split, one per pair."""
    return data.references[split].read_bytes().decode(errors="replace").split("\0")[:-1]
