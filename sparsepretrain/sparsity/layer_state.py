"""State of a sparse layer: a child module of the layer.

As buffers and Parameters of a module, the state is part of the model's state dict, so code that
saves, copies or averages models needs to know nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import ClockKey, NoiseKey, noise_key, pack_rows, unpacked
from sparsepretrain.kernels.common import widen
from sparsepretrain.kernels.keys import AnyKey
from sparsepretrain.sparsity.backend import LayerProducts, LayerSize
from sparsepretrain.sparsity.clock import Moment
from sparsepretrain.sparsity.method import Layer, Projection
from sparsepretrain.sparsity.model_state import ModelState
from sparsepretrain.sparsity.operands import OperandCache
from sparsepretrain.sparsity.rows import ALL_ROWS, Rows

PREVIOUS_MASK = "previous_mask"
"""Buffer: packed mask of the last comparison, (rows, bytes)."""


class LayerState(nn.Module):
    """State of one sparse layer: tensors of the method, the last mask, keys of random draws."""

    previous_mask: Tensor
    rows: Rows = ALL_ROWS
    cache: OperandCache
    products: LayerProducts
    reset_due: bool = False
    """True if initial weights were loaded before ``attach`` of a sharded model."""
    initialized: bool = True
    """False if the method's tensors left the meta device and have no values."""

    if TYPE_CHECKING:  # the method's tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, model: ModelState, name: str, index: int, weight: Tensor, dim: int) -> None:
        super().__init__()
        self.model, self.method = model, model.method  # shared by all sparse layers
        self.layer_name = name
        self._index = index  # position among the sparse layers, part of the noise key
        self.dim, self.shape = dim, tuple(weight.shape)
        # overrides may leave the parameter out, see Method.wgrad_gradient
        self.takes_order = "order" in signature(type(self.method).wgrad_gradient).parameters
        """True if U(G) can be drawn in the memory order that wgrad reads."""
        self.cache = OperandCache(self)
        self.choose_products(weight.device)
        self.register_buffer(PREVIOUS_MASK, pack_rows(torch.zeros_like(weight, dtype=torch.bool)))
        for key, value in self.method.initial_state(widen(weight), self).items():
            if hasattr(self, key) or "." in key:
                raise ConfigError(f"initial_state: {key!r} cannot be the name of a tensor")
            trained = isinstance(value, nn.Parameter)
            register: Any = self.register_parameter if trained else self.register_buffer
            register(key, value)
        if self.method.schedule.start == 0:
            self.method.update_(weight, self)
        # The fused path of nn.TransformerEncoderLayer reads stored weights and would bypass the
        # projection. It is disabled if any child module has a hook.
        self.register_forward_pre_hook(_never_called)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerState:
        # .to(bfloat16) converts the weight, but scales and masks keep their dtype
        before, was_meta = dict(self._buffers), self.previous_mask.is_meta
        super()._apply(fn, recurse)
        for key, old in before.items():
            new = self._buffers[key]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[key] = old.to(new.device)
        self.rows.follow(self)
        if was_meta and not self.previous_mask.is_meta:  # to_empty
            self.previous_mask.zero_()
            self.initialized = not self.own_tensors
            self.model.left_meta = True
        self.cache.clear()
        self.choose_products(self.previous_mask.device)
        return self

    @property
    def out(self) -> Tensor | None:
        """Memory into which the method may write A(W) while it projects."""
        return self.cache.out

    @property
    def own_tensors(self) -> list[str]:
        """Names of the method's tensors in the state dict."""
        return [key for key in (*self._buffers, *self._parameters) if key != PREVIOUS_MASK]

    @torch.no_grad()
    def reset(self, weight: Tensor) -> None:
        """Compute the method's tensors from initial weights; collective if sharded."""
        master = widen(self.rows.gather(self.rows.local(weight).detach()))
        tensors = {PREVIOUS_MASK: pack_rows(torch.zeros_like(master, dtype=torch.bool))}
        for key, value in (tensors | self.method.initial_state(master, self)).items():
            if getattr(self, key).is_meta:  # a dense state dict was assigned to a model on meta
                kind: Any = self._parameters if key in self._parameters else self._buffers
                kind[key] = value
            else:
                self.rows.write(self, key, value)
        self.initialized = self.model.baseline_due = True
        if self.method.schedule.start == 0:
            self.update(weight)
        self.cache.clear()
        self.choose_products(self.previous_mask.device)

    @property
    def index(self) -> int | Tensor:
        """Position among the sparse layers: an integer, or a 0-d int64 tensor in compiled graphs.

        An integer would be a constant of the graph, and every block would be compiled separately.
        """
        return self._index_tensor if torch.compiler.is_compiling() else self._index

    @property
    def step(self) -> int | Tensor:
        """Completed optimizer steps: an integer, or a 0-d int64 tensor in compiled graphs."""
        return self.model.clock.tensor[0] if torch.compiler.is_compiling() else self.model.step

    def key(self, matmul: int) -> NoiseKey:
        """Return the noise stream of a matmul at this step."""
        return noise_key(self.model.seed, self.step, self.index, matmul)

    def key_at(self, clock: Moment, matmul: int, counters: int, per: int = 1) -> AnyKey:
        """Return the noise stream of a matmul for one micro-batch.

        Micro-batches share no draws if all have equally many tokens, or ``capacity`` bounds them.

        Args:
            clock: (completed steps, micro-batch).
            matmul: number of the matmul.
            counters: draws of this micro-batch.
            per: tokens that share a counter.
        """
        seed, room = self.model.seed, max(counters, -(-self.model.micro_batches.capacity // per))
        if isinstance(clock, Tensor):
            return ClockKey(clock, seed, self.index, matmul, room)
        return noise_key(seed, clock[0], self.index, matmul, clock[1] * room)

    def _group(self, *, updating: bool) -> int | None:
        """Rows of the stored weight that the method must see together; None: all of them."""
        outputs, inputs = self.method.multiples
        whole = self.method.needs_whole
        if whole == "start":  # no compiled forward may read the step
            schedule = self.method.schedule
            whole = updating and schedule.step == schedule.start
        return None if whole else (outputs if self.dim else inputs)

    def project(self, weight: Tensor, training: bool = False, *, graph: bool = False) -> Projection:
        """Return the projection for evaluation or training; W and no mask in a dense phase.

        ``graph``: record it for autograd.
        """
        if not torch.compiler.is_compiling():
            self.model.sync()
        phase = self.method.phase
        if not (phase.training if training else phase.evaluation):
            return Projection(None, None)
        if not self.initialized:
            raise ConfigError(
                f"layer {self.layer_name!r} came from the meta device and its "
                f"{', '.join(self.own_tensors)} has no values: call sparsifier.reset() once the "
                "weights are initialized, or load a checkpoint of the sparse model"
            )
        # masks and scales come from the master in fp32 or wider, never from a cast copy
        with torch.set_grad_enabled(graph):
            master = self.rows.local(weight) if graph else self.rows.local(weight).detach()
            group = self._group(updating=False)
            return self.rows.apply(self.method.project, widen(master), self, group)

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Call ``update_`` of the method with the current weight."""
        master = self.rows.local(weight).detach()
        group = self._group(updating=True)
        self.rows.apply(self.method.update_, master, self, group)

    def choose_products(self, device: torch.device) -> None:
        """Choose products for ``device``; ``auto`` waits for the first inputs."""
        with torch.inference_mode(False):  # compiled training reads it later
            self._index_tensor = torch.tensor(self._index, device=device)
        model, size = self.model, LayerSize(self.shape, self.dim, device)
        settings = self.method, model.precision, model.backend, size
        self.products = LayerProducts(*settings, sharded=self.rows.is_sharded)

    def try_products(
        self, weight: Tensor, inputs: Sequence[int], dtype: torch.dtype, *, bias: bool
    ) -> None:
        """Try the products with the first inputs, of shape (…, tokens of a sample, in_features)."""
        if self.products.try_inputs(weight, inputs, dtype, bias=bias):
            self.cache.refresh(weight)

    def present_bool_mask(self, weight: Tensor) -> Tensor:
        """Return :meth:`present_mask`, unpacked."""
        return unpacked(self.present_mask(weight), self.rows.local(weight).shape)

    @torch.no_grad()
    def present_mask(self, weight: Tensor) -> Tensor:
        """Return the mask of the projection, or the one the method would choose; may be packed."""
        mask = self.project(weight).mask if self.cache.mask is None else self.cache.mask
        if mask is not None:
            return mask

        def choose(master: Tensor, layer: Layer) -> Tensor:
            return self.method.mask(master, self.dim).bool()

        group = self._group(updating=False)
        return self.rows.apply(choose, widen(self.rows.local(weight).detach()), self, group)


def _never_called(module: nn.Module, args: tuple[object, ...]) -> None:
    """Layer states have no forward."""
