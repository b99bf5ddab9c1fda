"""Translation of sentence pairs in buckets of at most ``max_tokens`` tokens; BLEU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sparsepretrain.data.encoding import open_codec
from sparsepretrain.data.formats import Pairs, pairs, references
from sparsepretrain.data.order import Buckets, pad, padded_length
from sparsepretrain.data.preparation import load
from sparsepretrain.errors import DataError, Problems, needs
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, Progress, ScoredTask, averages, cross_entropy

IGNORED = -100
"""Target at padding, ignored by the loss."""


@dataclass(slots=True, kw_only=True)
class TranslationOptions:
    """Options of the task."""

    name: Literal["translation"]
    max_tokens: Annotated[int, "> 0"]
    max_length: Annotated[int, "> 0"]
    label_smoothing: Annotated[float, "[0, 1)"]
    bleu: bool
    beam: Annotated[int, "> 0"]
    length_penalty: float
    max_decode: tuple[float, int]

    def problems(self) -> Problems:
        if 0 < self.max_tokens < -(-self.max_length // 4) * 4:
            yield (
                "max_tokens",
                f"must be ≥ task.max_length ({self.max_length}, in fours), got {self.max_tokens}",
            )
        a, b = self.max_decode
        if a < 0 or b < 0 or a + b == 0:
            yield "max_decode", f"must be two numbers ≥ 0, one of them > 0, got {[a, b]}"


@register("task", "translation")
class Translation(ScoredTask):
    """Translation of bucketed sentence pairs; items are target tokens, end included.

    A micro-batch of several buckets is padded to the longest, which wastes tokens: prefer
    ``batch.micro=1`` and the largest ``max_tokens`` that fits the device.
    """

    Options = TranslationOptions
    kind = "pairs"
    sample = "buckets of pairs"
    metric = "bleu"

    @property
    def capacity(self) -> int:
        """Maximum tokens of a training bucket."""
        return self._buckets["train"].capacity if "train" in self._buckets else 0

    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        data = load(self.data_options, on_progress=on_progress)
        self._pairs = {s: self._choose(s, pairs(data, s), data.name) for s in splits}
        self._buckets = {
            split: Buckets(chosen.lengths, self.options.max_tokens, self.order_seed(split))
            for split, chosen in self._pairs.items()
        }
        held_out = [split for split in splits if split != "train" and self.options.bleu]
        self._references = {split: references(data, split) for split in held_out}
        self._codec = open_codec(data.tokenizer_file)
        self._end = int(data.end_of_text or 0)
        self.fingerprint = data.fingerprint
        self.tokenizer_file = data.tokenizer_file

    def _choose(self, split: str, every: Pairs, name: str) -> Pairs:
        """Return all held-out pairs, but only training pairs within ``max_length``."""
        longest = every.lengths.max(axis=1)
        options = self.options
        if split == "train":
            chosen = replace(every, bounds=every.bounds[longest <= options.max_length])
            if not len(chosen):
                raise DataError(
                    f"{name}: no training pair has sentences of at most {options.max_length} "
                    "tokens: raise task.max_length"
                )
            return chosen
        most = self.model_options.max_position_embeddings
        if padded_length(int(longest.max())) > most:
            raise DataError(
                f"{name}: pair {longest.argmax() + 1} of {split} has {longest.max()} tokens, in "
                f"multiples of four more than model.max_position_embeddings={most}: raise it, or "
                "shorten the pair"
            )
        return every

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Return the pairs of the buckets at ``positions``, padded to a multiple of four tokens.

        ``source`` and bool ``mask`` are (rows, source length); ``previous`` and ``targets`` (rows,
        target length). ``count`` is the number of target tokens, ``references`` are the raw
        targets of held-out pairs.
        """
        every = self._pairs[split]
        buckets = self._buckets[split]
        samples = [buckets.pairs(step * size + position) for position in positions]
        rows = np.concatenate(samples)
        sources = [every.source(row) for row in rows]
        targets = pad([every.target(row) for row in rows], IGNORED)
        previous = np.roll(targets, 1, axis=1)  # wraps padding, or the end token of a full row
        previous[:, 0] = self._end
        previous[previous == IGNORED] = self._end
        mask = pad([np.ones(len(source)) for source in sources], 0).astype(bool)
        lines = self._references.get(split)
        raw = {"references": [lines[row] for row in rows]} if lines else {}
        return raw | {
            "source": torch.from_numpy(pad(sources, self._end)),
            "mask": torch.from_numpy(mask),
            "previous": torch.from_numpy(previous),
            "targets": torch.from_numpy(targets),
            "count": int((targets != IGNORED).sum()),
        }

    def samples(self, split: str) -> int:
        return int(self._buckets[split].count)

    def example(self, size: int, device: torch.device) -> Batch:
        """Return full buckets of sentences of 32 tokens (or ``max_length``), without padding."""
        length = padded_length(min(self.options.max_length, 32))
        pairs = size * max(1, self.options.max_tokens // length)
        rows = torch.zeros(pairs, length, dtype=torch.int64, device=device)
        batch = dict.fromkeys(("source", "previous", "targets"), rows)
        return {**batch, "mask": torch.ones_like(rows, dtype=torch.bool), "count": rows.numel()}

    def count(self, batch: Batch) -> int:
        return int(batch["count"])

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return Σ label-smoothed cross-entropy of the target tokens in nats."""
        smoothing = self.options.label_smoothing
        compiled = self.compiles_loss
        return cross_entropy(scores, batch["targets"], compiled=compiled, label_smoothing=smoothing)

    def is_item(self, batch: Batch) -> Tensor | None:
        return batch["targets"] != IGNORED

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = (batch[key] for key in ("source", "mask", "previous"))
        return self.recipe.logits(model, *inputs)

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        """Return sums of both losses; with ``final`` and ``bleu`` also hypotheses."""
        logits = self.scores(model, batch).detach()
        count = self.count(batch)
        smoothings = {"loss": self.options.label_smoothing, "nll": 0.0}
        seen: Observation = {
            key: (cross_entropy(logits, batch["targets"], label_smoothing=smoothing), count)
            for key, smoothing in smoothings.items()
        }
        if self.generates(final=final):
            seen["hypotheses"] = self.translate(model, batch["source"], batch["mask"])
            seen["references"] = batch["references"]
        return seen

    def generates(self, *, final: bool) -> bool:
        """Return True if :meth:`observe` translates sentences."""
        return final and self.options.bleu

    def translate(self, model: nn.Module, source: Tensor, mask: Tensor) -> list[str]:
        """Translate every row to text with a model in eval mode; inputs as in :meth:`batch`."""
        a, b = self.options.max_decode
        # count real tokens only, so that padding does not change translations
        length = int(a * int(mask.sum(1).max()) + b)
        hypotheses = self.recipe.generate(
            model,
            source,
            mask,
            end=self._end,
            length=max(1, min(length, self.model_options.max_position_embeddings)),
            beams=self.options.beam,
            length_penalty=self.options.length_penalty,
        )
        return [self._codec.decode(row) for row in hypotheses]

    def require_metrics(self) -> None:
        if self.options.bleu:
            _bleu_class()

    def metrics(self, observations: Iterable[Observation]) -> dict[str, Any]:
        """Return ``loss`` (label-smoothed) and ``nll`` per token in nats, and ``perplexity``.

        Final evaluations add sacrebleu's cased corpus ``bleu`` in percent and its signature.
        """
        observations = list(observations)
        result: dict[str, Any] = averages(observations)
        # exp of more than 709 overflows a float
        result["perplexity"] = math.exp(min(result["nll"], 700.0))
        hypotheses = [line for seen in observations for line in seen.get("hypotheses", ())]
        if hypotheses:
            references = [line for seen in observations for line in seen["references"]]
            metric = _bleu_class()()
            score = metric.corpus_score(hypotheses, [references]).score
            result |= {"bleu": float(score), "bleu_signature": str(metric.get_signature())}
        return result


def _bleu_class() -> Any:
    with needs("BLEU (without: task.bleu=false)", "sacrebleu", "mt"):
        from sacrebleu.metrics import BLEU
    return BLEU
