"""What tasks on labelled texts share: records become token sequences, padded in batches."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.tasks import Batch, Task

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from sparsepretrain.data import TokenData
    from sparsepretrain.data.encoding import Codec

BYTES = "bytes"
MULTIPLE = 4
"""Sequences are padded to this, so that groups of four tokens never cross two of them."""


@dataclass(slots=True, kw_only=True)
class EncodedOptions:
    """Keys of every task on records."""

    tokenizer: str
    """tokenizer.json of the model, or bytes."""
    max_length: int
    """Most tokens of a sample, special tokens included."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        if self.max_length < 8:
            yield "max_length", f"must be ≥ 8, got {self.max_length}"
        if self.tokenizer != BYTES and not self.tokenizer.endswith(".json"):
            yield "tokenizer", f"must be bytes or a tokenizer.json file, got {self.tokenizer!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence of tokens."""

    ids: np.ndarray
    """(length,) int64."""
    second: int
    """Where the second text begins, for models that mark it; the length if there is none."""
    target: Any
    """What is to be predicted."""
    about: Any = None
    """What the metrics need to know."""


class EncodedTask(Task):
    """Records in memory, encoded when the data is opened.

    A sample is one sequence, an item of the loss is a sample.
    """

    kind = "records"
    unit = "examples"
    holds: ClassVar[str]
    """What the records have to be."""
    head: ClassVar[str]
    """What is predicted: ``labels`` of a sequence, or ``spans``."""

    def __init__(self, options: Any, model: Any, data: Any, seed: int) -> None:
        super().__init__(options, model, data, seed)
        source: Any = registry.get("source", data.source)
        if source.holds != self.holds:
            raise ConfigError(
                f"data={data.name} has {source.holds}, but task={options.name} needs {self.holds}"
            )
        self._samples: dict[str, tuple[Sample, ...]] = {}
        self._orders: dict[str, Any] = {}

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Numbers that the head predicts."""

    @abstractmethod
    def encode(self, records: list[dict[str, Any]], codec: Codec) -> list[Sample]:
        """The samples of ``records``, in order."""

    @property
    def capacity(self) -> int:
        """Tokens of the longest sample."""
        return -(-self.options.max_length // MULTIPLE) * MULTIPLE

    def build_model(self) -> nn.Module:
        """The backbone with a new head."""
        model: nn.Module = self.recipe.build_headed(self.model_options, self.head, self.outputs)
        return model

    def open_data(
        self, splits: Sequence[str], on_progress: Callable[[Any], None] | None = None
    ) -> None:
        """Open the prepared records and encode them with the model's tokenizer."""
        from sparsepretrain.data import load
        from sparsepretrain.data.encoding import open_codec
        from sparsepretrain.data.order import Shuffle

        data = load(self.data_options, on_progress=on_progress)
        if self.options.tokenizer != BYTES:
            self.tokenizer_file = Path(self.options.tokenizer)
        codec = open_codec(self.tokenizer_file)
        rows = self.recipe.vocabulary(self.model_options)
        if codec.vocab_size > rows:
            raise DataError(
                f"task.tokenizer={self.options.tokenizer} has {codec.vocab_size} tokens, but the "
                f"model has rows for {rows}: use the tokenizer that the model was trained with"
            )
        for split in splits:
            samples = _encoded(self, data, split, codec)
            if not samples:
                raise DataError(f"{data.directory}: there are no records in split {split}")
            self._samples[split] = samples
            self._orders[split] = Shuffle(len(samples), self.seed if split == "train" else 0)
        self.fingerprint = data.fingerprint
        if self.tokenizer_file is not None:
            digest = hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()
            self.fingerprint = f"{data.fingerprint}-{digest[:8]}"

    def samples(self, split: str) -> int:
        """Sequences in one pass."""
        return len(self._samples[split])

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Padded ``tokens``, ``mask`` (bool) and ``second`` (the second text), with ``targets``."""
        places = self._orders[split].places(step, positions, size)
        samples = [self._samples[split][place] for place in places]
        return {**_pad(samples), "targets": self.targets(samples), "about": self.about(samples)}

    @abstractmethod
    def targets(self, samples: list[Sample]) -> torch.Tensor:
        """The targets of a batch."""

    def about(self, samples: list[Sample]) -> list[Any]:
        """What the metrics need to know of each sample."""
        return [sample.about for sample in samples]

    def count(self, batch: Batch) -> int:
        """Sequences."""
        return len(batch["tokens"])

    def _blank(self, size: int, device: torch.device) -> Batch:
        """Sequences of the greatest length, for dry runs."""
        import torch

        shape = (size, self.capacity)
        whole = torch.ones(shape, dtype=torch.bool, device=device)
        return {
            "tokens": torch.zeros(shape, dtype=torch.int64, device=device),
            "mask": whole,
            "second": torch.zeros_like(whole),
        }


def _pad(samples: list[Sample]) -> Batch:
    import torch

    longest = max(len(sample.ids) for sample in samples)
    shape = (len(samples), -(-longest // MULTIPLE) * MULTIPLE)
    tokens = torch.zeros(shape, dtype=torch.int64)
    mask, second = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        tokens[row, :length] = torch.from_numpy(sample.ids)
        mask[row, :length] = True
        second[row, sample.second : length] = True
    return {"tokens": tokens, "mask": mask, "second": second}


def _encoded(task: EncodedTask, data: TokenData, split: str, codec: Codec) -> tuple[Sample, ...]:
    # settling the number of epochs and training open the same data: encode it once
    key = (type(task), repr(task.options), repr(task.data_options), data.fingerprint, split)
    found = _cache.get(key)
    if found is None:
        from sparsepretrain.data.formats import records

        found = _cache[key] = tuple(task.encode(records(data, split), codec))
        while len(_cache) > 4:
            del _cache[next(iter(_cache))]
    return found


_cache: dict[Any, tuple[Sample, ...]] = {}
