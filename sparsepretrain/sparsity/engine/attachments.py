"""Attach the hooks of a sparse model to an optimizer, and warn if weights change without them.

A loop without the hooks runs without an error and trains something else: no masked decay, no mask
search, no phases, no flip rates.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsepretrain.errors import ConfigError, SparsePretrainWarning


class Attachment:
    """Optimizer that carries the hooks of a sparse model, and the watch over its weights."""

    def __init__(self) -> None:
        self._optimizer: ref[Optimizer] | None = None
        self._handles: tuple[RemovableHandle, ...] = ()
        self.only_finite = False
        """True if training ends with the first gradient that is not finite.

        If a fused optimizer skips a step because of its ``found_inf``, the sparsifier may then
        advance all the same, and need not wait for the device to read it."""
        self.inside_step = False
        """True while the optimizer with the hooks is inside its step, or raised there."""
        self._nested = 0  # steps inside that step, of a class whose step calls that of its parent
        self._detached = False  # trained without the hooks on purpose
        self._warned = False
        self._seen: Seen | None = None
        self._changes = 0  # of the weight since the last completed step
        self._compares = 0  # steps before which values are still compared, after a change
        self._left: Tensor | None = None  # some values of the weight after the last step

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that carries the hooks, if it still exists."""
        return None if self._optimizer is None else self._optimizer()

    def attach(
        self,
        optimizer: Optimizer,
        before: Any,
        after: Any,
        *,
        loaded: Any = None,
        only_finite: bool = False,
    ) -> None:
        """Register hooks on ``optimizer``, which :meth:`detach` removes.

        Args:
            optimizer: holds the sparse weights.
            before: called before each step.
            after: called after each step.
            loaded: called after ``load_state_dict`` of the optimizer; None: nothing is.
            only_finite: see :attr:`only_finite`.
        """
        self.only_finite = only_finite
        self._handles = hook_step(optimizer, before, after)
        if loaded is not None:
            self._handles += (optimizer.register_load_state_dict_post_hook(loaded),)
        self._optimizer = ref(optimizer)
        self._detached = False
        self._seen = None

    def detach(self) -> None:
        """Remove the hooks; training without them is on purpose from now on."""
        for handle in self._handles:
            handle.remove()
        self._optimizer = None
        self._handles = ()
        self._detached = True

    def enter(self, optimizer: Optimizer) -> bool:
        """Note the begin of a step; return False if it is a part of another one.

        Torch calls the hooks in the step of a class and again in that of its parent, if the first
        calls the second and objects of both exist.
        """
        if self.inside_step and _frames_of_step(optimizer) > 1:
            self._nested += 1
            return False
        self.inside_step, self._nested = True, 0
        return True

    def leave(self) -> bool:
        """Note the end of a step; return False if it was a part of another one."""
        if self._nested:
            self._nested -= 1
            return False
        self.inside_step = False
        return True

    def forget(self) -> None:
        """Accept the present weights: a state dict was loaded."""
        self._seen = None

    def check(self, weight: Tensor, layer: str, step: int) -> None:
        """Warn once if the weight keeps changing between forwards and the hooks do not run.

        A single change may be an edit by hand.

        Args:
            weight: Parameter of a sparse layer, at a training forward.
            layer: its name and method.
            step: completed steps of the sparsifier.
        """
        if self._detached or self._warned or self.inside_step or weight.is_meta:
            return
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():  # comparing would wait
            return
        optimizer = self.optimizer
        seen, self._seen = self._seen, Seen(weight, step, _fingerprint(weight, optimizer))
        if seen is None or seen.weight is not weight or seen.step != step:
            self._changes = 0
            return
        if _are_equal(seen.fingerprint, self._seen.fingerprint):
            return
        self._changes += 1
        self._compares = self._compares or 4
        # noise may be added to the weights for each micro-batch, and taken away before the step
        if self._changes >= (2 if optimizer is None else 64):
            self._warn(layer)

    def before_step(self, weight: Tensor, layer: str) -> None:
        """Warn once if the weight has left the values of the last step: it has two optimizers.

        Values are compared after a change between two forwards only, since that waits for the
        device; one that is undone, as SAM's, is none.
        """
        if self._left is None or self._warned:
            return
        left, self._left = self._left, None
        self._compares -= 1
        now = some_values(weight)
        if left.shape != now.shape or left.device != now.device:  # the model was moved
            return
        # noise that is added and taken away leaves rounding errors
        resolution = torch.finfo(now.dtype).eps * 64 * left.abs().max()
        if bool((now - left).abs().max() > resolution):
            self._warn(layer)

    def after_step(self, weight: Tensor) -> None:
        """Note the weight that the attached optimizer left."""
        if self._compares > 1:
            self._left = some_values(weight)

    def _warn(self, layer: str) -> None:
        optimizer = self.optimizer
        self._warned = True
        to = "no optimizer"
        if optimizer is not None:
            to = f"another optimizer ({type(optimizer).__name__})"
        warnings.warn(
            f"the sparse layer {layer} was updated, but the sparsifier is attached to {to}: masks, "
            "masked decay, phases and flip rates do not follow; call sparsifier.attach(optimizer) "
            "(of a copy: sparsifier_of(model).attach(optimizer))",
            SparsePretrainWarning,
            stacklevel=frames_to_the_caller(),
        )


def hook_step(optimizer: Optimizer, before: Any, after: Any) -> tuple[RemovableHandle, ...]:
    """Call ``before`` and ``after`` in each step of an optimizer, as hooks of torch are called.

    ``Optimizer.__init__`` gives the class a step that calls hooks. Optimizers that leave it out, as
    timm's Lookahead does, take hooks without calling them: the step of the object is wrapped.
    """
    if getattr(optimizer.step, "hooked", False):
        return (
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        )
    hooks: dict[int, Any] = OrderedDict()
    handle = RemovableHandle(hooks)
    hooks[handle.id] = None
    own = vars(optimizer).get("step")  # a scheduler may have wrapped it

    @functools.wraps(type(optimizer).step if own is None else own)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        inner = own or functools.partial(type(self).step, self)
        if not hooks:  # detached
            return inner(*args, **kwargs)
        changed = before(self, (self, *args), kwargs)
        if changed is not None:
            (_, *args), kwargs = changed
        result = inner(*args, **kwargs)
        after(self, (self, *args), kwargs)
        return result

    step.wrapped_for_hooks = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return (handle,)


def _frames_of_step(optimizer: Optimizer) -> int:
    """Return how many steps of ``optimizer`` that call hooks are running."""
    file = Optimizer.profile_hook_step.__code__.co_filename
    count = 0
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file and code.co_name == "wrapper":
            arguments = frame.f_locals.get("args") or (None,)
            count += arguments[0] is optimizer
        frame = frame.f_back
    return count


class Seen(NamedTuple):
    """The watched weight at a training forward."""

    weight: Tensor
    step: int
    fingerprint: Tensor | int


def _fingerprint(weight: Tensor, optimizer: Optimizer | None) -> Tensor | int:
    """Return what changes with the weight: 16 values, or of an attached model its version.

    Torch counts the in-place writes of a tensor. Comparing the counts waits for no device, but
    fused optimizers and writes to ``.data`` are not counted.
    """
    if optimizer is not None and not weight.is_inference():
        return weight._version
    return some_values(weight)


def some_values(weight: Tensor) -> Tensor:
    """Return about 16 values of a tensor, which change when it is initialized or trained."""
    values = weight.detach().reshape(-1)
    return values[:: max(1, len(values) // 16)].clone()


def read_together(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Return 0-d tensors of bools or integers as numbers, in one wait for the device."""
    if not values:
        return {}
    device = next(iter(values.values())).device
    numbers = torch.stack([value.to(device) for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def frames_to_the_caller() -> int:
    """Return the ``stacklevel`` of the first caller outside torch and this package."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    depth = 0
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        depth, frame = depth + 1, frame.f_back
    return depth + 1


def _are_equal(first: Tensor | int, second: Tensor | int) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.device == second.device and torch.equal(first, second)
    return first is second or bool(first == second)


def torch_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """Yield the torch optimizers inside wrappers and containers (torchtitan).

    A container steps its members, which have the learning rates and states.
    """
    members = getattr(optimizer, "optimizers", None)
    if isinstance(members, list | tuple) and members:
        for member in members:
            yield from torch_optimizers(member)
    else:
        yield unwrapped(optimizer)


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers."""
    while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
        if type(optimizer).__module__.startswith("deepspeed."):
            raise ConfigError(
                "attach: DeepSpeed is not supported: its optimizers step on flattened partitions, "
                "which have no masks. Use FSDP2 (Sparsifier.prepare_sharding) or "
                "DistributedDataParallel"
            )
        kind = type(optimizer).__name__
        outer = optimizer
        optimizer = getattr(outer, "optimizer", None)
        if optimizer is None or optimizer is outer:
            raise ConfigError(f"attach needs a torch optimizer, got {kind}")
        if isinstance(optimizer, Optimizer) and _keeps_step(outer, optimizer):
            raise ConfigError(
                f"attach: {kind} has kept the step of {type(optimizer).__name__}, which calls no "
                "hooks: attach to the optimizer first, and wrap it afterwards"
            )
    return optimizer


def _keeps_step(wrapper: Any, optimizer: Optimizer) -> bool:
    """Return True if ``wrapper`` calls a step of ``optimizer`` that :func:`hook_step` cannot wrap.

    Accelerate keeps the step of the object when it scales gradients of float16.
    """
    kept = [
        value
        for value in getattr(wrapper, "__dict__", {}).values()
        if isinstance(value, MethodType) and value.__self__ is optimizer
    ]
    return any(v.__name__ == "step" and not _calls_hooks(v) for v in kept)


def _calls_hooks(step: Any) -> bool:
    """Return True if torch, or :func:`hook_step`, made this step call hooks."""
    # schedulers wrap it and keep this mark of torch
    return getattr(step, "hooked", False) or getattr(step, "wrapped_for_hooks", False)


def holder_of(
    weights: Mapping[str, Tensor],
    method_parameters: Mapping[str, nn.Parameter],
    optimizers: Iterable[Any],
    *,
    sharded: bool,
) -> Optimizer:
    """Return the optimizer that holds the sparse weights, without its wrappers.

    Frozen weights need no optimizer; if all are frozen, the first one is returned.

    Args:
        weights: layer -> weight.
        method_parameters: name -> Parameter of the method.
        optimizers: of the model.
        sharded: FSDP shards the weights.
    """
    unwrapped_optimizers = [each for given in optimizers for each in torch_optimizers(given)]
    holders: dict[int, Optimizer] = {}
    twice: dict[int, Optimizer] = {}
    for optimizer in dict.fromkeys(unwrapped_optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if holders.setdefault(id(parameter), optimizer) is not optimizer:
                    twice[id(parameter)] = optimizer
    if both := [name for name, weight in weights.items() if id(weight) in twice]:
        at = id(weights[both[0]])
        kinds = f"{type(holders[at]).__name__} and {type(twice[at]).__name__}"
        raise ConfigError(
            f"{', '.join(both[:3])}: the weight is in two optimizers ({kinds}), whose steps cannot "
            "both be counted: give it to one of them"
        )
    trained = {**weights, **method_parameters}.items()
    missing = [name for name, p in trained if p.requires_grad and id(p) not in holders]
    if missing:
        remedy = ""
        if set(missing) <= set(method_parameters):
            remedy = ": build the optimizer after sparsify"
        if sharded:
            remedy = ": build the optimizer after fully_shard"
        text = f"sparse weights missing in the optimizer: {', '.join(missing)}"
        raise ConfigError(text + remedy)
    holding = {holders[id(p)]: None for p in weights.values() if id(p) in holders}
    if len(holding) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in holding)
        raise ConfigError(f"sparse weights are in {kinds}: put all of them into one optimizer")
    return next(iter(holding), unwrapped_optimizers[0])
