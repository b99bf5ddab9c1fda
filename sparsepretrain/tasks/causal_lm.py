"""Next-token prediction on prepared token files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, Task, averages

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class CausalLMOptions:
    """Options of the task."""

    name: Literal["causal_lm"]
    sequence_length: int
    """Tokens per sample."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        if self.sequence_length <= 0:
            yield "sequence_length", f"must be > 0, got {self.sequence_length}"


@register("task", "causal_lm")
class CausalLM(Task):
    """Windows of ``sequence_length`` tokens; the loss of every position counts."""

    Options = CausalLMOptions
    kind = "text"

    def __init__(self, options: CausalLMOptions, model: Any, data: Any, seed: int) -> None:
        super().__init__(options, model, data, seed)
        self._windows: dict[str, Any] = {}

    def open_data(
        self, splits: Sequence[str], on_progress: Callable[[Any], None] | None = None
    ) -> None:
        """Open the prepared tokens; offline sources are prepared when missing."""
        from sparsepretrain.data import load, windows

        tokens = load(self.data_options, on_progress=on_progress)
        length = self.options.sequence_length
        # held-out windows: scattered over the split, the same ones for every seed of a run
        self._windows = {
            split: windows(
                tokens, split, length, self.seed if split == "train" else 0, shuffled=True
            )
            for split in splits
        }
        self.fingerprint = tokens.fingerprint

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """``tokens`` and ``targets``, both (len(positions), sequence_length) int64."""
        import torch

        rows = torch.from_numpy(self._windows[split].batch(step, positions, size))
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    def samples(self, split: str) -> int:
        """Windows in one pass."""
        return int(self._windows[split].count)

    def example(self, size: int, device: torch.device) -> Batch:
        """Zeros of the shapes of :meth:`batch`."""
        import torch

        rows = torch.zeros(size, self.options.sequence_length, dtype=torch.int64, device=device)
        return {"tokens": rows, "targets": rows}

    def count(self, batch: Batch) -> int:
        """Target tokens."""
        return int(batch["targets"].numel())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(Σ negative log likelihood in nats, number of target tokens)."""
        import torch.nn.functional as F

        logits = self.recipe.logits(model, batch["tokens"])
        rows = logits.reshape(-1, logits.shape[-1]).float()
        total = F.cross_entropy(rows, batch["targets"].reshape(-1), reduction="sum")
        return total, self.count(batch)

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """``loss`` in nats per token, and ``perplexity``, its exponential."""
        values = averages(observations)
        return values | {"perplexity": perplexity(values["loss"])}


def perplexity(loss: float) -> float:
    """Exp of a mean negative log likelihood in nats; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
