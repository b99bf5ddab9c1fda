"""The handle to a sparse model: rides on an optimiser's step, measures, saves its counters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.kernels import boundary_magnitudes
from sparsepretrain.sparsity import reminder
from sparsepretrain.sparsity.coverage import Coverage, cover
from sparsepretrain.sparsity.fp8 import FP8Recipe
from sparsepretrain.sparsity.layers import SparseLayer, refuse_sharded
from sparsepretrain.sparsity.policy import Method
from sparsepretrain.sparsity.state import Clock


class MicroBatchCounter:
    """Forward pre-hook of the model: counts training forwards since the last optimiser step.

    A step that a loss scaler skips is seen by no hook of the optimiser; what is seen is that the
    gradients are gone (``zero_grad``) though no step was completed. Counting then starts anew. With
    ``zero_grad(set_to_none=False)`` they are not gone: such loops call ``Sparsifier.micro_batch``.

    A class, so that a model that carries it can be copied and pickled.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._had_gradient = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Count, unless it is an evaluation."""
        if module.training and torch.is_grad_enabled():
            self._notice_a_skipped_step(module)
            self.clock.count_forward()

    @torch.compiler.disable
    def _notice_a_skipped_step(self, module: nn.Module) -> None:
        layer = next((m for m in module.modules() if isinstance(m, SparseLayer)), None)
        has_gradient = layer is not None and layer.weight.grad is not None
        if self._had_gradient and not has_gradient:
            self.clock.restart()
        self._had_gradient = has_gradient


class Sparsifier:
    """What :func:`sparsepretrain.sparsify` returns.

    Attributes:
        method: the row of the operand table in use.
        layers: name -> sparse layer, in the model's order.
        recipe: of simulated fp8; None: the products follow autocast.
    """

    def __init__(
        self,
        method: Method,
        layers: dict[str, SparseLayer],
        clock: Clock,
        model: nn.Module,
        recipe: FP8Recipe | None = None,
    ) -> None:
        self.method = method
        self.layers = layers
        self.recipe = recipe
        self._clock = clock
        self._model = model
        self._handles: list[Any] = []
        self._compared_at = 0
        self._interval = 0
        self._set_phase()
        reminder.expect_attach(next(iter(layers.values())))

    def __repr__(self) -> str:
        words = [self.method.title, f"{len(self.layers)} layers"]
        words += [] if self.recipe is None else [f"{self.recipe.name} {self.recipe.recipe}"]
        words += [f"step {self.completed_steps}", *["densified"] * self._densified]
        return f"Sparsifier({', '.join(words)})"

    @property
    def refreshed(self) -> bool:
        """Whether masks that are in use for more than one step were compared after the last one."""
        return self.method.refresh > 1 and self._compared_at == self.completed_steps

    @property
    def flips(self) -> Tensor | None:
        """(layers,) int64, on the device: flips found after the last step; None: not compared."""
        found = [layer.sparsity.flips for layer in self.layers.values()]
        if self._compared_at != self.completed_steps:
            return None
        known = [flips for flips in found if flips is not None]
        return torch.stack(known) if len(known) == len(found) else None

    @property
    def completed_steps(self) -> int:
        """Optimiser steps taken since sparsify, resumed ones included."""
        return self._clock.step

    @property
    def active(self) -> bool:
        """Whether the next step is inside the window (sparse)."""
        start, stop = self.method.window
        return start <= self.completed_steps < stop

    @property
    def sparse(self) -> bool:
        """Whether the next step trains sparse: inside the window and not in a dense phase."""
        return self.active and self.method.sparse

    def attach(self, optimizer: Any) -> None:
        """Ride on ``optimizer``: J before its step; counters, projections and flips after it.

        Wrappers that expose ``.optimizer`` (Accelerate, Lightning) are unwrapped. Takes the mask
        baseline that the first flip rate is measured against.

        Raises:
            ConfigError: attached already, not an optimiser, a sparse weight is missing in it, or
                the model was sharded since (FSDP2).
        """
        self._require_sparse()
        if self._handles:
            raise ConfigError("the sparsifier is attached already: call detach() first")
        refuse_sharded(self.layers)
        while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
            inner = getattr(optimizer, "optimizer", None)
            if inner is None or inner is optimizer:
                kind = type(optimizer).__name__
                raise ConfigError(f"attach needs a torch optimiser, got {kind}")
            optimizer = inner
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        missing = [k for k, v in self.layers.items() if id(v.weight) not in held]
        if missing:
            raise ConfigError(f"sparse weights missing in the optimiser: {', '.join(missing)}")
        reminder.attached(next(iter(self.layers.values())))
        self.method.attached(optimizer, [layer.weight for layer in self.layers.values()])
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if self.completed_steps == 0:
            for layer in self.layers.values():
                layer.sparsity.take_baseline(layer)

    def detach(self) -> None:
        """Undo :meth:`attach`; the layers stay sparse."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def micro_batch(self, index: int, rank: int = 0, world: int = 1, *, capacity: int = 0) -> None:
        """State which part of the global batch the next forward sees.

        Without this call the training forwards since the last step are counted, on the rank that
        torch.distributed reports.

        Args:
            index: micro-batch of this rank within the optimiser step, from 0.
            rank, world: of the data-parallel group; ranks interleave: global index
                ``index·world + rank``.
            capacity: most tokens, padding included, that a layer sees in one micro-batch, where
                micro-batches differ in size; 0: all have equally many.
        """
        self._clock.capacity = capacity
        self._clock.set(micro=index * world + rank, counted=False)

    def refresh(self) -> None:
        """Project again: call it after changing weights by hand (an EMA swap, for instance)."""
        for layer in self.layers.values():
            layer.sparsity.invalidate()

    def masks(self) -> dict[str, Tensor]:
        """Name -> bool mask in use, shape of the stored weight.

        For ``sste`` the non-zeros of S(W); for dense methods and phases the mask that the method's
        rule would choose.
        """
        self._require_sparse()
        return {k: v.sparsity.mask(v).clone() for k, v in self.layers.items()}

    @torch.no_grad()
    def metrics(self, *, per_layer: bool = False) -> dict[str, float]:
        """Numbers of the current weights; synchronises with the device.

        ``flip_rate``: flips at the last comparison over all entries of the sparse weights
        (arXiv:2404.01847 section 4), left out before the first one and at steps without one.
        ``flip_interval``: steps between the two masks compared, left out when it is 1.
        ``density``: non-zeros of the forward weights. ``l1_gap``: mean over groups of
        |t3| - |t2|, the distance of a mask from its next best. ``sparse``: 1 when the next step
        trains sparse, 0 when it trains dense. A method may add its own (:meth:`Method.metrics`).

        Args:
            per_layer: also ``flip_rate/<layer>`` and ``l1_gap/<layer>``.
        """
        self._require_sparse()
        rows = {name: self._measure(layer) for name, layer in self.layers.items()}
        entries = sum(r["entries"] for r in rows.values())
        groups = sum(r["groups"] for r in rows.values())
        result = {
            "density": sum(r["nonzeros"] for r in rows.values()) / entries,
            "l1_gap": sum(r["gap"] for r in rows.values()) / groups,
            "sparse": float(self.sparse),
            **self.method.metrics(),
        }
        compared = all("flips" in r for r in rows.values())
        if compared:
            result["flip_rate"] = sum(r["flips"] for r in rows.values()) / entries
            if self._interval > 1:
                result["flip_interval"] = float(self._interval)
        if per_layer:
            for name, r in rows.items():
                result[f"l1_gap/{name}"] = r["gap"] / r["groups"]
                if compared:
                    result[f"flip_rate/{name}"] = r["flips"] / r["entries"]
        return result

    def coverage(self) -> Coverage:
        """Which layers are sparse and what each product sees."""
        self._require_sparse()
        return cover(self._model, self.layers, self.method, self.recipe)

    def state_dict(self) -> dict[str, Any]:
        """Counters and phase. Masks and scales are buffers of the model."""
        options = self.method.options
        return {
            "method": options.name,
            "pattern": [options.n, options.m],
            "layers": list(self.layers),
            "completed_steps": self.completed_steps,
            "compared_at": self._compared_at,
            "trains_dense": self.method.trains_dense,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; load the model's state dict first.

        Raises:
            CheckpointError: made by another method, pattern or set of layers.
        """
        mine = self.state_dict()
        for key in ("method", "pattern", "layers"):
            if state.get(key) != mine[key]:
                raise CheckpointError(
                    f"sparsifier state: {key} is {state.get(key)}, this model has {mine[key]}"
                )
        self._clock.set(step=int(state["completed_steps"]))
        self._compared_at = int(state["compared_at"])
        self.method.trains_dense = state["trains_dense"]
        self._set_phase()
        self.refresh()

    def _before_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]] | None:
        """J. With a closure the gradients exist only after it has run, so it is wrapped."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._adjust_gradients(optimizer)
            return None

        @functools.wraps(closure)
        def with_adjustment() -> Any:
            loss = closure()
            self._adjust_gradients(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], with_adjustment, *args[2:]), kwargs
        return args, {**kwargs, "closure": with_adjustment}

    @property
    def _densified(self) -> bool:
        return not all(isinstance(layer, SparseLayer) for layer in self.layers.values())

    def _require_sparse(self) -> None:
        if self._densified:
            raise ConfigError("the model was densified: call sparsify again for a new sparsifier")

    @torch.no_grad()
    def _adjust_gradients(self, optimizer: Optimizer) -> None:
        if not self.active or self.method.trains_dense or self._densified:
            return
        # fused optimisers unscale inside their kernel: the decay has to carry the scale until then
        scale = getattr(optimizer, "grad_scale", None)
        for layer in self.layers.values():
            grad = layer.weight.grad
            if grad is not None:
                mask = layer.sparsity.mask(layer)
                self.method.adjust_gradient_(
                    grad, layer.weight, mask, 1.0 if scale is None else scale
                )

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if (found_inf is not None and bool(found_inf)) or self._densified:
            return
        if self.active and type(self.method).adjust_weight_ is not Method.adjust_weight_:
            self._adjust_weights(optimizer)
        self._clock.set(step=self.completed_steps + 1)
        self.method.after_step(optimizer)
        self._set_phase()
        for layer in self.layers.values():
            state = layer.sparsity
            state.invalidate()
            if self.active:
                state.update(layer)
            if self.method.compares:
                state.compare(layer)
            else:
                state.flips = None
        if self.method.compares:
            self._interval = self.completed_steps - self._compared_at
            self._compared_at = self.completed_steps

    def _adjust_weights(self, optimizer: Optimizer) -> None:
        # looked up anew: the optimiser's load_state_dict replaces the group dictionaries
        rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
        for layer in self.layers.values():
            mask = layer.sparsity.mask_in_use()
            if mask is not None:
                self.method.adjust_weight_(layer.weight, mask, float(rates[id(layer.weight)]))

    def _set_phase(self) -> None:
        self.method.set_step(self.completed_steps)
        for layer in self.layers.values():
            if layer.sparsity.active != self.active:
                layer.sparsity.active = self.active
                layer.sparsity.invalidate()

    def _measure(self, layer: SparseLayer) -> dict[str, float]:
        state = layer.sparsity
        projection = state.project(layer)
        weight = layer.weight.detach()
        used = weight
        if projection.forward is not None and not self.method.trains_dense:
            used = projection.forward
        dropped, kept = boundary_magnitudes(weight, *self.method.pattern, dim=state.dim)
        row = {
            "entries": weight.numel(),
            "groups": dropped.numel(),
            "nonzeros": int(used.count_nonzero()),
            "gap": float((kept - dropped).sum(dtype=torch.float64)),
        }
        if state.flips is not None:
            row["flips"] = int(state.flips)
        return row
