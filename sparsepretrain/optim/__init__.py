"""Optimisers from their options.

A file per optimiser: ``Options`` with ``name``, ``lr`` and ``weight_decay`` among its fields, and
``build(groups, options)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparsepretrain import registry

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from sparsepretrain.optim._step_adamw import StepAdamW

__all__ = ["StepAdamW", "build_optimizer"]


def build_optimizer(
    model: nn.Module,
    options: Any,
    special: Callable[[list[dict[str, Any]], Any], Optimizer | None] | None = None,
) -> Optimizer:
    """The optimiser over all parameters; weight decay on tensors of ≥ 2 dimensions only.

    The rule is nanoGPT's, which the GPT-2 runs of arXiv:2404.01847 and arXiv:2409.09099 use. What a
    model names in ``no_weight_decay()``, timm's convention, is exempt too (DeiT: position
    embeddings and class token).

    Args:
        model: its parameters, in order; shared ones once.
        options: of the group ``optim``; ``lr`` is the peak, the schedule sets the current value.
        special: maker of an optimiser that replaces the configured one, if it returns one.
    """
    exempt = set(getattr(model, "no_weight_decay", set)())
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            few = parameter.dim() < 2 or name in exempt
            (others if few else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if special is not None and (optimizer := special(groups, options)) is not None:
        return optimizer
    kind: Any = registry.get("optimizer", options.name)
    return kind.build(groups, options)


def __getattr__(name: str) -> Any:
    if name == "StepAdamW":  # on first use: importing this package does not import torch
        from sparsepretrain.optim._step_adamw import StepAdamW

        return StepAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
