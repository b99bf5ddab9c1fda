"""AdamW of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch.optim import Optimizer

from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class AdamWOptions:
    """Options of torch.optim.AdamW."""

    name: Literal["adamw"]
    lr: Annotated[float, "> 0"]
    betas: Annotated[tuple[float, float], "[0, 1)"]
    eps: Annotated[float, "> 0"]
    weight_decay: Annotated[float, "≥ 0"]


@register("optimizer", "adamw")
class AdamW:
    """torch.optim.AdamW."""

    Options = AdamWOptions

    @staticmethod
    def build(groups: list[dict[str, Any]], options: AdamWOptions) -> Optimizer:
        """Build the optimizer over parameter groups."""
        return torch.optim.AdamW(
            groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True
        )
