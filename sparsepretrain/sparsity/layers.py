"""Sparse layers and the one autograd function that executes an operand policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.kernels import NoiseKey, noise_key, pack_24, packed_flip_count
from sparsepretrain.sparsity.policy import DGRAD, WGRAD, Method, Projection

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
        """The reading that a forward hands to its backward."""
        return self.tensor.clone() if torch.compiler.is_compiling() else (self.step, self.micro)


class Operands(NamedTuple):
    """A projection cast to the compute dtype; ``forward`` None: an ordinary dense product.

    ``backward`` None: the same as ``forward`` (one tensor given twice breaks compiled graphs).
    """

    forward: Tensor | None
    backward: Tensor | None
    wgrad_scale: Tensor | None


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
    active: bool = True
    """Inside the window."""
    flips: Tensor | None = None
    """0-d int64: flips at the last comparison."""
    _projection: Projection | None = None
    _would_choose: Tensor | None = None
    _operands: dict[torch.dtype, Operands] = field(default_factory=dict)
    _stamp: tuple[int, int] | None = None

    def invalidate(self) -> None:
        """Forget the projection: the weight has changed."""
        self._projection = None
        self._would_choose = None
        self._operands = {}

    def project(self, layer: SparseLayer) -> Projection:
        """The projection of the current weight, computed once per optimiser step."""
        weight = layer.weight.detach()
        if torch.compiler.is_compiling():
            return self._compute(layer, weight)
        # the hooks invalidate; the stamp also catches edits of the weight between steps
        stamp = (weight._version, weight.data_ptr())
        if self._projection is None or stamp != self._stamp:
            self.invalidate()
            with torch.inference_mode(False):  # cached: a training forward may use it next
                self._projection = self._compute(layer, weight)
            self._stamp = stamp
        return self._projection

    @torch.no_grad()
    def _compute(self, layer: SparseLayer, weight: Tensor) -> Projection:
        wide = weight if weight.dtype == torch.float64 else weight.float()
        if not self.active:
            return Projection(None, None)
        return self.method.project(wide, self.dim, self.tensors(layer), self._step_key)

    def tensors(self, layer: SparseLayer) -> dict[str, Tensor]:
        """The method's persistent tensors."""
        return {name: layer.get_buffer(f"sparsity_{name}") for name in self.state}

    def mask_in_use(self) -> Tensor | None:
        """The mask of the last projection even if the weight has changed since; None: none."""
        return None if self._projection is None else self._projection.mask

    @torch.no_grad()
    def mask(self, layer: SparseLayer) -> Tensor:
        """The mask in use, or the one that the method's rule would choose for a dense product."""
        mask = self.project(layer).mask
        if mask is not None:
            return mask
        if self._would_choose is None:
            weight = layer.weight.detach()
            wide = weight if weight.dtype == torch.float64 else weight.float()
            self._would_choose = self.method.mask(wide, self.dim)
        return self._would_choose

    @torch.no_grad()
    def update(self, layer: SparseLayer) -> None:
        """Let the method bring its persistent tensors up to date with the current weight."""
        weight = layer.weight.detach()
        self.method.update_(weight, self.dim, self.tensors(layer), self._step_key)

    def operands(self, layer: SparseLayer, dtype: torch.dtype) -> Operands:
        """The projection in ``dtype`` (pruned first, cast last), as (out_features, in_features)."""
        if torch.compiler.is_compiling():
            return self._cast(layer, dtype)
        projection = self.project(layer)
        if projection.forward is None:
            return self._cast(layer, dtype)
        if dtype not in self._operands:
            with torch.inference_mode(False), torch.no_grad():
                self._operands[dtype] = self._cast(layer, dtype)
        return self._operands[dtype]

    def _cast(self, layer: SparseLayer, dtype: torch.dtype) -> Operands:
        forward, _, backward, scale = self.project(layer)
        active = self.active and (self.method.prunes_dgrad or self.method.samples_wgrad)
        if forward is None and backward is None and not active:
            return Operands(None, None, None)
        dense = layer.weight.detach() if forward is None else forward
        rows = self._as_rows(dense).to(dtype)
        return Operands(
            rows, None if backward is None else self._as_rows(backward).to(dtype), scale
        )

    def _as_rows(self, weight: Tensor) -> Tensor:
        return weight if self.dim == 1 else weight.t()

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


class SparseLayer(nn.Module):
    """Mixin before a layer class: the same parameters, products as the method says."""

    replaces: ClassVar[type[nn.Module]]
    in_dim: ClassVar[int] = 1
    sparsity: LayerState
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """Y = X·A(W)ᵀ + b for X of shape (…, in_features)."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        state = self.sparsity
        if self.training and state.method.trains_dense:
            return self.replaces.forward(self, x)
        operands = state.operands(self, dtype)
        if operands.forward is None:
            return self.replaces.forward(self, x)
        x = x.to(dtype) if autocast else x
        return _SparseProducts.apply(x, self.weight, self.bias, *operands, state.clock.now(), state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLayer:
        # .to(bfloat16) and the like convert the weight; scales stay fp32
        before = {k: self.get_buffer(k) for k in self._buffers if k.startswith("sparsity_")}
        super()._apply(fn, recurse)
        for key, old in before.items():
            new = self.get_buffer(key)
            if new.dtype != old.dtype:
                self._buffers[key] = old.to(new.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # most sparse classes are made on the fly: what is pickled is the class they replace
        return _blank, (self.replaces,), self.__dict__

    def extra_repr(self) -> str:
        """The original representation and the method."""
        options = self.sparsity.method.options
        return f"{super().extra_repr()}, {options.name} {options.n}:{options.m}".removeprefix(", ")


class SparseLinear(SparseLayer, nn.Linear):
    """nn.Linear whose products see what a method decides; weight (out_features, in_features)."""

    replaces = nn.Linear


_made: dict[type[nn.Module], type[SparseLayer]] = {}


def sparse_class(cls: type[nn.Module]) -> type[SparseLayer] | None:
    """The sparse version of a layer class, or None when there is none.

    nn.Linear, transformers' Conv1D, and subclasses of them that keep the forward.
    """
    if issubclass(cls, SparseLayer):
        return None
    if cls is nn.Linear:
        return SparseLinear
    base: type[nn.Module] = nn.Linear
    if not issubclass(cls, nn.Linear):
        base = next((c for c in cls.__mro__ if _is_conv1d(c)), nn.Module)
        if base is nn.Module:
            return None
    if cls.forward is not base.forward or cls.__name__ == "NonDynamicallyQuantizableLinear":
        return None  # its forward, or the attention that owns it, would bypass ours
    if cls not in _made:
        axis = 0 if base.__name__ == "Conv1D" else 1
        space = {"replaces": cls, "in_dim": axis, "__module__": __name__, "__doc__": cls.__doc__}
        _made[cls] = type(f"Sparse{cls.__name__}", (SparseLayer, cls), space)
    return _made[cls]


def _blank(replaced: type[nn.Module]) -> SparseLayer:
    """An empty layer to unpickle into."""
    cls = sparse_class(replaced)
    assert cls is not None
    return cls.__new__(cls)


def _is_conv1d(cls: type) -> bool:
    # by name: importing transformers to compare classes would cost seconds
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")


class _SparseProducts(torch.autograd.Function):
    """The three products of a linear layer with the operands of a policy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        forward_weight: Tensor,
        backward_weight: Tensor | None,
        wgrad_scale: Tensor | None,
        clock: Any,
        state: LayerState,
    ) -> Tensor:
        ctx.state = state
        # As an attribute, the reading survives the recomputation of activation checkpointing
        ctx.clock = None if isinstance(clock, Tensor) else clock
        saved_clock = clock if isinstance(clock, Tensor) else None
        if backward_weight is None:
            backward_weight = forward_weight
        ctx.save_for_backward(x, backward_weight, wgrad_scale, saved_clock)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, forward_weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, backward_weight, wgrad_scale, clock = ctx.saved_tensors
        clock = ctx.clock if clock is None else clock
        state: LayerState = ctx.state
        method = state.method
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            pruned = grad
            if method.prunes_dgrad and state.active:
                count = grad.numel() // max(grad.shape[-1], 1)  # one counter per token
                key = state.key(DGRAD, clock[0], clock[1] * count)
                pruned = method.dgrad_gradient(grad, key)
            dx = pruned.matmul(backward_weight)
        if ctx.needs_input_grad[1]:
            rows = grad.reshape(-1, grad.shape[-1])
            if method.samples_wgrad and state.active:
                rows = _sample(state, clock, grad)
            tokens = x.reshape(-1, x.shape[-1])
            rows = rows.to(tokens.dtype)
            dw = rows.t() @ tokens if state.dim == 1 else tokens.t() @ rows
            dw = dw.to(ctx.weight_dtype)
            dw = dw if wgrad_scale is None else dw * wgrad_scale
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            db = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=wide).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None, None


def _micro_key(state: LayerState, clock: Any, grad: Tensor) -> NoiseKey:
    """Stream of this micro-batch: token groups are counted over the global batch."""
    groups = -(-grad.numel() // grad.shape[-1] // 4) if grad.numel() else 0
    return state.key(WGRAD, clock[0], clock[1] * groups)


def _sample(state: LayerState, clock: Any, grad: Tensor) -> Tensor:
    """U(G) as (tokens, out_features). Groups of four tokens never straddle a micro-batch."""
    length = grad.shape[-2] if grad.dim() > 2 else 0
    if length % 4 == 0:
        rows = grad.reshape(-1, grad.shape[-1])
        return state.method.wgrad_gradient(rows, _micro_key(state, clock, rows))
    # each sample is filled with zero tokens, so that cutting the batch elsewhere changes nothing
    padded = F.pad(grad, (0, 0, 0, -length % 4))
    rows = padded.reshape(-1, grad.shape[-1])
    sampled = state.method.wgrad_gradient(rows, _micro_key(state, clock, rows))
    return sampled.view(padded.shape)[..., :length, :].reshape(-1, grad.shape[-1])


def invalidate_after_load(layer: nn.Module, _: Any) -> None:
    """Post-hook of ``load_state_dict``; a function, so that layers can be copied and pickled."""
    assert isinstance(layer, SparseLayer)
    layer.sparsity.invalidate()
