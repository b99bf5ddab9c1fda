"""Prediction of masked tokens (BERT, arXiv:1810.04805) on prepared token files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, Task, averages
from sparsepretrain.tasks._windows import WindowTask, perplexity

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sparsepretrain.data import TokenData
    from sparsepretrain.tasks._masking import Masking


@dataclass(slots=True, kw_only=True)
class MaskedLMOptions:
    """Options of the task."""

    name: Literal["masked_lm"]
    sequence_length: int
    """Tokens per sample."""
    probability: float
    """Fraction of a sample's tokens that are selected, rounded to whole tokens, at least one."""
    mask_fraction: float
    """Of the selected tokens, those that the mask token replaces."""
    random_fraction: float
    """Of the selected tokens, those that a random token replaces; the others stay."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        if self.sequence_length <= 0:
            yield "sequence_length", f"must be > 0, got {self.sequence_length}"
        if not 0 < self.probability <= 1:
            yield "probability", f"must lie in (0, 1], got {self.probability}"
        for key in ("mask_fraction", "random_fraction"):
            if not 0 <= getattr(self, key) <= 1:
                yield key, f"must lie in [0, 1], got {getattr(self, key)}"
        total = self.mask_fraction + self.random_fraction
        if total > 1:
            yield "random_fraction", f"and mask_fraction must sum to at most 1, got {total:g}"


@register("task", "masked_lm")
class MaskedLM(WindowTask):
    """Windows of ``sequence_length`` tokens; the loss of the selected ones counts.

    Documents are packed without padding. What is selected, and what replaces it, follows from
    (seed, split, step, position in the global batch); held-out masks are the same in every
    evaluation and for every seed of a run.
    """

    Options = MaskedLMOptions
    unit = "masked tokens"
    complete = False

    _masking: Masking

    @staticmethod
    def misfits(options: Any, model: Any, data: Any) -> Iterator[tuple[str, str]]:
        """A model without a row for the mask token, where the tokenizer is known to have none."""
        yield from Task.misfits(options, model, data)
        if getattr(data, "has_mask", None) is False and model.vocab_size <= data.vocab_size:
            yield (
                "model.vocab_size",
                f"must be > data.vocab_size ({data.vocab_size}), got {model.vocab_size}: tokenizer "
                f"{data.tokenizer} has no [MASK], so the row after its tokens becomes the mask",
            )

    def opened(self, tokens: TokenData) -> None:
        """Find the mask token, and the tokens that are never selected.

        Raises:
            ConfigError: the model has no row for the mask token.
        """
        from sparsepretrain.data.encoding import open_codec
        from sparsepretrain.tasks._masking import Masking

        codec, rows = open_codec(tokens.tokenizer_file), self.model_options.vocab_size
        mask = tokens.vocab_size if codec.mask is None else codec.mask
        if mask >= rows:
            raise ConfigError(
                f"model.vocab_size must be > {mask}, the id of the mask token of data="
                f"{tokens.name} with tokenizer {self.data_options.tokenizer}, got {rows}"
            )
        self._masking = Masking(self.options, mask, codec.special, codec.vocab_size)

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Tokens with masks in them, and what was there.

        Returns:
            ``tokens`` (len(positions), sequence_length); ``positions`` (n), the selected places
            of the flattened tokens; ``targets`` (n), the tokens that were there; all int64.
        """
        import torch

        rows = self._windows[split].batch(step, positions, size)[:, :-1]
        arrays = self._masking.apply(rows, self.order_seed(split), split, step, positions)
        names = ("tokens", "positions", "targets")
        return {k: torch.from_numpy(v) for k, v in zip(names, arrays, strict=True)}

    def example(self, size: int, device: torch.device) -> Batch:
        """Zeros of the shapes of :meth:`batch`."""
        import torch

        from sparsepretrain.tasks._masking import selected

        length = self.options.sequence_length
        rows = torch.zeros(size, length, dtype=torch.int64, device=device)
        places = rows.new_zeros(size * selected(self.options.probability, length))
        return {"tokens": rows, "positions": places, "targets": places}

    def count(self, batch: Batch) -> int:
        """Selected tokens."""
        return int(batch["targets"].numel())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(Σ negative log likelihood of the selected tokens in nats, their number)."""
        return self._total(self._logits(model, batch), batch), self.count(batch)

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        """Loss and accuracy of one micro-batch."""
        logits, count = self._logits(model, batch), self.count(batch)
        right = int((logits.argmax(-1) == batch["targets"]).sum())
        return {
            "loss": (float(self._total(logits, batch)), count),
            "accuracy": (100.0 * right, count),
        }

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """``loss`` in nats, ``perplexity`` and ``accuracy`` (percent) of the masked tokens."""
        values = averages(observations)
        return values | {"perplexity": perplexity(values["loss"])}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """(n, vocab_size) fp32."""
        logits: Tensor = self.recipe.logits(model, batch["tokens"], batch["positions"])
        return logits.float()

    def _total(self, logits: Tensor, batch: Batch) -> Tensor:
        import torch.nn.functional as F

        return F.cross_entropy(logits, batch["targets"], reduction="sum")
