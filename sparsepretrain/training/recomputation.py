"""Activation checkpointing: blocks keep their inputs, and the backward runs their forward again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from sparsepretrain.training.compilation import blocks


def recompute_blocks(model: nn.Module) -> None:
    """Recompute the activations of each block of ``model`` in training, in place.

    Results are those of a plain backward: random draws repeat, and BatchNorm counts a batch once.
    """
    for block in blocks(model):
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        block.forward = partial(_recomputed, block, block.forward, norms)


def _recomputed(
    block: nn.Module, forward: Any, norms: list[_BatchNorm], *inputs: Any, **options: Any
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **options)
    if norms:
        options["context_fn"] = lambda: (contextlib.nullcontext(), _frozen(norms))
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


@contextlib.contextmanager
def _frozen(norms: list[_BatchNorm]) -> Iterator[None]:
    """Leave the running statistics of ``norms`` as they are."""
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, batches in kept:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if batches is None else batches.clone()
    try:
        yield
    finally:
        for norm, momentum, batches in kept:
            norm.momentum, norm.num_batches_tracked = momentum, batches
