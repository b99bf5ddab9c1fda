"""Optimisers from their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparsepretrain.config.schema import SGD, AdamW

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from sparsepretrain.optim.step_adamw import StepAdamW

__all__ = ["StepAdamW", "build_optimizer"]


def build_optimizer(
    model: nn.Module,
    options: AdamW | SGD,
    special: Callable[[list[dict[str, Any]], Any], Optimizer | None] | None = None,
) -> Optimizer:
    """The optimiser over all parameters; weight decay on tensors of ≥ 2 dimensions only.

    The rule is nanoGPT's, which the GPT-2 runs of arXiv:2404.01847 and arXiv:2409.09099 use.

    Args:
        model: its parameters, in order; shared ones once.
        options: of the group ``optim``; ``lr`` is the peak, the schedule sets the current value.
        special: maker of an optimiser that replaces the configured one, if it returns one.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    optimizer = None if special is None else special(groups, options)
    if optimizer is not None:
        return optimizer
    if isinstance(options, AdamW):
        return torch.optim.AdamW(
            groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True
        )
    return torch.optim.SGD(
        groups,
        lr=options.lr,
        momentum=options.momentum,
        nesterov=options.nesterov,
        fused=True,
    )


def __getattr__(name: str) -> Any:
    if name == "StepAdamW":  # on first use: importing this package does not import torch
        from sparsepretrain.optim.step_adamw import StepAdamW

        return StepAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
