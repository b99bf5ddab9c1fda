"""What is sparse about one layer: its projection of this optimiser step, masks, noise, clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsepretrain.kernels import NoiseKey, noise_key, pack_24, packed_flip_count
from sparsepretrain.kernels.groups import widen
from sparsepretrain.sparsity.fp8 import FP8Recipe, round_fp8
from sparsepretrain.sparsity.policy import Method, Projection

if TYPE_CHECKING:
    from sparsepretrain.sparsity.layers import SparseLayer

PREVIOUS_MASK = "sparsity_previous_mask"
"""Buffer with the packed mask of the last comparison; part of the model's state dict."""


class Clock:
    """Completed optimiser steps and the index of the current micro-batch in the global batch.

    Kept twice: as integers for eager layers and as a tensor for compiled ones, which would
    otherwise be recompiled every step.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        self.micro = 0
        self.capacity = 0
        """Most tokens of a micro-batch where they differ in size; 0: all have equally many."""
        self.tensor = torch.zeros(2, dtype=torch.int64, device=device)
        self._counting = True
        self._first = True

    def set(self, *, step: int | None = None, micro: int = 0, counted: bool = True) -> None:
        """Set the completed steps and the micro-batch; ``counted``: forwards go on counting."""
        self.step = self.step if step is None else step
        self.micro = micro
        self._counting, self._first = counted, True
        self.tensor.copy_(torch.tensor([self.step, micro]))

    @torch.compiler.disable
    def count_forward(self) -> None:
        """A training forward begins: the first after a step is micro-batch 0 of this rank."""
        if not self._counting:
            return
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._first:
            self.micro = torch.distributed.get_rank() if distributed else 0
        else:
            self.micro += torch.distributed.get_world_size() if distributed else 1
        self.tensor[1] = self.micro
        self._first = False

    def restart(self) -> None:
        """The forwards counted so far belong to a step that was given up."""
        if self._counting:
            self.set()

    def now(self) -> Any:
        """(step, micro-batch) that a forward hands to its backward.

        A tensor in compiled graphs, and on a GPU, where a captured one is replayed: both must read
        what holds then.
        """
        if torch.compiler.is_compiling() or self.tensor.is_cuda:
            return self.tensor.clone()
        return self.step, self.micro


class Operands(NamedTuple):
    """A and B as the products want them: pruned first, then quantised or cast.

    ``backward`` None: the same as ``forward`` (one tensor given twice breaks compiled graphs).
    """

    forward: Tensor
    backward: Tensor | None
    wgrad_scale: Tensor | None


@dataclass(slots=True)
class _Cached:
    """What follows from one value of the weight; dropped as a whole."""

    stamp: tuple[int, int]
    projection: Projection
    would_choose: Tensor | None = None
    operands: dict[Any, Operands | None] = field(default_factory=dict)


@dataclass(eq=False)
class LayerState:
    """What is sparse about one layer, except the tensors that belong in its state dict."""

    method: Method
    name: str
    index: int
    """Position among the sparse layers: part of the noise key."""
    seed: int
    dim: int
    """Axis of the stored weight that holds in_features."""
    state: tuple[str, ...]
    """Names of the method's persistent tensors; buffers ``sparsity_<name>`` of the layer."""
    clock: Clock
    recipe: FP8Recipe | None = None
    """Of simulated fp8."""
    active: bool = True
    """Inside the window."""
    flips: Tensor | None = None
    """0-d int64: flips at the last comparison."""
    _cached: _Cached | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what can be computed again."""
        return self.__dict__ | {"_cached": None}

    def invalidate(self) -> None:
        """Forget the projection: the weight has changed."""
        self._cached = None

    def project(self, layer: SparseLayer) -> Projection:
        """The projection of the current weight, computed once per optimiser step."""
        if torch.compiler.is_compiling():
            return self._compute(layer)
        return self._current(layer).projection

    def _current(self, layer: SparseLayer) -> _Cached:
        # the hooks invalidate; the stamp also catches edits of the weight between steps
        weight = layer.weight
        stamp = (weight._version, weight.data_ptr())
        if self._cached is None or stamp != self._cached.stamp:
            with torch.inference_mode(False):  # cached: a training forward may use it next
                self._cached = _Cached(stamp, self._compute(layer))
        return self._cached

    @torch.no_grad()
    def _compute(self, layer: SparseLayer) -> Projection:
        if not self.active:
            return Projection(None, None)
        return self.method.project(_wide(layer), self.dim, self.tensors(layer), self._step_key)

    def tensors(self, layer: SparseLayer) -> dict[str, Tensor]:
        """The method's persistent tensors."""
        return {name: layer.get_buffer(f"sparsity_{name}") for name in self.state}

    def mask_in_use(self) -> Tensor | None:
        """The mask of the last projection even if the weight has changed since; None: none."""
        return None if self._cached is None else self._cached.projection.mask

    @torch.no_grad()
    def mask(self, layer: SparseLayer) -> Tensor:
        """The mask in use, or the one that the method's rule would choose for a dense product."""
        cached = self._current(layer)
        if cached.projection.mask is not None:
            return cached.projection.mask
        if cached.would_choose is None:
            cached.would_choose = self.method.mask(_wide(layer), self.dim)
        return cached.would_choose

    @torch.no_grad()
    def update(self, layer: SparseLayer) -> None:
        """Let the method bring its persistent tensors up to date with the current weight."""
        weight = layer.weight.detach()
        self.method.update_(weight, self.dim, self.tensors(layer), self._step_key)

    def in_dense_phase(self, layer: SparseLayer) -> bool:
        """Whether the products see W and G as they are."""
        return not self.active or (layer.training and self.method.trains_dense)

    def recipe_in_use(self, layer: SparseLayer) -> FP8Recipe | None:
        """The recipe of simulated fp8; evaluation runs without."""
        return self.recipe if layer.training else None

    def operands(self, layer: SparseLayer, dtype: torch.dtype) -> Operands | None:
        """A and B in ``dtype`` or in fp8, as (out_features, in_features) or a convolution's weight.

        None: the layer does what the class it replaces does.
        """
        if torch.compiler.is_compiling():
            return self._prepare(layer, dtype)
        recipe = self.recipe_in_use(layer)
        key = (self.in_dense_phase(layer), dtype if recipe is None else recipe)
        cached = self._current(layer)
        if key in cached.operands:
            return cached.operands[key]
        with torch.inference_mode(False), torch.no_grad():
            operands = self._prepare(layer, dtype)
        # a weight that is only cast is not kept: the cast of an edited one is always right
        if operands is None or recipe is not None or cached.projection.forward is not None:
            cached.operands[key] = operands
        return operands

    def _prepare(self, layer: SparseLayer, dtype: torch.dtype) -> Operands | None:
        dense, recipe = self.in_dense_phase(layer), self.recipe_in_use(layer)
        forward, _, backward, scale = Projection(None, None) if dense else self.project(layer)
        estimates = not dense and (self.method.prunes_dgrad or self.method.samples_wgrad)
        if recipe is None and forward is None and backward is None and not estimates:
            return None
        forward = layer.weight.detach() if forward is None else forward
        if recipe is not None:
            if backward is None and recipe.backward != recipe.forward:
                backward = forward
            forward, dtype = round_fp8(forward, recipe.forward), torch.float32
            backward = None if backward is None else round_fp8(backward, recipe.backward)
        forward = self._as_rows(forward).to(dtype)
        backward = None if backward is None else self._as_rows(backward).to(dtype)
        return Operands(forward, backward, scale)

    def _as_rows(self, weight: Tensor) -> Tensor:
        return weight if self.dim == 1 else weight.t()

    def first_counter(self, micro: Any, counters: int, per: int = 1) -> Any:
        """Counter of the first of ``counters`` draws of a micro-batch, one for ``per`` tokens.

        Counters run over the global batch. Where micro-batches differ in size each has room for
        the largest, so that no two of them share draws.
        """
        return micro * max(counters, -(-self.clock.capacity // per))

    def key(self, product: int, step: Any, offset: Any = 0) -> NoiseKey:
        """Noise stream of one product of this layer."""
        return noise_key(self.seed, step, self.index, product, offset)

    def _step_key(self, product: int) -> NoiseKey:
        step = self.clock.tensor[0] if torch.compiler.is_compiling() else self.clock.step
        return self.key(product, step)

    def take_baseline(self, layer: SparseLayer) -> None:
        """Remember the current mask as the one that the next comparison starts from."""
        layer.get_buffer(PREVIOUS_MASK).copy_(pack_24(self.mask(layer)))
        self.flips = None

    def compare(self, layer: SparseLayer) -> None:
        """Count the flips since the last comparison and remember the new mask."""
        code = layer.get_buffer(PREVIOUS_MASK)
        new = pack_24(self.mask(layer))
        self.flips = packed_flip_count(code, new)
        code.copy_(new)


def _wide(layer: SparseLayer) -> Tensor:
    """The master weight in fp32 or wider: masks and scales never come from a cast copy."""
    return widen(layer.weight.detach())
