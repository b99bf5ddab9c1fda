"""Base classes of tasks on running text and of tasks on labeled texts."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsepretrain.data.encoding import Codec, open_codec
from sparsepretrain.data.formats import records
from sparsepretrain.data.order import Shuffle, pad, padded_length, windows
from sparsepretrain.data.preparation import load
from sparsepretrain.data.tokenizer import tokenizer
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import DataError, Problems
from sparsepretrain.models import Head, Headable
from sparsepretrain.tasks import Batch, Observation, Progress, ScoredTask, averages, widen


class WindowTask(ScoredTask):
    """Task on windows of ``options.sequence_length`` tokens of packed documents.

    With ``options.replacement`` each training window is drawn independently, from any start. With
    ``options.documents`` a sample is one document, cut or padded.
    """

    kind = "text"
    complete: ClassVar[bool]
    """True if a full evaluation includes the shorter windows at the ends of a split."""

    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        tokens = load(self.data_options, on_progress=on_progress)
        replacement = getattr(self.options, "replacement", False)
        self._windows = {
            split: windows(
                tokens,
                split,
                self.options.sequence_length,
                self.order_seed(split),
                replacement=replacement and split == "train",
                complete=self.complete and split != "train",
                documents=getattr(self.options, "documents", False),
            )
            for split in splits
        }
        self.fingerprint = tokens.fingerprint
        self.tokenizer_file = tokens.tokenizer_file
        self._require_rows()
        self.opened(tokens)

    def _require_rows(self) -> None:
        """Refuse a tokenizer with more tokens than the embedding of a checkpoint has rows."""
        if not issubclass(self.recipe, Headable):
            return
        known = open_codec(self.tokenizer_file).vocab_size
        rows = self.recipe.vocabulary(self.model_options)
        if known > rows:
            raise DataError(
                f"data.tokenizer={self.data_options.tokenizer} has {known} tokens, but the model "
                f"has rows for {rows}: use the tokenizer that the model was trained with"
            )

    def opened(self, tokens: TokenData) -> None:
        """Inspect the opened data; a hook for subclasses."""

    def samples(self, split: str) -> int:
        return int(self._windows[split].count)

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """Return averages and ``perplexity``, exp(loss) or infinity."""
        values = averages(observations)
        loss = values["loss"]
        return values | {"perplexity": math.exp(loss) if loss < 700 else math.inf}


@dataclass(slots=True, kw_only=True)
class RecordTaskOptions:
    """Keys of every task on records."""

    tokenizer: str
    max_length: Annotated[int, "≥ 8"]

    def problems(self) -> Problems:
        known = tokenizer(self.tokenizer)
        if known.origin == "trained" or (known.origin == "hub" and "/" not in self.tokenizer):
            text = "must be bytes, a tokenizer.json file or owner/name on the hub"
            yield "tokenizer", f"{text}, got {self.tokenizer!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Encoded sequence."""

    ids: np.ndarray
    """(length,) int64."""
    second: int
    """Start of the second text, or the length."""
    target: Any
    """Label, or (start, end)."""
    about: Any = None
    """Information for the metrics."""


class RecordTask(ScoredTask):
    """Task on records in memory with a head on the model's backbone.

    Samples and items are sequences, encoded when the data is opened.
    """

    unit = "examples"
    head: ClassVar[Head]
    """Kind of prediction."""
    target: ClassVar[Any] = 0
    """Placeholder target for batches without data."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Outputs of the head."""

    @property
    def regression(self) -> bool:
        """True if targets are real numbers rather than classes or positions."""
        return False

    @abstractmethod
    def encode(self, records: list[dict[str, Any]], codec: Codec) -> list[Sample]:
        """Encode ``records`` in order."""

    @abstractmethod
    def predictions(self, scores: Tensor, batch: Batch) -> Observation:
        """Return the observations of a batch that :meth:`metrics` needs in addition to the loss."""

    @property
    def capacity(self) -> int:
        """Tokens per padded sample: a multiple of four, so that no MVUE group spans two samples."""
        return padded_length(self.options.max_length)

    def build_model(self) -> nn.Module:
        return self.recipe.build_headed(self.model_options, self.head, self.outputs)

    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        data = load(self.data_options, on_progress=on_progress)
        self.fingerprint = data.fingerprint
        self.tokenizer_file = tokenizer(self.options.tokenizer).file()
        codec = open_codec(self.tokenizer_file)
        if self.tokenizer_file is not None:
            digest = hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()
            self.fingerprint = f"{data.fingerprint}-{digest[:8]}"
        rows = self.recipe.vocabulary(self.model_options)
        if codec.vocab_size > rows:
            raise DataError(
                f"task.tokenizer={self.options.tokenizer} has {codec.vocab_size} tokens, but the "
                f"model has rows for {rows}: use the tokenizer that the model was trained with"
            )
        self._samples = {split: _encoded(self, data, split, codec) for split in splits}
        for split, samples in self._samples.items():
            if not samples:
                raise DataError(f"{data.directory}: there are no records in split {split}")
        self._orders = {
            split: Shuffle(len(samples), self.order_seed(split))
            for split, samples in self._samples.items()
        }

    def samples(self, split: str) -> int:
        return len(self._samples[split])

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        order = self._orders[split].samples(step, positions, size)
        return self.collate([self._samples[split][sample.item] for sample in order])

    def collate(self, samples: list[Sample]) -> Batch:
        """Return a batch: padded ``tokens``, bool ``mask``, ``second``, ``targets``, ``about``."""
        tokens = pad([sample.ids for sample in samples], 0)
        ends = np.array([[len(sample.ids)] for sample in samples])
        seconds = np.array([[sample.second] for sample in samples])
        positions = np.arange(tokens.shape[1])
        kind = torch.float32 if self.regression else torch.int64
        return {
            "tokens": torch.from_numpy(tokens),
            "mask": torch.from_numpy(positions < ends),
            "second": torch.from_numpy((positions >= seconds) & (positions < ends)),
            "targets": torch.tensor([sample.target for sample in samples], dtype=kind),
            "about": [sample.about for sample in samples],
        }

    def example(self, size: int, device: torch.device) -> Batch:
        """Return sequences of maximum length."""
        length = self.capacity
        batch = self.collate([Sample(np.zeros(length), length, self.target)] * size)
        return {k: v if k == "about" else v.to(device) for k, v in batch.items()}

    def count(self, batch: Batch) -> int:
        return len(batch["tokens"])

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 scores of the head."""
        inputs = (batch[key] for key in ("tokens", "mask", "second"))
        return widen(self.recipe.scores(model, *inputs))

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        scores = self.scores(model, batch)
        loss = self.total(scores, batch), self.count(batch)
        return {"loss": loss, **self.predictions(scores, batch)}


def _encoded(task: RecordTask, data: TokenData, split: str, codec: Codec) -> tuple[Sample, ...]:
    # Data is opened twice, to convert epochs to steps and to train: encode it once.
    key = (type(task), repr(task.options), repr(task.data_options), data.fingerprint, split)
    if key not in _cache:
        _cache[key] = tuple(task.encode(records(data, split), codec))
        while len(_cache) > 4:
            del _cache[next(iter(_cache))]
    return _cache[key]


_cache: dict[Any, tuple[Sample, ...]] = {}


def join(*parts: Any) -> np.ndarray:
    """Concatenate tokens of texts and special tokens into one int64 array."""
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
