"""Optimizers, one module each.

A registered class has ``Options`` with ``name``, ``lr`` (peak learning rate) and ``weight_decay``,
and ``build(groups, options)``; parameter groups carry their own weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsepretrain import registry
from sparsepretrain.optim._adams import AdamS
from sparsepretrain.optim._ast_adamw import ASTAdamW
from sparsepretrain.optim._step_adamw import StepAdamW
from sparsepretrain.optim.muon import block_matrices

__all__ = ["ASTAdamW", "AdamS", "StepAdamW", "build_optimizer"]


def build_optimizer(
    model: nn.Module,
    options: Any,
    special: Callable[[list[dict[str, Any]], Any], Optimizer | None] | None = None,
) -> Optimizer:
    """Build the optimizer over all parameters; weight decay on tensors of ≥ 2 dimensions only.

    This is nanoGPT's rule, used by the GPT-2 runs of arXiv:2404.01847 and arXiv:2409.09099.
    Parameters in the model's ``no_weight_decay()``, timm's convention, are exempt too (DeiT:
    position embeddings and class token). ``special`` may return an optimizer that replaces the
    configured one.
    """
    exempt = set(getattr(model, "no_weight_decay", set)())
    kind: Any = registry.get("optimizer", options.name)
    matrices: set[Any] = set()
    if getattr(kind, "separates_matrices", False):
        matrices = block_matrices(model)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    separate: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter in matrices and parameter.requires_grad:
            separate.append(parameter)
        elif parameter.requires_grad:
            exempted = parameter.dim() < 2 or name in exempt
            (others if exempted else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": separate, "weight_decay": options.weight_decay, "matrices": True},
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if special is not None and (optimizer := special(groups, options)) is not None:
        return optimizer
    return kind.build(groups, options)
