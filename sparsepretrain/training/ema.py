"""Exponential moving average of the weights of a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sparsepretrain.sparsity import Sparsifier

AVERAGED = "ema_"
"""Prefix of metrics of the averaged weights."""


class EMA:
    """Exponential moving average of all parameters, updated once per optimizer step.

    After t updates the average is Σ dᵗ⁻ⁱ wᵢ / Σ dᵗ⁻ⁱ. The initial weights have no part in it, so
    short runs need no warm-up of the decay. After a few times 1/(1 - d) steps this is the average
    with constant decay of DeiT's recipe (timm's ModelEma, d = 0.99996); timm's own warm-up,
    1 - (1 + t)^(-2/3), would not reach that decay in DeiT's 300 epochs.

    Master weights are averaged; buffers (BatchNorm statistics, scales and masks of the method) are
    those of the model. Evaluation projects the average, whose mask was never trained with, so the
    headline metrics of a run use its own weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._parameters = dict(model.named_parameters())
        self.averages = {k: p.detach().clone() for k, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Average in the weights after an optimizer step."""
        self.updates += 1
        # the share of the newest weights, (1 - d) / (1 - dᵗ), without cancellation for d near 1
        share = (1 - self.decay) / -math.expm1(self.updates * math.log(self.decay))
        averages = list(self.averages.values())
        parameters = list(self._parameters.values())
        get_ema_multi_avg_fn(1 - share)(tuple(averages), tuple(parameters), self.updates)

    @contextlib.contextmanager
    def applied(self, sparsifier: Sparsifier) -> Iterator[None]:
        """Put the averages into the model; restore the trained weights bit for bit on exit."""
        trained = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            put(self._parameters, self.averages, sparsifier)
            yield
        finally:
            put(self._parameters, trained, sparsifier)

    @torch.no_grad()
    def load(self, averages: dict[str, Tensor], updates: int) -> None:
        """Restore averages after ``updates`` updates."""
        for name, average in self.averages.items():
            average.copy_(averages[name])
        self.updates = updates


@torch.no_grad()
def put(
    parameters: dict[str, nn.Parameter], values: dict[str, Tensor], sparsifier: Sparsifier
) -> None:
    """Copy weights into a model and project again."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
    sparsifier.refresh()
