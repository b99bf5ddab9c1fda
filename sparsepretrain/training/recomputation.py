"""Activation checkpointing: blocks keep their inputs, and the backward runs their forward again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from sparsepretrain.errors import ConfigError
from sparsepretrain.training.compilation import blocks


def recompute_blocks(model: nn.Module) -> None:
    """Recompute the activations of each block of ``model`` in training, in place.

    Results are those of a plain backward: random draws repeat. BatchNorm is refused: its running
    statistics would count a batch twice.
    """
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        text = ": expected false for a model with BatchNorm, got true"
        raise ConfigError([("activation_checkpointing", text)])
    for block in blocks(model):
        block.forward = partial(_recomputed, block, block.forward)


def _recomputed(block: nn.Module, forward: Any, *inputs: Any, **options: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)
