"""Who rides on which optimiser, and a warning where another one updates sparse weights.

Such a loop runs without an error and trains something else: no masked decay, no mask search, no
phases, no flip rates. An optimiser tells every step to PyTorch's global hooks, so nothing is
guessed from forwards or from weights, and no device is waited for.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.sparsity.layers import SparseLayer, living
from sparsepretrain.sparsity.state import ModelState

_riders: WeakKeyDictionary[ModelState, tuple[ref[Optimizer], tuple[Any, ...]]] = WeakKeyDictionary()
_changes = 0  # counts attaching and detaching
_checked: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()
"""Optimiser -> what had been changed, made and added when nothing was wrong with it, or said."""
_Found = dict[ModelState, tuple[SparseLayer, int]]
# during a step: models whose weights it holds without their hooks, and their steps so far
_suspects: WeakKeyDictionary[Optimizer, _Found] = WeakKeyDictionary()
_released: WeakSet[Optimizer] = WeakSet()  # carried the hooks of a model that was densified
_listening: list[Any] = []  # the handles of the global hooks, once there are some


def watch() -> None:
    """Look at every step of every optimiser from now on, for as long as the process lives."""
    if not _listening:
        _listening.append(register_optimizer_step_pre_hook(_before))
        _listening.append(register_optimizer_step_post_hook(_after))


def riding(state: ModelState) -> Optimizer | None:
    """The optimiser that carries the hooks of a sparse model, if it still exists."""
    return _riders[state][0]() if state in _riders else None


def ride(state: ModelState, optimizer: Optimizer, *hooks: Any) -> None:
    """``optimizer`` carries ``hooks``, which :func:`dismount` removes."""
    global _changes
    _changes += 1
    _riders[state] = ref(optimizer), hooks
    state.expects_attach = True


def dismount(state: ModelState) -> None:
    """Remove the hooks; training without them is on purpose from now on."""
    global _changes
    _changes += 1
    for hook in _riders.pop(state, (None, ()))[1]:
        hook.remove()
    state.expects_attach = False


def release(state: ModelState) -> None:
    """Layers of the model were densified: whoever goes on training them hears of it."""
    optimizer = riding(state)
    dismount(state)
    state.expects_attach = True
    if optimizer is not None:
        _released.add(optimizer)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    now = (_changes, living.made, len(optimizer.param_groups))
    if _checked.get(optimizer) == now:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: _Found = {}
    dense = True
    for layer in living:
        if isinstance(layer, SparseLayer) and id(layer.weight) in held:
            dense = False
            state = layer.sparsity.model
            if state.expects_attach and riding(state) is not optimizer:
                earlier = found.get(state, (layer, 0))[0]
                first = min(layer, earlier, key=lambda layer: layer.sparsity.index)
                found[state] = first, state.step
    if optimizer in _released:
        _released.discard(optimizer)
        if dense:
            warnings.warn(
                f"the model was densified, and {type(optimizer).__name__} goes on training it: its "
                "zeros will not last",
                SparsePretrainWarning,
                stacklevel=3,
            )
    if found:
        _suspects[optimizer] = found
    else:
        _checked[optimizer] = now


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = _suspects.pop(optimizer, None)
    if not found:
        return
    # a wrapper such as SAM steps the optimiser that carries the hooks inside its own step
    wrong = {
        state: layer
        for state, (layer, step) in found.items()
        if state.step == step and layer.weight.grad is not None
    }
    if wrong or all(state.step != step for state, (_, step) in found.items()):
        _checked[optimizer] = (_changes, living.made, len(optimizer.param_groups))
    for state, layer in wrong.items():
        other = riding(state)
        rides = "no optimiser" if other is None else f"another optimiser ({type(other).__name__})"
        warnings.warn(
            f"{type(optimizer).__name__} updated the sparse layer {layer.sparsity.layer_name!r} "
            f"({state.method.options.name}), but the sparsifier rides on {rides}: masks, masked "
            "decay, phases and flip rates do not follow; call sparsifier.attach(optimizer) (of a "
            "copy: sparsifier_of(model).attach(optimizer))",
            SparsePretrainWarning,
            stacklevel=3,
        )
