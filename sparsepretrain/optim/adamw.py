"""AdamW of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class AdamWOptions:
    """Options of torch.optim.AdamW."""

    name: Literal["adamw"]
    lr: Annotated[float, "> 0"]
    betas: Annotated[tuple[float, float], "[0, 1)"]
    eps: Annotated[float, "> 0"]
    weight_decay: Annotated[float, "≥ 0"]


def adamw_arguments(options: Any, method: str, why: str) -> dict[str, Any]:
    """Return keyword arguments for the optimizer of a method that is a kind of AdamW.

    Args:
        options: of the run's optimizer.
        method: needs optim=adamw.
        why: it does, for the message.

    Raises:
        ConfigError: ``options`` are those of another optimizer.
    """
    if not isinstance(options, AdamWOptions):
        raise ConfigError(f"sparsity={method} needs optim=adamw ({why}), got {options.name}")
    return {key: getattr(options, key) for key in ("lr", "betas", "eps", "weight_decay")}


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
