"""Translation of sentence pairs: buckets of at most ``max_tokens`` tokens, BLEU at the end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sparsepretrain import data as datasets
from sparsepretrain.errors import DataError, SparsePretrainWarning, needs
from sparsepretrain.limits import Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, Progress, Task, averages, cross_entropy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sparsepretrain.data import Pairs, TokenData

IGNORED = -100
"""Target of padding, which counts nothing."""


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
class Translation(Task):
    """Buckets of sentence pairs; the loss counts target tokens, the end among them.

    A micro-batch of several buckets is padded to the longest of them, which wastes tokens:
    ``batch.micro`` is best 1 and ``max_tokens`` what fits the device.
    """

    Options = TranslationOptions
    kind = "pairs"
    sample = "buckets of pairs"
    metric = "bleu"

    def __init__(self, options: TranslationOptions, model: Any, data: Any, seed: int) -> None:
        super().__init__(options, model, data, seed)
        self._pairs: dict[str, Any] = {}
        self._buckets: dict[str, Any] = {}
        self._references: dict[str, list[str] | None] = {}
        self._codec: Any = None
        self._end = 0

    @property
    def capacity(self) -> int:
        """Most tokens of a training bucket."""
        return self._buckets["train"].capacity if "train" in self._buckets else 0

    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        """Open the prepared pairs; offline sources are prepared when missing.

        Raises:
            DataError: a split has no pairs, or a held-out sentence is too long for the model.
        """
        from sparsepretrain.data.encoding import open_codec
        from sparsepretrain.data.formats import references

        data = datasets.load(self.data_options, on_progress=on_progress)
        for split in splits:
            self._pairs[split] = pairs = self._choose(split, datasets.pairs(data, split), data.name)
            self._buckets[split] = datasets.Buckets(
                pairs.lengths, self.options.max_tokens, self.order_seed(split)
            )
        self.tokenizer_file = data.tokenizer_file
        self._codec = open_codec(data.tokenizer_file)
        self._end = int(data.end_of_text or 0)
        self.fingerprint = data.fingerprint
        for split in (split for split in splits if split != "train" and self.options.bleu):
            self._references[split] = references(data, split)
            self._compare(split, data)

    def _compare(self, split: str, data: TokenData) -> None:
        """Say so where references are not the lines of the data, or cannot be translated to."""
        lines, every = self._references[split], self._pairs[split]
        decoded = (self._codec.decode(every.target(row)[:-1]) for row in range(len(every)))
        if lines is None:
            text = (
                f"{data.directory} was prepared without the raw lines of {split}: BLEU's references"
                " are decoded from tokens; delete it and prepare again to score the lines"
            )
        elif other := sum(map(str.__ne__, lines, decoded)):
            text = (
                f"{other} of {len(lines)} references of {split} are not what their tokens decode "
                "to: BLEU compares translations with the lines as they are"
            )
        else:
            return
        warnings.warn(text, SparsePretrainWarning, stacklevel=2)

    def _choose(self, split: str, every: Pairs, name: str) -> Pairs:
        """The pairs that take part: held out all, for training those short enough."""
        longest, options = every.lengths.max(axis=1), self.options
        if split == "train":
            chosen = replace(every, bounds=every.bounds[longest <= options.max_length])
            if not len(chosen):
                raise DataError(
                    f"{name}: no training pair has sentences of at most {options.max_length} "
                    "tokens: raise task.max_length"
                )
            return chosen
        most = self.model_options.max_position_embeddings
        if longest.max() > most:
            raise DataError(
                f"{name}: pair {longest.argmax() + 1} of {split} has {longest.max()} tokens, more "
                f"than model.max_position_embeddings={most}: raise it, or shorten the pair"
            )
        return every

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """The pairs of the buckets at ``positions``, padded to a multiple of four tokens.

        ``source`` and its ``mask`` (rows, source length); ``previous`` and ``targets`` (rows,
        target length): int64, the mask bool; ``count``: target tokens; ``references``: the raw
        targets of held-out pairs, where the data has them.
        """
        import numpy as np
        import torch

        from sparsepretrain.data.order import pad

        every, buckets = self._pairs[split], self._buckets[split]
        samples = [buckets.pairs(step * size + position) for position in positions]
        rows = np.concatenate(samples)
        sources = [every.source(row) for row in rows]
        targets = pad([every.target(row) for row in rows], IGNORED)
        previous = np.roll(targets, 1, axis=1)  # a padded row wraps padding, a full one its end
        previous[:, 0] = self._end
        previous[previous == IGNORED] = self._end
        mask = pad([np.ones(len(source)) for source in sources], 0).astype(bool)
        lines = self._references.get(split)
        raw = {} if lines is None else {"references": [lines[row] for row in rows]}
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
        """Full buckets of sentences of 32 tokens (or ``max_length``), without padding."""
        import torch

        length = -(-min(self.options.max_length, 32) // 4) * 4
        pairs = size * max(1, self.options.max_tokens // length)
        rows = torch.zeros(pairs, length, dtype=torch.int64, device=device)
        batch = dict.fromkeys(("source", "previous", "targets"), rows)
        return {**batch, "mask": torch.ones_like(rows, dtype=torch.bool), "count": rows.numel()}

    def count(self, batch: Batch) -> int:
        return int(batch["count"])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(Σ label-smoothed cross-entropy in nats, number of target tokens)."""
        logits, smoothing = self._logits(model, batch), self.options.label_smoothing
        loss = cross_entropy(
            logits, batch["targets"], compiled=self.compiles_loss, label_smoothing=smoothing
        )
        return loss, self.count(batch)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = (batch[key] for key in ("source", "mask", "previous"))
        return self.recipe.logits(model, *inputs)

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        """Sums of both losses; with ``final`` and ``bleu`` also hypotheses and references."""
        logits, count = self._logits(model, batch).detach(), self.count(batch)
        smoothings = {"loss": self.options.label_smoothing, "nll": 0.0}
        seen: Observation = {
            key: (cross_entropy(logits, batch["targets"], label_smoothing=smoothing), count)
            for key, smoothing in smoothings.items()
        }
        if final and self.options.bleu:
            seen["hypotheses"] = self.translate(model, batch["source"], batch["mask"])
            seen["references"] = batch.get("references") or [
                self._codec.decode(row[row != IGNORED][:-1].tolist())
                for row in batch["targets"].cpu()
            ]
        return seen

    def translate(self, model: nn.Module, source: Tensor, mask: Tensor) -> list[str]:
        """The translation of every row, as text, by a model in eval mode.

        ``source``: (rows, source length) int64; ``mask``: of that shape, bool, false for padding.
        """
        a, b = self.options.max_decode
        # of the real tokens, so that more padding translates nothing differently
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

    def metrics(self, observations: Iterable[Observation]) -> dict[str, Any]:
        """``loss`` (label-smoothed) and ``nll`` per target token, in nats; ``perplexity``.

        Final evaluations add ``bleu`` (corpus BLEU of sacrebleu, cased, in percent) and
        ``bleu_signature``, the string that says how it was computed.
        """
        observations = list(observations)
        result: dict[str, Any] = averages(observations)
        # above this a float overflows, and a model is no model
        result["perplexity"] = math.exp(min(result["nll"], 700.0))
        hypotheses = [line for seen in observations for line in seen.get("hypotheses", ())]
        if hypotheses:
            references = [line for seen in observations for line in seen["references"]]
            result |= corpus_bleu(hypotheses, references)
        return result


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """``bleu`` in percent and its ``bleu_signature``; empty hypotheses count as such.

    Raises:
        DataError: there is nothing to score, or sacrebleu is not installed.
    """
    if not references:
        raise DataError("BLEU needs at least one sentence")
    with needs("BLEU (without: task.bleu=false)", "sacrebleu", "mt"):
        from sacrebleu.metrics import BLEU
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return {"bleu": float(score), "bleu_signature": str(metric.get_signature())}
