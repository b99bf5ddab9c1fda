"""Who rides on which optimiser, and a warning where another one updates sparse weights.

Such a loop runs without an error and trains something else: no masked decay, no mask search, no
phases, no flip rates. An optimiser tells every step to PyTorch's global hooks, so nothing is
guessed from forwards or from weights, and no device is waited for.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sparsepretrain.errors import SparsePretrainWarning

if TYPE_CHECKING:
    from sparsepretrain.sparsity.model_state import ModelState

_Found = dict["ModelState", tuple[Any, int]]

living: WeakSet[Any] = WeakSet()  # all sparse layers of the process, copies included
_riders: WeakKeyDictionary[ModelState, tuple[ref[Optimizer], tuple[Any, ...]]] = WeakKeyDictionary()
# optimiser -> its param_groups when nothing was wrong with it, or was said; until a layer or rider
# comes or goes
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
# during a step: models whose weights it holds without their hooks, and their steps so far
_suspects: WeakKeyDictionary[Optimizer, _Found] = WeakKeyDictionary()
_released: WeakSet[Optimizer] = WeakSet()  # carried the hooks of a model that was densified
# sparse layer with a frozen weight -> a few values of the weight at its last evaluation
_frozen_values: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
_listening: list[Any] = []  # the handles of the global hooks, once there are some


def watch(layer: Any) -> None:
    """Look at every step of every optimiser that updates this sparse layer."""
    if not _listening:
        _listening.append(register_optimizer_step_pre_hook(_before))
        _listening.append(register_optimizer_step_post_hook(_after))
    living.add(layer)
    _checked.clear()


@torch.no_grad()
def warn_if_frozen_changed(layer: Any) -> None:
    """Warn if a frozen weight differs from the last evaluation, as after peft's ``merge``.

    Writes through ``weight.data`` change neither version nor address of the tensor, so 16 values of
    it are compared. On a GPU this waits for the device, but only in evaluation of frozen layers.
    """
    weight = layer.weight
    if torch.compiler.is_compiling() or layer.sparsity.rows.is_sharded:
        return
    if type(weight) is not Parameter or weight.is_meta:  # functional_call, fake tensors
        return
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    values = weight.detach().flatten()
    values = values[:: max(1, len(values) // 16)].clone()
    before = _frozen_values.get(layer)
    _frozen_values[layer] = values
    if before is not None and before.device == values.device and not torch.equal(before, values):
        warnings.warn(
            f"the frozen weight of the sparse layer {layer.sparsity.layer_name!r} changed outside "
            f"an optimizer step, and {layer.sparsity.model.method.options.name} projects it again: "
            "outputs change. Before adapters are merged, call sparsepretrain.densify(model)",
            SparsePretrainWarning,
            stacklevel=4,
        )


def forget_frozen(layer: Any) -> None:
    """Accept the weight as it is: a state dict was loaded."""
    _frozen_values.pop(layer, None)


def riding(state: ModelState) -> Optimizer | None:
    """The optimiser that carries the hooks of a sparse model, if it still exists."""
    return _riders[state][0]() if state in _riders else None


def ride(state: ModelState, optimizer: Optimizer, before: Any, after: Any) -> None:
    """``optimizer`` carries two step hooks from now on, which :func:`dismount` removes."""
    _checked.clear()
    hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    _riders[state] = ref(optimizer), hooks
    state.expects_attach = True


def dismount(state: ModelState, *, densified: bool = False) -> None:
    """Remove the hooks; training without them is on purpose now, but not what was densified."""
    _checked.clear()
    optimizer = riding(state)
    for hook in _riders.pop(state, (None, ()))[1]:
        hook.remove()
    state.expects_attach = densified
    if densified and optimizer is not None:
        _released.add(optimizer)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) == len(optimizer.param_groups):
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers = [layer for layer in living if id(layer.weight) in held]
    found: _Found = {}
    for layer in sorted(layers, key=lambda layer: layer.sparsity.index):
        state = layer.sparsity.model
        if state.expects_attach and riding(state) is not optimizer:
            found.setdefault(state, (layer, state.step))
    if optimizer in _released:
        _released.discard(optimizer)
        if not layers:
            warnings.warn(
                f"the model was densified, and {type(optimizer).__name__} goes on training it: its "
                "zeros will not last",
                SparsePretrainWarning,
                stacklevel=3,
            )
    if found:
        _suspects[optimizer] = found
    else:
        _checked[optimizer] = len(optimizer.param_groups)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = _suspects.pop(optimizer, None)
    if not found:
        return
    # A wrapper such as SAM steps another optimizer inside its own step; either may have the hooks.
    wrong = {
        state: layer
        for state, (layer, step) in found.items()
        if state.step == step and not state.stepping and layer.weight.grad is not None
    }
    if wrong or all(s.step != step or s.stepping for s, (_, step) in found.items()):
        _checked[optimizer] = len(optimizer.param_groups)
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
