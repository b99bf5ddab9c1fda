"""Attach the hooks of a sparse model to an optimizer, and warn if another one updates it.

A loop without the hooks runs without an error and trains something else: no masked decay, no mask
search, no phases, no flip rates. Optimizers report each step to PyTorch's global hooks, so the
warnings need no guesses from forwards or weights, and wait for no device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.model_state import ModelState


class Layer(Protocol):
    """Parts of a sparse layer that an optimizer step involves."""

    weight: Tensor
    sparsity: LayerState


_Suspects = dict["ModelState", tuple[Layer, int]]

living: WeakSet[Layer] = WeakSet()  # all sparse layers of the process, copies included
stepping: WeakSet[ModelState] = WeakSet()  # models whose attached optimizer is inside its step
_attached: WeakKeyDictionary[ModelState, tuple[ref[Optimizer], tuple[Any, ...]]] = (
    WeakKeyDictionary()
)
_detached: WeakSet[ModelState] = WeakSet()  # trained without the hooks on purpose
# optimizer -> number of param groups checked; cleared when a layer or an attachment changes
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
# optimizer inside its step -> models whose weights it holds without their hooks, and their steps
_suspects: WeakKeyDictionary[Optimizer, _Suspects] = WeakKeyDictionary()
_released: WeakSet[Optimizer] = WeakSet()  # carried the hooks of a model that was densified
# sparse layer with a frozen weight -> a few values of the weight at its last evaluation
frozen_values: WeakKeyDictionary[Layer, Tensor] = WeakKeyDictionary()
_global_hooks: list[Any] = []


def watch(layer: Layer) -> None:
    """Check every optimizer step that updates this sparse layer."""
    if not _global_hooks:
        _global_hooks.append(register_optimizer_step_pre_hook(_before))
        _global_hooks.append(register_optimizer_step_post_hook(_after))
    living.add(layer)
    _checked.clear()


@torch.no_grad()
def warn_if_frozen_changed(layer: Layer) -> None:
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
    before = frozen_values.get(layer)
    frozen_values[layer] = values
    if before is not None and before.device == values.device and not torch.equal(before, values):
        warnings.warn(
            f"the frozen weight of the sparse layer {layer.sparsity.layer_name!r} changed outside "
            f"an optimizer step, and {layer.sparsity.model.method.options.name} projects it again: "
            "outputs change. Before adapters are merged, call sparsepretrain.densify(model)",
            SparsePretrainWarning,
            stacklevel=4,
        )


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers."""
    while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
        kind, outer = type(optimizer).__name__, optimizer
        optimizer = getattr(outer, "optimizer", None)
        if optimizer is None or optimizer is outer:
            raise ConfigError(f"attach needs a torch optimizer, got {kind}")
    return optimizer


def holder_of(layers: Mapping[str, Layer], optimizers: Iterable[Any]) -> Optimizer:
    """Return the optimizer that holds the weights of sparse ``layers``, without its wrappers.

    Frozen weights need no optimizer; if all are frozen, the first one is returned.
    """
    found = [unwrapped(optimizer) for optimizer in optimizers]
    holders = {
        id(parameter): one
        for one in found
        for group in one.param_groups
        for parameter in group["params"]
    }
    weights = {name: layer.weight for name, layer in layers.items()}
    own = {
        f"{name}.sparsity.{key}": parameter
        for name, layer in layers.items()
        for key, parameter in layer.sparsity.named_parameters()
    }
    trained = (weights | own).items()
    missing = [name for name, p in trained if p.requires_grad and id(p) not in holders]
    if missing:
        late = ": build the optimizer after sparsify" * (set(missing) <= set(own))
        if any(layer.sparsity.rows.is_sharded for layer in layers.values()):
            late = ": build the optimizer after fully_shard"
        text = f"sparse weights missing in the optimizer: {', '.join(missing)}"
        raise ConfigError(text + late)
    holding = {holders[id(p)]: None for p in weights.values() if id(p) in holders}
    if len(holding) > 1:
        kinds = ", ".join(type(one).__name__ for one in holding)
        raise ConfigError(f"sparse weights are in {kinds}: put all of them into one optimizer")
    return next(iter(holding), found[0])


def attached_optimizer(state: ModelState) -> Optimizer | None:
    """Return the optimizer that carries the hooks of a sparse model, if it still exists."""
    return _attached[state][0]() if state in _attached else None


def attach(state: ModelState, optimizer: Optimizer, before: Any, after: Any) -> None:
    """Register two step hooks on ``optimizer``, which :func:`detach` removes."""
    _checked.clear()
    hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    _attached[state] = ref(optimizer), hooks
    _detached.discard(state)


def detach(state: ModelState, *, densified: bool = False) -> None:
    """Remove the hooks.

    Training without them is on purpose from now on, unless the model was ``densified``.
    """
    _checked.clear()
    optimizer = attached_optimizer(state)
    for hook in _attached.pop(state, (None, ()))[1]:
        hook.remove()
    if not densified:
        _detached.add(state)
        return
    _detached.discard(state)
    if optimizer is not None:
        _released.add(optimizer)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Find sparse weights that ``optimizer`` holds without the hooks of their model."""
    if _checked.get(optimizer) == len(optimizer.param_groups):
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers = [layer for layer in living if id(layer.weight) in held]
    found: _Suspects = {}
    for layer in sorted(layers, key=lambda layer: layer.sparsity.index):
        state = layer.sparsity.model
        if state not in _detached and attached_optimizer(state) is not optimizer:
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
    """Warn about models of :func:`_before` whose hooks did not run during the step."""
    found = _suspects.pop(optimizer, None)
    if not found:
        return
    # A wrapper such as SAM steps another optimizer inside its own step; either may have the hooks.
    followed = {s for s, (_, step) in found.items() if s.step != step or s in stepping}
    wrong = {
        state: layer
        for state, (layer, _) in found.items()
        if state not in followed and layer.weight.grad is not None
    }
    # Otherwise a weight had no gradient, and the next step shows who updates it.
    if wrong or len(followed) == len(found):
        _checked[optimizer] = len(optimizer.param_groups)
    for state, layer in wrong.items():
        other = attached_optimizer(state)
        to = "no optimizer" if other is None else f"another optimizer ({type(other).__name__})"
        warnings.warn(
            f"{type(optimizer).__name__} updated the sparse layer {layer.sparsity.layer_name!r} "
            f"({state.method.options.name}), but the sparsifier is attached to {to}: masks, masked "
            "decay, phases and flip rates do not follow; call sparsifier.attach(optimizer) (of a "
            "copy: sparsifier_of(model).attach(optimizer))",
            SparsePretrainWarning,
            stacklevel=3,
        )
