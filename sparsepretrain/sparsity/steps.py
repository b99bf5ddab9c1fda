"""What happens around the step of an optimiser, and after weights were edited by hand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.kernels import (
    pack_rows,
    packed_flip_count,
    unpacked,
)
from sparsepretrain.optim._initialization import creates_state, forget_step
from sparsepretrain.sparsity.layers import SparseLayer
from sparsepretrain.sparsity.model_state import ModelState


class Steps:
    """J before a step; counters, projections and flips after it.

    Args:
        state: of the model.
        layers: name -> sparse layer, in the model's order.
    """

    only_finite = False
    """True if the caller ends, or does not step, where a gradient is not finite. Then no step that
    counts is skipped by a fused optimizer, and nothing waits for the device to learn of it."""

    def __init__(self, state: ModelState, layers: Mapping[str, SparseLayer]) -> None:
        self.state, self.layers = state, layers
        # masks of the weights before an update, for methods that change weights after it
        self._held: dict[str, Tensor] = {}
        self._counts = True  # the step that is being taken trains the model

    @property
    def decay(self) -> float:
        """See :attr:`Sparsifier.decay`."""
        self.state.sync()
        method = self.state.method
        if not method.phase.training or not (method.on_gradient or method.on_weight):
            return 0.0
        return float(getattr(method, "decay", getattr(method.options, "decay", 0.0)))

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """J. With a closure the gradients exist only after it has run, so it is wrapped."""
        self.state.stepping = True
        self.take_baseline()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._counts = not creates_state(optimizer)
            if self._counts:
                self.adjust_gradients(optimizer)
            return None

        called = False

        @functools.wraps(closure)
        def with_adjustment() -> Any:
            nonlocal called
            if called:  # the optimiser has moved the weights since
                self.refresh()
            called = True
            loss = closure()
            self.adjust_gradients(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], with_adjustment, *args[2:]), kwargs
        return args, kwargs | {"closure": with_adjustment}

    @torch.no_grad()
    def adjust_gradients(self, optimizer: Optimizer) -> None:
        """J, of the gradients that ``optimizer`` is about to use."""
        self.state.sync()
        state, method = self.state, self.state.method
        if not method.phase.training or not (method.on_gradient or method.on_weight):
            return
        # fused optimisers unscale inside their kernel: the decay has to carry the scale until then
        scale = getattr(optimizer, "grad_scale", None)
        for name, layer in self.layers.items():
            own = layer.sparsity
            weight, grad = own.rows.local(layer.weight), own.rows.gradient(layer.weight)
            if grad is None:
                continue
            mask = own.adjusting_mask(weight)
            if method.on_weight:
                self._held[name] = mask
            if not method.on_gradient:
                continue
            rounds = self.decay > 0 and weight.dtype.itemsize < 4 and not state.told
            before = grad.clone() if rounds else None
            method.adjust_gradient_(grad, weight, mask, 1.0 if scale is None else scale)
            if before is not None:  # looked at once, at the start
                state.told = True
                share = lost_decay(before, grad, weight, unpacked(mask, weight.shape))
                if share > 0.5:
                    warnings.warn(
                        f"masked decay changes only {1 - share:.0%} of the masked gradients of "
                        f"layer {name!r}: {share:.0%} is lost to rounding in "
                        f"{str(weight.dtype).removeprefix('torch.')}; keep fp32 parameters and "
                        "autocast",
                        SparsePretrainWarning,
                        stacklevel=5,
                    )

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The weights have changed: what the next step needs is made of them."""
        self.state.stepping = False
        if not self._counts:
            self._counts = True
            forget_step(optimizer)
            return
        held, self._held = self._held, {}
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and not self.only_finite and bool(found_inf):
            return
        state, method = self.state, self.state.method
        if held:
            # looked up anew: the optimiser's load_state_dict replaces the group dictionaries
            rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
            for name, mask in held.items():
                rows, weight = self.layers[name].sparsity.rows, self.layers[name].weight
                rate = float(rates[id(rows.parameter(weight))])
                method.adjust_weight_(rows.local(weight), mask, rate)
        state.begin(state.step + 1)
        method.after_step(optimizer)
        start, stop = method.window
        inside, compares = start <= state.step < stop, method.compares
        if compares:
            state.interval, state.compared_at = state.step - state.compared_at, state.step
        state.write()
        state.reshard()
        if inside and method.updates:
            for layer in self.layers.values():
                layer.sparsity.update(layer.weight)
        self.project()
        if compares:
            self.compare()
        if not (method.on_gradient or method.on_weight):
            for layer in self.layers.values():
                layer.sparsity.cache.mask = None

    def refresh(self) -> None:
        """See :meth:`Sparsifier.refresh`."""
        self.state.sync()
        self.state.reshard()
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Project the weights again in layers that store operands."""
        for layer in self.layers.values():
            layer.sparsity.cache.refresh(layer.weight)

    def take_baseline(self) -> None:
        """Remember the masks of initial weights, if that is due, for the first flip rate."""
        if not self.state.baseline_due:
            return
        if all(layer.sparsity.initialized for layer in self.layers.values()):
            self.state.baseline_due = False
            self.compare()

    @torch.no_grad()
    def compare(self) -> None:
        """Count the flips since the last comparison and remember the new masks."""
        counts = []
        for layer in self.layers.values():
            own = layer.sparsity
            mask = own.projected_mask(layer.weight)
            mask = own.chosen_mask(layer.weight) if mask is None else mask
            packed = mask if mask.dtype == torch.uint8 else pack_rows(mask)
            counts.append(packed_flip_count(own.previous_mask, packed, replace=True))
        self.state.flips = torch.stack([count.to(counts[-1].device) for count in counts])


def lost_decay(before: Tensor, after: Tensor, weight: Tensor, mask: Tensor) -> float:
    """Share of the masked entries of a layer whose decay rounding has lost.

    Args:
        before, after: what the decay is applied to, a gradient or the weight itself.
        weight: decayed; a zero has nothing to lose.
        mask: bool; what it spares is not looked at.
    """
    lost = (after == before) & ~mask & (weight != 0)
    return float(lost.sum() / (~mask).sum().clamp(min=1))
