"""One warning when an optimiser updates sparse weights and nobody called ``attach``.

Such a loop runs without an error and trains something else: no masked decay, no mask search, no
phases, no flip rates. An optimiser tells every step to PyTorch's global hooks, so nothing is
guessed from forwards or from weights, and no device is waited for.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.sparsity.layers import SparseLayer

_waiting: WeakSet[SparseLayer] = WeakSet()
"""The first layer of each model that became sparse and was never attached."""
_listening: list[Any] = []
"""The handle of the global hook, once there is one."""


def expect_attach(layer: SparseLayer) -> None:
    """Warn at the first step of an optimiser that holds the weight of ``layer``."""
    _waiting.add(layer)
    if not _listening:
        _listening.append(register_optimizer_step_post_hook(_remind))


def attached(layer: SparseLayer) -> None:
    """No longer: ``attach`` was called."""
    _waiting.discard(layer)


def _remind(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _waiting:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer in list(_waiting):
        if not isinstance(layer, SparseLayer):  # densified
            _waiting.discard(layer)
        elif id(layer.weight) in held and layer.weight.grad is not None:
            _waiting.discard(layer)
            method = layer.sparsity.method.options.name
            warnings.warn(
                f"{type(optimizer).__name__} updated the sparse layer {layer.sparsity.name!r} "
                f"({method}), but the sparsifier rides on no optimiser: masks, masked decay, "
                "phases and flip rates stand still; call sparsifier.attach(optimizer) first",
                SparsePretrainWarning,
                stacklevel=3,
            )
