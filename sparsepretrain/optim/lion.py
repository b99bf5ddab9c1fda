"""Lion (arXiv:2302.06675) of timm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError, needs
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class LionOptions:
    """Options of timm.optim.Lion; ``betas`` are for update direction and momentum."""

    name: Literal["lion"]
    lr: Annotated[float, "> 0"]
    betas: Annotated[tuple[float, float], "[0, 1)"]
    weight_decay: Annotated[float, "≥ 0"]


@register("optimizer", "lion")
class Lion:
    """timm.optim.Lion."""

    Options = LionOptions

    @staticmethod
    def build(groups: list[dict[str, Any]], options: LionOptions) -> Optimizer:
        """Build the optimizer over parameter groups."""
        with needs("optim=lion", "timm", "vision", error=ConfigError):
            from timm.optim import Lion as TimmLion
        return TimmLion(groups, lr=options.lr, betas=options.betas)
