"""Next-token prediction on prepared token files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, cross_entropy
from sparsepretrain.tasks._bases import WindowTask


@dataclass(slots=True, kw_only=True)
class CausalLMOptions:
    """Options of the task."""

    name: Literal["causal_lm"]
    sequence_length: Annotated[int, "> 0"]
    replacement: bool
    documents: bool

    def problems(self) -> Problems:
        if self.replacement and self.documents:
            yield "replacement", "must be false with task.documents=true, got true"


@register("task", "causal_lm")
class CausalLM(WindowTask):
    """Next-token prediction at every position of windows of ``sequence_length`` tokens.

    A full evaluation predicts each token of a split once, except the first. With ``documents`` a
    sample is the beginning of one document, and a full evaluation has every document once.
    """

    Options = CausalLMOptions
    complete = True

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Return ``tokens`` and ``targets``, both (len(positions), sequence_length) int64.

        Documents and shorter windows are padded with target -1; ``padding`` counts these.
        """
        rows = torch.from_numpy(self._windows[split].batch(step, positions, size))
        # contiguous: copies of strided views go through pageable memory
        batch: Batch = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
        padded = self.options.documents or split != "train"
        if padded and (padding := int((batch["targets"] < 0).sum())):
            # any valid token will do: causal attention does not see later positions
            batch |= {"tokens": batch["tokens"].clamp(min=0), "padding": padding}
        return batch

    def example(self, size: int, device: torch.device) -> Batch:
        rows = torch.zeros(size, self.options.sequence_length, dtype=torch.int64, device=device)
        return {"tokens": rows, "targets": rows}

    def count(self, batch: Batch) -> int:
        return int(batch["targets"].numel() - batch.get("padding", 0))

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.recipe.logits(model, batch["tokens"])

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return Σ negative log-likelihood of the target tokens in nats."""
        compiled = self.compiles_loss
        return cross_entropy(scores, batch["targets"], compiled=compiled, ignore_index=-1)

    def is_item(self, batch: Batch) -> Tensor | None:
        return batch["targets"] >= 0 if batch.get("padding") else None
