"""Masked-token prediction (BERT, arXiv:1810.04805) on prepared token files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sparsepretrain.data.encoding import open_codec
from sparsepretrain.data.source import SPLITS
from sparsepretrain.data.tokens import TokenData
from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, Task, cross_entropy
from sparsepretrain.tasks._bases import WindowTask


@dataclass(slots=True, kw_only=True)
class MaskedLMOptions:
    """Options of the task."""

    name: Literal["masked_lm"]
    sequence_length: Annotated[int, "> 0"]
    probability: Annotated[float, "(0, 1]"]
    mask_fraction: Annotated[float, "[0, 1]"]
    random_fraction: Annotated[float, "[0, 1]"]

    def problems(self) -> Problems:
        total = self.mask_fraction + self.random_fraction
        if total > 1:
            yield "random_fraction", f"and mask_fraction must sum to at most 1, got {total:g}"


@register("task", "masked_lm")
class MaskedLM(WindowTask):
    """Prediction of selected tokens in windows of ``sequence_length`` tokens, without padding.

    Selection and replacement are functions of (seed, split, step, position in the global batch);
    held-out masks are the same in every evaluation and for every run seed.
    """

    Options = MaskedLMOptions
    unit = "masked tokens"
    complete = False

    @staticmethod
    def conflicts(options: Any, model: Any, data: Any) -> Problems:
        yield from Task.conflicts(options, model, data)
        if getattr(data, "has_mask", None) is False and model.vocab_size <= data.vocab_size:
            yield (
                "model.vocab_size",
                f"must be > data.vocab_size ({data.vocab_size}), got {model.vocab_size}: tokenizer "
                f"{data.tokenizer} has no [MASK], so the row after its tokens becomes the mask",
            )

    def opened(self, tokens: TokenData) -> None:
        """Find the mask token and the special tokens, which are never selected."""
        codec = open_codec(tokens.tokenizer_file)
        rows = self.model_options.vocab_size
        mask = tokens.vocab_size if codec.mask is None else codec.mask
        if mask >= rows:
            raise ConfigError(
                f"model.vocab_size must be > {mask}, the id of the mask token of data="
                f"{tokens.name} with tokenizer {self.data_options.tokenizer}, got {rows}"
            )
        self._masking = Masking(self.options, mask, codec.special, codec.vocab_size)

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Return masked ``tokens``, flattened ``positions`` of the selection, and ``targets``."""
        rows = self._windows[split].batch(step, positions, size)[:, :-1]
        arrays = self._masking.apply(rows, self.order_seed(split), split, step, positions)
        names = ("tokens", "positions", "targets")
        return {k: torch.from_numpy(v) for k, v in zip(names, arrays, strict=True)}

    def example(self, size: int, device: torch.device) -> Batch:
        length = self.options.sequence_length
        rows = torch.zeros(size, length, dtype=torch.int64, device=device)
        places = rows.new_zeros(size * selected(self.options.probability, length))
        return {"tokens": rows, "positions": places, "targets": places}

    def count(self, batch: Batch) -> int:
        return int(batch["targets"].numel())

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits of the selected tokens, (selected, vocabulary)."""
        return self.recipe.logits(model, batch["tokens"], batch["positions"])

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return Σ negative log-likelihood of the selected tokens in nats."""
        return cross_entropy(scores, batch["targets"], compiled=self.compiles_loss)

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        logits = self.scores(model, batch)
        targets = batch["targets"]
        count = self.count(batch)
        right = (logits.argmax(-1) == targets).sum()
        return {"loss": (cross_entropy(logits, targets), count), "accuracy": (100 * right, count)}


def selected(probability: float, eligible: int) -> int:
    """Return the number of selected tokens: rounded, at least one if any is eligible.

    Fixed per sample as in BERT's and Cramming's code, so samples have about the same weight and no
    micro-batch is empty.
    """
    return min(eligible, max(1, int(probability * eligible + 0.5)))


class Masking:
    """Selection and replacement of tokens."""

    def __init__(self, options: Any, mask: int, special: Collection[int], vocab_size: int) -> None:
        """Take the task's options; ``special`` tokens are neither selected nor drawn."""
        self._options = options
        self._mask = mask
        self._special = np.array(sorted(special), dtype=np.int64)
        self._ordinary = np.setdiff1d(np.arange(vocab_size), self._special)

    def apply(
        self, rows: np.ndarray, seed: int, split: str, step: int, positions: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mask ``rows``, the samples ``positions`` of the global batch of ``step``.

        Returns masked tokens, selected flattened positions (ascending), and original tokens there.
        """
        tokens = rows.copy()
        length = rows.shape[1]
        ordinary = self._ordinary
        key = np.array([seed, step * len(SPLITS) + SPLITS.index(split)], dtype=np.uint64)
        eligible = ~np.isin(rows, self._special)
        places = [np.zeros(0, dtype=np.int64)]
        for index, position in enumerate(positions):
            # raw words have a stable stream across NumPy versions; the 1 separates them from the
            # order of the windows, whose key is (seed, epoch)
            counter = np.array([0, 0, 1, position], dtype=np.uint64)
            words = np.random.Philox(key=key, counter=counter).random_raw(3 * length)
            candidates = np.flatnonzero(eligible[index])
            count = selected(self._options.probability, len(candidates))
            order = np.argsort(words[:length][candidates], kind="stable")
            chosen = np.sort(candidates[order[:count]])
            # draws belong to positions, independent of which others are selected
            uniform = (words[length + chosen] >> np.uint64(11)) * 2.0**-53
            drawn = ordinary[words[2 * length + chosen] % np.uint64(len(ordinary))]
            masked = self._options.mask_fraction
            replaced = np.where(uniform < masked, self._mask, drawn)
            changed = uniform < masked + self._options.random_fraction
            tokens[index, chosen] = np.where(changed, replaced, tokens[index, chosen])
            places.append(chosen + index * length)
        flat = np.concatenate(places)
        return tokens, flat, rows.reshape(-1)[flat]
