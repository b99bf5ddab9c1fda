"""SGD of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch.optim import Optimizer

from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class SGDOptions:
    """Options of torch.optim.SGD."""

    name: Literal["sgd"]
    lr: Annotated[float, "> 0"]
    momentum: Annotated[float, "≥ 0"]
    nesterov: bool
    weight_decay: Annotated[float, "≥ 0"]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield violations as (key, message)."""
        if self.nesterov and self.momentum == 0:
            yield "nesterov", "needs optim.momentum > 0"


@register("optimizer", "sgd")
class SGD:
    """torch.optim.SGD."""

    Options = SGDOptions

    @staticmethod
    def build(groups: list[dict[str, Any]], options: SGDOptions) -> Optimizer:
        """Build the optimizer over parameter groups."""
        return torch.optim.SGD(
            groups,  # each with its own weight_decay
            lr=options.lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            fused=True,
        )
