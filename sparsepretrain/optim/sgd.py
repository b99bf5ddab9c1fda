"""SGD of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(slots=True, kw_only=True)
class SGDOptions:
    """torch.optim.SGD; decay applies to tensors of two or more dimensions only."""

    name: Literal["sgd"]
    lr: Annotated[float, "> 0"]
    """Peak learning rate, reached after the schedule's warm-up."""
    momentum: Annotated[float, "≥ 0"]
    nesterov: bool
    weight_decay: Annotated[float, "≥ 0"]

    def problems(self) -> Iterator[tuple[str, str]]:
        """What does not go together, as (key, message)."""
        if self.nesterov and self.momentum == 0:
            yield "nesterov", "needs optim.momentum > 0"


@register("optimizer", "sgd")
class SGD:
    """torch.optim.SGD."""

    Options = SGDOptions

    @staticmethod
    def build(groups: list[dict[str, Any]], options: SGDOptions) -> Optimizer:
        """The optimiser over parameter groups, which bring their weight decay."""
        import torch

        return torch.optim.SGD(
            groups,
            lr=options.lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            fused=True,
        )
