"""Regression on generated vectors; no training sample occurs twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Progress, Task, widen


@dataclass(slots=True, kw_only=True)
class RegressionOptions:
    """Options of the task."""

    name: Literal["regression"]


@register("task", "regression")
class Regression(Task):
    """Mean squared error over the components of a target; a sample is an item.

    Sample ``step * batch.size + position`` is a function of that number and the run's seed;
    held-out inputs are the same for every seed, and targets follow from the teacher.
    """

    Options = RegressionOptions
    kind = "vectors"
    unit = "samples"
    loss_name = "mean squared error"

    @staticmethod
    def conflicts(options: Any, model: Any, data: Any) -> Problems:
        for key in ("inputs", "outputs"):
            expected = getattr(data, key)
            value = getattr(model, key)
            if value != expected:
                yield f"model.{key}", f"must equal data.{key} ({expected}), got {value}"

    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        source: Any = registry.get("source", self.data_options.source)
        options = self.data_options
        if options.teacher_seed is None:
            options = replace(options, teacher_seed=self.seed % 2**32)
        self._source = source(options)
        self.fingerprint = self._source.fingerprint

    def samples(self, split: str) -> int:
        count: int | None = self._source.count(split)
        if count is None:
            raise ConfigError(f"data={self.data_options.name} has no epochs: give steps instead")
        return count

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Return ``inputs`` (n, inputs) and ``targets`` (n, outputs), both fp32."""
        numbers = np.asarray(positions, dtype=np.int64) + step * size
        inputs, targets = self._source.samples(split, self.order_seed(split), numbers)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def example(self, size: int, device: torch.device) -> Batch:
        options = self.model_options
        shapes = {"inputs": (size, options.inputs), "targets": (size, options.outputs)}
        return {key: torch.zeros(shape, device=device) for key, shape in shapes.items()}

    def count(self, batch: Batch) -> int:
        return len(batch["targets"])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return (Σ over samples of the target's mean squared error, number of samples)."""
        predicted = widen(self.recipe.predict(model, batch["inputs"]))
        squares = F.mse_loss(predicted, batch["targets"], reduction="sum")
        return squares / predicted.shape[1], self.count(batch)
