"""Refuse plans whose end prunes weights that the steps before cannot move to zero."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sparsepretrain.config.schema import Run
from sparsepretrain.console import significant
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.training.schedules import learning_rate


class Reach(NamedTuple):
    """Distance that the steps of a run move a masked weight, and that of the weights from zero."""

    steps: float
    """Σ lr·α: Adam moves a weight by about lr per step, of which α is the share of the decay."""
    median: float
    """Median |W| of the entries that the first masks prune: that of the layer in the middle."""

    def __str__(self) -> str:
        return f"Σ lr·α = {significant(self.steps)}, median |W| = {significant(self.median)}"


def steps_to_zero(run: Run, sparsifier: Sparsifier) -> float | None:
    """Return Σ lr·α of the run; None: no weight has to be zero at its end."""
    method = sparsifier.method
    if not method.prunes_at_end:
        return None
    return sum(
        learning_rate(run.schedule, run.optim.lr, step, run.steps) * method.pull(step)
        for step in range(run.steps)
    )


@torch.no_grad()
def require_reach(run: Run, sparsifier: Sparsifier, weights: Mapping[str, Tensor]) -> Reach | None:
    """Refuse a run that cannot move half of the masked weights of half of its layers to zero.

    It is a necessary condition: while the loss pulls at a weight more than the decay does, the
    steps go where the loss pulls.

    Args:
        run: the checked configuration.
        sparsifier: of the model, which may be on the meta device.
        weights: name of a sparse layer -> its initial weight, as stored.

    Returns:
        the two numbers; None: no weight has to be zero at the end.

    Raises:
        ConfigError: with the numbers.
    """
    steps = steps_to_zero(run, sparsifier)
    if steps is None:
        return None
    medians = []
    for name, layer in sparsifier.layers.items():
        weight = layer.operands.rows.local(weights[name].detach().float())
        masked = ~layer.operands.method.mask(weight, layer.in_dim).bool()
        medians.append(float(weight[masked].abs().median()))
    reach = Reach(steps, statistics.median(medians))
    if reach.steps < reach.median:
        raise ConfigError(
            [
                (
                    "optim.lr",
                    f"={run.optim.lr:g} in {run.steps:,} steps cannot move the weights to zero "
                    f"that sparsity={run.sparsity.name} prunes at the end: {reach}, and the sum "
                    "must be the larger one; raise optim.lr or steps",
                )
            ]
        )
    return reach
