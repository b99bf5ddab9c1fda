"""Averages of the weights, which are evaluated beside the weights that are trained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sparsepretrain.sparsity import Sparsifier

AVERAGED = "ema_"
"""Before the name of a metric: that of the averaged weights."""


class EMA:
    """Exponential moving average of all parameters, one update per optimiser step.

    After t updates the average is Σ dᵗ⁻ⁱ wᵢ / Σ dᵗ⁻ⁱ: the initial weights have no part in it, so
    short runs need no warm-up of the decay. After a few times 1/(1 - d) steps this is the average
    with constant decay of DeiT's recipe (timm's ModelEma, d = 0.99996); timm's own warm-up,
    1 - (1 + t)^(-2/3), would not reach that decay in DeiT's 300 epochs.

    Buffers (BatchNorm statistics, scales and masks of the method) are those of the model. What is
    averaged is the master weight; evaluation projects the average, onto a mask that never trained:
    the numbers of a run are those of its own weights.

    Args:
        model: on its device.
        decay: d, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._parameters = dict(model.named_parameters())
        self._averages = {k: p.detach().clone() for k, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimiser step."""
        self.updates += 1
        # the share of the newest weights, (1 - d) / (1 - dᵗ), without cancellation for d near 1
        share = (1 - self.decay) / -math.expm1(self.updates * math.log(self.decay))
        averages, parameters = list(self._averages.values()), list(self._parameters.values())
        get_ema_multi_avg_fn(1 - share)(tuple(averages), tuple(parameters), self.updates)

    @contextlib.contextmanager
    def applied(self, sparsifier: Sparsifier) -> Iterator[None]:
        """Inside, the model holds the averages; afterwards its own weights again, bit for bit."""
        trained = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            put(self._parameters, self._averages, sparsifier)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(trained[name])
            sparsifier.refresh()

    def state_dict(self) -> dict[str, Any]:
        """The averages and how many weights they are of."""
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: of a model with other parameters.
        """
        if list(state["averages"]) != list(self._averages):
            raise ValueError("the averaged weights are those of another model")
        for name, average in self._averages.items():
            average.copy_(state["averages"][name])
        self.updates = state["updates"]


@torch.no_grad()
def put(
    parameters: dict[str, nn.Parameter], averages: dict[str, Tensor], sparsifier: Sparsifier
) -> None:
    """Copy averaged weights into a model and project again.

    A method that stores its zeros instead of projecting gets them back: averages that reach back
    to before it pruned have none.
    """
    for name, parameter in parameters.items():
        parameter.copy_(averages[name])
    sparsifier.refresh()
    for layer in sparsifier.layers.values():
        projection = layer.sparsity.project(layer)
        if projection.forward is None and projection.mask is not None:
            layer.weight.masked_fill_(~projection.mask, 0)
            layer.sparsity.invalidate()
