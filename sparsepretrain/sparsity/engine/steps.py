"""Hooks around the optimizer step, and refreshing after weights were edited by hand."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import (
    pack_rows,
    packed_flip_count,
    packed_flip_counts,
    unpacked,
    widen,
)
from sparsepretrain.optim._initialization import creates_state, forget_step
from sparsepretrain.sparsity.engine.attachments import frames_to_the_caller, read_together
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.engine.outside_reads import OutsideReads
from sparsepretrain.sparsity.engine.sharing import require_unshared
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.operand_table import DW, G, X


class Steps:
    """Apply J before a step; update counters, operands and flips after it."""

    def __init__(self, state: ModelState, layers: Mapping[str, SparseWeight]) -> None:
        self.state = state
        self.layers = layers
        parents: dict[nn.Module | None, tuple[nn.Module, str]] = {}
        for parent in state.root.modules():
            for key, child in parent._modules.items():
                parents.setdefault(child, (parent, key))
        self._places = [(*parents[layer], layer) for layer in layers.values()]
        # for methods that change weights after the update
        self._masks_before_update: dict[str, Tensor] = {}
        self._is_real_step = True  # False in a step that only creates optimizer state
        self._checked_rounding = False  # masked decay in low precision was looked at once
        self.checked_first = False
        """True once the first step has looked at what is looked at once."""
        self._warned_of_evaluation = False
        self._unused_closure = False  # given to the present step, and not called so far

    @property
    def decay(self) -> float:
        """See :attr:`Sparsifier.decay`."""
        self.state.sync()
        method = self.state.method  # λ is the same with any pattern
        if not _adjusts(method):
            return 0.0
        return method.decay

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Apply J. A closure is wrapped, because gradients exist only after it has run."""
        if not self.state.attachment.enter(optimizer):  # a closure may run forwards from here on
            return None
        if any(parent._modules.get(key) is not layer for parent, key, layer in self._places):
            require_present(self.state.root, self.layers)  # or it is wrapped
        require_own_weights(self.layers)
        if not self.checked_first:  # transformers ties weights when the embedding is resized
            require_unshared(self.state.root, self.layers)
            require_known(self.state.root)
        require_held(self.layers, optimizer)
        self.take_baseline()
        self.state.check_step(ended=False)
        if self.state.step == 0:
            self.warn_of_old_tensors()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            # torch.distributed.checkpoint steps an optimizer once to create its state
            self._is_real_step = not creates_state(optimizer)
            if self._is_real_step:
                self.adjust_gradients(optimizer)
            return None

        called = False
        self._unused_closure = True

        @functools.wraps(closure)
        def with_adjustment() -> Any:
            nonlocal called
            if called:  # the optimizer has moved the weights since
                self.refresh()
            called = True
            self._unused_closure = False
            loss = closure()
            self.adjust_gradients(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], with_adjustment, *args[2:]), kwargs
        return args, kwargs | {"closure": with_adjustment}

    def warn_of_bypassed(self) -> None:
        """Warn once of layers with a gradient that never ran: does another module read the weight?

        Swin and BEiT do so. Compiled forwards leave no trace here, so nothing is said with them.
        """
        if self.checked_first:
            return
        self.checked_first = True
        warn_of_outside_reads(self.end_watch())
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]:
            return
        silent = [
            name
            for name, layer in self.layers.items()
            if not (layer.operands.has_run or layer.operands.ran_in_evaluation)
            and layer.operands.rows.gradient(layer.weight) is not None
        ]
        if silent:
            more = f" and {len(silent) - 1} more layers" if len(silent) > 1 else ""
            warnings.warn(
                f"{silent[0]!r}{more} has a gradient, but its forward did not run: either the "
                "module around it reads the weight itself, which is dense there (then exclude it), "
                "or it was skipped in this step and something else gave it a gradient, such as a "
                "penalty (then nothing is wrong)",
                SparsePretrainWarning,
                stacklevel=frames_to_the_caller(),
            )

    def end_watch(self) -> dict[str, OutsideReads]:
        """End the watch over reads of the weights; return what it has seen, by layer."""
        self.state.watches_reads = False
        watches = {}
        for name, layer in self.layers.items():
            watch, layer.operands.outside = layer.operands.outside, None
            if watch is not None:
                watch.close()
                watches[name] = watch
        return watches

    def warn_of_evaluation(self) -> None:
        """Warn once of layers that are trained in evaluation mode, where gradients are plain.

        Only of methods that change inputs or gradients, and of fp8: the weight that a forward
        multiplies by is the same in both modes.
        """
        if self._warned_of_evaluation:
            return
        row = self.state.method.phase.row
        plain = (row.Xf, row.Xw, row.P, row.U) == (X, X, G, G)
        if plain and self.state.precision is None:
            return
        evaluated = [
            name
            for name, layer in self.layers.items()
            if layer.operands.ran_in_evaluation
            and not layer.operands.has_run
            and layer.operands.rows.gradient(layer.weight) is not None
        ]
        for layer in self.layers.values():  # the next step is judged by its own forwards
            layer.operands.has_run = False
            layer.operands.ran_in_evaluation = False
        if evaluated:
            self._warned_of_evaluation = True
            more = f" and {len(evaluated) - 1} more layers" if len(evaluated) > 1 else ""
            warnings.warn(
                f"{evaluated[0]!r}{more} was trained in evaluation mode, where inputs and "
                f"gradients are not those of {self.state.title}: call model.train(); to "
                "freeze BatchNorm or dropout, call eval() of those modules alone",
                SparsePretrainWarning,
                stacklevel=frames_to_the_caller(),
            )

    def warn_of_old_tensors(self) -> None:
        """Warn if weights were initialized after ``sparsify``, from whose weights masks are."""
        known = {n: layer.operands.lost_source(layer.weight) for n, layer in self.layers.items()}
        flags = read_together({name: flag for name, flag in known.items() if flag is not None})
        if lost := [name for name, flag in flags.items() if flag]:
            more = f" and {len(lost) - 1} more layers" if len(lost) > 1 else ""
            what = ", ".join(self.layers[lost[0]].sparsity.method_tensors)
            warnings.warn(
                f"{self.state.method.options.name}: the weight of {lost[0]!r}{more} changed after "
                f"sparsify, but {what} still belongs to the old values: initialize first, or call "
                "sparsifier.reset() before the first step",
                SparsePretrainWarning,
                stacklevel=frames_to_the_caller(),
            )

    @torch.no_grad()
    def adjust_gradients(self, optimizer: Optimizer) -> None:
        """Apply J to the gradients that ``optimizer`` is about to use."""
        self.warn_of_bypassed()
        self.state.sync()
        self.warn_of_evaluation()
        method = self.state.method
        if method.follows_policy:
            require_policy(method, self.layers)
        # fused optimizers unscale inside their kernel, so the decay has to be scaled too
        scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else scale  # a tensor: each product is a launch
        negates = getattr(optimizer, "maximize", False)  # where groups do not have it
        groups = [g for g in optimizer.param_groups if g.get("maximize", negates)]
        negated = {id(parameter) for group in groups for parameter in group["params"]}
        if method.has_penalty and method.phase.training:
            self._add_penalties(scale, negated)
        if not _adjusts(method):
            return
        on_gradient = method.phase.row.J != DW
        guides = _guides(method)
        guided: dict[Tensor, Tensor] = {}
        for name, layer in self.layers.items():
            operands = layer.operands
            weight = operands.rows.local(layer.weight)
            grad = operands.rows.gradient(layer.weight)
            if grad is None:
                continue
            mask = operands.mask(weight)
            # unpacking takes a launch, and writes and reads a byte per weight
            if not method.reads_packed_masks:
                mask = unpacked(mask, weight.shape)
            if guides:
                guided[operands.rows.parameter(layer.weight)] = operands.rows.stored(mask)
            if not on_gradient:
                if _changes_weights(method):  # after the update, under the mask from before it
                    self._masks_before_update[name] = mask
                continue
            rounds = self.decay > 0 and weight.dtype.itemsize < 4 and not self._checked_rounding
            before = grad.clone() if rounds else None
            # an optimizer that maximizes subtracts the gradient, and with it the decay
            is_negated = bool(negated) and id(operands.rows.parameter(layer.weight)) in negated
            signed = -scale if is_negated else scale
            operands.method.adjust_gradient_(grad, weight, mask, signed)
            if before is not None:
                self._checked_rounding = True
                warn_if_decay_is_lost(name, before, grad, weight, mask)
        if guided:
            method.guide_optimizer(optimizer, guided)

    def _add_penalties(self, scale: Any, negated: Collection[int]) -> None:
        """Add the gradients of penalties to those of weights and of the method's Parameters.

        Args:
            scale: loss scale that the gradients still contain.
            negated: ids of Parameters whose gradients the optimizer subtracts (``maximize``).
        """
        for layer in self.layers.values():
            rows = layer.operands.rows
            # a penalty couples a Parameter and the weight, which FSDP shards by rows of their own
            weight = rows.gather(widen(rows.local(layer.weight).detach()))
            state = rows.whole_state(layer.sparsity)
            for name, gradient in layer.operands.method.penalty_gradients(weight, state).items():
                if name == "weight":
                    parameter = rows.parameter(layer.weight)
                    grad, own = rows.gradient(layer.weight), rows.own_rows(gradient)
                else:
                    parameter = getattr(layer.sparsity, name)
                    grad, own = parameter.grad, rows.shard_like(gradient, parameter)
                if grad is not None:  # the layer took part in this step
                    factor = -scale if id(parameter) in negated else scale
                    grad.add_((own * factor).to(grad.dtype))

    def _take_proximal_steps(self) -> None:
        """Write the weights that the method makes of those that the optimizer left."""
        for layer in self.layers.values():
            if layer.operands.rows.gradient(layer.weight) is not None:
                layer.operands.take_proximal_step(layer.weight)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Prepare the next step from the changed weights."""
        if not self.state.attachment.leave():
            return
        if not self._is_real_step:
            self._is_real_step = True
            forget_step(optimizer)
            return
        if self._unused_closure:
            self._unused_closure = False
            if _adjusts(self.state.method):
                warnings.warn(
                    f"the step of {type(optimizer).__name__} was given a closure and did not call "
                    "it: gradients were used as they were, without the masked decay or mask of "
                    f"{self.state.method.options.name}; call step() without a closure",
                    SparsePretrainWarning,
                    stacklevel=frames_to_the_caller(),
                )
        masks = self._masks_before_update
        self._masks_before_update = {}
        found_inf = getattr(optimizer, "found_inf", None)
        # GradScaler skipped the update on the device: weights, masks and counters stay the same.
        if found_inf is not None and not self.state.attachment.only_finite and bool(found_inf):
            return
        state = self.state
        method = self.state.method
        if masks:
            # looked up in each step: load_state_dict replaces the group dictionaries; groups
            # without a sparse weight may have no rate (`require_rates`)
            rates: Any = {id(p): g.get("lr") for g in optimizer.param_groups for p in g["params"]}
            for name, mask in masks.items():
                weight = self.layers[name].weight
                operands = self.layers[name].operands
                rows = operands.rows
                rate = rates[id(rows.parameter(weight))]
                operands.method.adjust_weight_(rows.local(weight), mask, float(rate))
        if _overrides(method, "proximal_step") and method.phase.training:
            self._take_proximal_steps()
        # The order matters: the phase of the next step says which operands are made, FSDP has to
        # drop those of the old weights first, and comparing masks reuses those of the projection.
        state.advance_to(state.step + 1)
        method.read_optimizer(optimizer)
        schedule = method.schedule
        compares = schedule.compares_after(state.step)
        if compares:
            state.flip_interval, state.compared_at = state.step - state.compared_at, state.step
        state.write()  # enters the phase again: the optimizer may have changed it
        state.reshard()
        if not schedule.dense_reason(state.step) and type(method).update_ is not Method.update_:
            for layer in self.layers.values():
                layer.operands.update(layer.weight)
            state.warn_of_remarks()
        self.project()
        state.check_step(ended=True)
        if compares:
            state.flips = self.compare()  # stays on the device until metrics() reads it
        if not _adjusts(method):  # Free the mask: nothing reads it before the next projection.
            for layer in self.layers.values():
                layer.operands.free_mask()

    @property
    def follows_optimizer(self) -> bool:
        """True if the optimizer decides about the phase."""
        return _overrides(self.state.method, "read_optimizer")

    def optimizer_was_loaded(self, optimizer: Optimizer) -> None:
        """Enter the phase of an optimizer whose state dict was loaded after ``attach``."""
        state = self.state
        state.sync()
        before = state.method.scalars
        state.method.read_optimizer(optimizer)
        if state.method.scalars != before:
            state.write()
            self.refresh()

    def refresh(self) -> None:
        """See :meth:`Sparsifier.refresh`."""
        self.state.sync()
        self.state.reshard()
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Project the weights again where operands are stored."""
        for layer in self.layers.values():
            layer.operands.refresh(layer.weight)

    def take_baseline(self) -> None:
        """Keep the masks of new weights, which the first flip rate is measured against."""
        if not self.state.baseline_due:
            return
        if all(layer.operands.initialized for layer in self.layers.values()):
            self.state.baseline_due = False
            self.compare()

    @torch.no_grad()
    def compare(self) -> Tensor:
        """Keep the present masks; return the flips since the last ones, (layers,) int64."""
        counts = []
        self.state.slice_flips = {}
        for name, layer in self.layers.items():
            mask = layer.operands.mask(layer.weight)
            packed = mask if mask.dtype == torch.uint8 else pack_rows(mask)
            previous = layer.sparsity.previous_mask
            slice_rows = layer.sparsity.slice_rows
            if slice_rows is None:
                counts.append(packed_flip_count(previous, packed, replace=True))
                continue
            flips = packed_flip_counts(previous, packed, len(packed) // slice_rows)
            previous.copy_(packed)
            self.state.slice_flips[name] = flips
            counts.append(flips.sum())
        return torch.stack([count.to(counts[-1].device) for count in counts])


def require_present(root: nn.Module, layers: Mapping[str, SparseWeight]) -> None:
    """Refuse layers that left the model: what runs in their place is dense."""
    present = set(root.modules())
    gone = [name for name, layer in layers.items() if layer not in present]
    if gone:
        raise ConfigError(
            f"sparse layers were replaced after sparsify: {', '.join(gone)}; "
            "sparsifier_of(model) returns a handle to the remaining ones"
        )


def require_known(root: nn.Module) -> None:
    """Refuse sparse layers that nobody steps, and modules that read the weight of one.

    A copy of a layer (``copy.deepcopy``, ``modules_to_save`` of peft) has counters of its own.
    """
    modules = set(root.modules())
    known: dict[ModelState, set[nn.Module]] = {}  # modules of models around the root
    for name, module in root.named_modules():
        if isinstance(module, SparseWeight):
            state = module.sparse_model
            if state.root not in modules and state not in known:
                known[state] = set(state.root.modules())
            # a container, such as nn.Sequential(*model[:-1]), has the layers themselves
            is_known = state.root in modules or root in known[state]
            if not is_known and (state.is_copy or module not in known[state]):
                raise ConfigError(
                    f"the sparse layer {name!r} is a copy of one (copy.deepcopy, modules_to_save "
                    "of peft), whose masks and phases nothing updates: copy layers before "
                    "sparsify, or densify the whole model before its parts are copied or regrouped"
                )
        base = getattr(module, "base_layer", None)
        if isinstance(base, SparseWeight) and len(getattr(module, "lora_magnitude_vector", ())):
            raise ConfigError(
                f"the adapter {name!r} is of DoRA, which computes norms of the stored weight of a "
                "sparse layer, and that is dense: use LoRA (use_dora=False), or exclude the layer"
            )


def require_own_weights(layers: Mapping[str, SparseWeight]) -> None:
    """Refuse layers whose weight is computed from another tensor since ``sparsify``.

    torch.nn.utils.prune, weight_norm and parametrizations replace the Parameter ``weight`` by one
    of another name; the optimizer then trains that one, and J would be lost.
    """
    computed = [name for name, layer in layers.items() if not layer.has_own_weight()]
    if computed:
        more = f" and {len(computed) - 1} more layers" if len(computed) > 1 else ""
        raise ConfigError(
            f"the weight of {computed[0]!r}{more} is computed from another tensor since sparsify "
            "(torch.nn.utils.prune, weight_norm, a parametrization): remove that, or do it first "
            "and exclude the layer; FullyShardedDataParallel (FSDP1) does it too: use fully_shard"
        )
    for name, layer in layers.items():
        shape = tuple(layer.weight.shape)
        expected = layer.expected_shape
        if shape != expected:
            remedy = "resize layers before sparsify, or densify first"
            if len(shape) < 2 or math.prod(shape) == math.prod(expected):
                remedy = (
                    "FullyShardedDataParallel (FSDP1) and DeepSpeed flatten weights, which then "
                    "have no masks; use fully_shard"
                )
            raise ConfigError(
                f"the weight of {name!r} has the shape {shape} since sparsify, and had "
                f"{expected}: {remedy}"
            )


def require_policy(method: Method, layers: Mapping[str, SparseWeight]) -> None:
    """Refuse a step of a method that learns from losses, if no losses were compared."""
    name, layer = next(iter(layers.items()))
    if layer.sparsity.logits.grad is None:
        raise ConfigError(
            f"{method.options.name} learns from losses, and the logits of {name!r} have no "
            "gradient: call sparsifier.policy_step(loss_of_batch) before optimizer.step(), without "
            "a backward"
        )


def require_rates(method: Method, layers: Mapping[str, SparseWeight], optimizer: Optimizer) -> None:
    """Refuse an optimizer without learning rates if the method changes weights by them."""
    if method.sparse_row.J != DW or not _changes_weights(method):
        return
    weights = {id(layer.operands.rows.parameter(layer.weight)) for layer in layers.values()}
    for group in optimizer.param_groups:
        held = any(id(parameter) in weights for parameter in group["params"])
        if held and group.get("lr") is None:
            raise ConfigError(
                f"{type(optimizer).__name__} has no learning rate in its groups (lr), by which "
                f"{method.options.name} multiplies the decay of weights: decay gradients instead, "
                "or use an optimizer with lr"
            )


def require_class(method: Method, layers: Mapping[str, SparseWeight], optimizer: Optimizer) -> None:
    """Refuse an optimizer of another class than the method needs to train sparse weights."""
    needed = method.optimizer_class
    trains = any(layer.weight.requires_grad for layer in layers.values())
    if needed is not None and trains and not isinstance(optimizer, needed):
        # named by the package that exports it, not by its private file
        raise ConfigError(
            f"method {method.options.name} needs a {needed.__module__.partition('._')[0]}."
            f"{needed.__name__}, got {type(optimizer).__name__}"
        )


def require_held(layers: Mapping[str, SparseWeight], optimizer: Optimizer) -> None:
    """Refuse weights that left the optimizer since ``attach``: it trains other tensors.

    DeepSpeed gives the optimizer flat partitions of the weights, and
    ``load_state_dict(assign=True)`` gives the model other Parameters.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    gone = []
    for name, layer in layers.items():
        parameter = layer.operands.rows.parameter(layer.weight)
        if parameter.requires_grad and id(parameter) not in held:
            gone.append(name)
    if gone:
        more = f" and {len(gone) - 1} more layers" if len(gone) > 1 else ""
        raise ConfigError(
            f"the weight of {gone[0]!r}{more} trains, but is not in the {type(optimizer).__name__} "
            "that the sparsifier is attached to. If it was frozen, add it to that optimizer; after "
            "load_state_dict(assign=True), build the optimizer again and attach to it; DeepSpeed, "
            "which gives the optimizer flat partitions, is not supported"
        )


def warn_of_outside_reads(watches: Mapping[str, OutsideReads]) -> None:
    """Warn once of layers whose weight something else reads."""
    flags = {name: watch.found for name, watch in watches.items() if watch.found is not None}
    if read := [name for name, flag in read_together(flags).items() if flag]:
        more = f" and {len(read) - 1} more layers" if len(read) > 1 else ""
        warnings.warn(
            f"{read[0]!r}{more} has a gradient that its forward did not give: if something else "
            "multiplies by its weight, such as a decoder that is tied by hand, that one is dense, "
            "and densify will change what it computes (then exclude the layer); if it is a penalty "
            "on the weights, nothing is wrong",
            SparsePretrainWarning,
            stacklevel=frames_to_the_caller(),
        )


def _adjusts(method: Method) -> bool:
    """Return True if the method changes gradients, weights or the update in the present phase."""
    if not method.phase.training:
        return False
    return method.phase.row.J != DW or _changes_weights(method) or _guides(method)


def _changes_weights(method: Method) -> bool:
    """Return True if the method changes weights after the update."""
    return _overrides(method, "adjust_weight_")


def _guides(method: Method) -> bool:
    """Return True if the method has an optimizer that wants to know its masks."""
    return _overrides(method, "guide_optimizer")


def _overrides(method: Method, name: str) -> bool:
    """Return True if the method has a function of its own for a hook of :class:`Method`."""
    return getattr(type(method), name) is not getattr(Method, name)


def warn_if_decay_is_lost(
    name: str, before: Tensor, after: Tensor, weight: Tensor, mask: Tensor
) -> None:
    """Warn if rounding loses the decay of most masked entries of a layer.

    Args:
        name: of the layer.
        before, after: gradient without and with the decay.
        weight: decayed weight; zeros are ignored.
        mask: bool or packed by rows; entries that it keeps are ignored.
    """
    masked = ~unpacked(mask, weight.shape)
    lost = (after == before) & masked & (weight != 0)
    share = float(lost.sum() / masked.sum().clamp(min=1))
    if share > 0.5:
        warnings.warn(
            f"masked decay changes only {1 - share:.0%} of the masked gradients of layer {name!r}: "
            f"{share:.0%} is lost to rounding in {str(weight.dtype).removeprefix('torch.')}; keep "
            "fp32 parameters and autocast",
            SparsePretrainWarning,
            stacklevel=6,
        )
