"""What is sparse about a layer: a module below it.

All of it is in the model's state dict, so that whatever saves, copies or averages the model takes
it along: a copy follows its source when its buffers are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import (
    ClockKey,
    NoiseKey,
    noise_key,
    pack_rows,
    packed_shape,
    unpack_rows,
    unpacked,
)
from sparsepretrain.kernels.common import AnyKey, widen
from sparsepretrain.sparsity.execution import EMULATE, Execution, Operands
from sparsepretrain.sparsity.execution.semi_structured import packings
from sparsepretrain.sparsity.method import Projection, W
from sparsepretrain.sparsity.model_state import ModelState

CHANGING = frozenset(["_stored", "kept_mask", "out"])
"""Attributes of a layer's state that every step sets: no parameters, buffers or modules."""
PREVIOUS_MASK = "previous_mask"  # buffer: packed mask of the last comparison, (rows, bytes)


class LayerState(nn.Module):
    """What is sparse about one layer: the method's tensors, the last mask, its draws."""

    previous_mask: Tensor
    _stored: dict[bool, Operands | None]  # operands of training (True) and of evaluation (False)
    kept_mask: Tensor | None  # of the stored operands of training; bool or packed by rows
    out: Tensor | None = None  # where the method may write A(W) while it projects
    shard: Any = None  # RowsOf the weight, from `attach` on, where FSDP shards it
    sharded: tuple[str, ...] = ()  # names of the tensors that are sharded with the weight
    gathered: Any = None  # sharding.Gathered, in place of `_stored`, from `attach` on
    base: Execution  # multiplies what is not packed
    simulated: str  # why that is in simulated fp8 where real fp8 was asked for
    fits: dict[str, str]  # what `Backend.fit` says, then `Backend.settle`
    choices: Mapping[str, Execution]  # executions by what they pack
    packs: str = ""  # places of the row whose operands may be packed
    settled: bool = False  # whether products were tried with inputs, where they have to be
    reset_due: bool = False  # initial weights were loaded before `attach` of a sharded model
    initialized: bool = True  # False: the method's tensors left the meta device and hold anything

    if TYPE_CHECKING:  # the method's tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, model: ModelState, name: str, index: int, weight: Tensor, dim: int) -> None:
        super().__init__()
        self.model, self.method = model, model.method  # what all sparse layers share
        self.layer_name = name
        self._index = index  # position among the sparse layers: part of the noise key
        self.dim, self.shape = dim, tuple(weight.shape)
        self.forget()
        self.fit(weight.device)
        self.register_buffer(PREVIOUS_MASK, pack_rows(torch.zeros_like(weight, dtype=torch.bool)))
        for key, value in self.method.initial_state(widen(weight), self).items():
            if hasattr(self, key) or "." in key:
                raise ConfigError(f"initial_state: {key!r} cannot be the name of a tensor")
            trained = isinstance(value, nn.Parameter)
            register: Any = self.register_parameter if trained else self.register_buffer
            register(key, value)
        if self.method.window[0] == 0:
            self.method.update_(weight, self)
        # PyTorch's fused encoder layers read the stored weights, unless a module below has a hook
        self.register_forward_pre_hook(_never_called)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CHANGING:  # nn.Module would look for parameters, for microseconds each
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what can be computed again."""
        return self.__dict__ | {"_stored": {}, "kept_mask": None}

    def _apply(self, fn: Any, recurse: bool = True) -> LayerState:
        # .to(bfloat16) and the like convert the weight; scales stay fp32
        before, was_meta = dict(self._buffers), self.previous_mask.is_meta
        super()._apply(fn, recurse)
        for key, old in before.items():
            new = self._buffers[key]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[key] = old.to(new.device)
        self._follow()
        if was_meta and not self.previous_mask.is_meta:  # to_empty
            self.previous_mask.zero_()
            self.initialized = not self.own_tensors
            self.model.emptied = True
        self.forget()
        self.fit(self.previous_mask.device)
        return self

    @property
    def own_tensors(self) -> list[str]:
        """Names of the method's tensors in the state dict."""
        return [key for key in (*self._buffers, *self._parameters) if key != PREVIOUS_MASK]

    @torch.no_grad()
    def reset(self, weight: Tensor) -> None:
        """Compute the method's tensors from initial weights; collective where they are sharded."""
        master = widen(self.all_rows(self.stored(weight).detach()))
        tensors = {PREVIOUS_MASK: pack_rows(torch.zeros_like(master, dtype=torch.bool))}
        for key, value in (tensors | self.method.initial_state(master, self)).items():
            own = getattr(self, key)
            if own.is_meta:  # a dense state dict was assigned to a model on meta
                kind: Any = self._parameters if key in self._parameters else self._buffers
                kind[key] = value
            elif key in self.sharded:
                own.copy_(self.shard.mine(value))
            elif self.shard is not None and key in self._parameters:  # FSDP shards it by itself
                own._local_tensor.copy_(type(self.shard)(key, own).mine(value))
            else:
                own.copy_(value)
        self.initialized = self.model.baseline_due = True
        if self.method.window[0] == 0:
            self.update(weight)
        self.forget()
        self.fit(self.previous_mask.device)

    @property
    def index(self) -> Any:
        """Position among the sparse layers: an integer, or a 0-d int64 tensor in compiled graphs.

        An integer would be a constant of the graph: every block would be compiled for itself.
        """
        return self._index_tensor if torch.compiler.is_compiling() else self._index

    @property
    def step(self) -> Any:
        """Completed optimiser steps: an integer, or a 0-d int64 tensor in compiled graphs."""
        return self.model.clock[0] if torch.compiler.is_compiling() else self.model.step

    def key(self, product: int) -> NoiseKey:
        """Noise stream of a product at this step."""
        return noise_key(self.model.seed, self.step, self.index, product)

    def key_at(self, clock: Any, product: int, counters: int, per: int = 1) -> AnyKey:
        """Noise stream of the draws of a micro-batch: ``counters`` of them, one for ``per`` tokens.

        Each has room for the largest of the global batch, so that no two of them share draws.
        """
        seed, room = self.model.seed, max(counters, -(-self.model.capacity // per))
        if isinstance(clock, Tensor):
            return ClockKey(clock, seed, self.index, product, room)
        return noise_key(seed, clock[0], self.index, product, clock[1] * room)

    def stored(self, weight: Tensor) -> Tensor:
        """The master weight that this process has: the weight itself, or the rows of its shard.

        Raises:
            ConfigError: prepared for sharding, and not yet attached.
        """
        if not self.model.sharded:
            return weight
        if self.shard is None:
            raise ConfigError(
                "the model was prepared for sharding: call fully_shard(model) and "
                "sparsifier.attach(optimizer) before it is run or measured"
            )
        local: Tensor = self.shard.local
        return local

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Of :meth:`stored`."""
        if self.shard is None:
            return weight.grad
        gradient: Any = self.shard.parameter.grad
        return None if gradient is None else gradient._local_tensor

    def cut(self, shard: Any) -> None:
        """Keep the rows of a shard of what has the rows of the weight; from now on FSDP shards."""
        self.shard = shard
        shape = tuple(shard.parameter.shape)
        packed = torch.uint8, packed_shape(shape)
        alike = (
            key
            for key, value in self.named_buffers()
            if value.shape == shape or (value.dtype, value.shape) == packed
        )
        self.sharded = tuple({PREVIOUS_MASK: 0} | dict.fromkeys(alike, 0))
        for key in self.sharded:
            self._buffers[key] = shard.wrap(shard.mine(self.get_buffer(key)))
        self._follow()
        self.forget()

    def _follow(self) -> None:
        """Sharded tensors are DTensors in state dicts, and plain tensors of the same memory here.

        What is in ``__dict__`` is found before a buffer is.
        """
        for key in self.sharded:
            buffer: Any = self.get_buffer(key)
            self.__dict__[key] = buffer._local_tensor

    @property
    def _by_rows(self) -> bool:
        """Whether the method's rule can be applied to the rows of this process alone."""
        if self.shard is None:
            return True
        outputs, inputs = self.method.multiples
        alone = self.shard.whole_groups(outputs if self.dim else inputs)
        return bool(alone) and not self.method.needs_whole

    def _whole_layer(self) -> Any:
        from sparsepretrain.sparsity.sharding import WholeLayer

        return WholeLayer(self)

    @torch.no_grad()
    def project(self, weight: Tensor, training: bool = False) -> Projection:
        """What evaluation, or training, makes of the weight; W and no mask in a dense phase."""
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
        master = widen(self.stored(weight).detach())
        if self._by_rows:
            return self.method.project(master, self)
        parts = self.method.project(self.shard.gather(master), self._whole_layer())
        return Projection(*(self.shard.mine(p) if p is not None and p.dim() else p for p in parts))

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Let the method bring its tensors up to date with the weight."""
        master = self.stored(weight).detach()
        if self._by_rows:
            self.method.update_(master, self)
            return
        gathered, layer = self.shard.gather(master), self._whole_layer()
        self.method.update_(gathered, layer)
        layer.keep()

    def fit(self, device: torch.device) -> None:
        """What multiplies on ``device``; operands whose product must be faster wait for inputs."""
        with torch.inference_mode(False):
            self._index_tensor = torch.tensor(self._index, device=device)
        backend, self.settled, self.fits = self.model.backend, False, {}
        self.base, self.simulated = self.model.execution.of_layer(self.shape, self.dim, device)
        if backend is None:
            return
        why = "its weight is sharded" if self.model.sharded else ""
        self.choices = packings(self.base)
        given = self.shape, self.dim, device, self.base, why
        self.fits = backend.fit(self.method.sparse_row, *given)
        self.packs = "" if backend.name == "auto" else self._fitting

    def settle(self, weight: Tensor, inputs: Any, dtype: torch.dtype, bias: bool) -> None:
        """Once inputs of shape (…, tokens of a sample, in_features) are known, try the products."""
        backend = self.model.backend
        if self.settled or weight.is_meta:
            return
        self.model.execution.require_here(weight.device)
        if backend is not None:
            backend.require_here(weight.device, dtype, self.model.execution)
        self.settled = True
        if backend is None:
            return
        sizes = self.shape[1 - self.dim], self.shape[self.dim], self.dim
        rest = tuple(inputs[:-1]), dtype, weight.device, bias, self.base
        before, self.fits = self.packs, backend.settle(self.fits, sizes, *rest)
        self.packs = self._fitting
        if self.packs != before:
            self.restore(weight)

    @property
    def _fitting(self) -> str:
        return "".join(place for place, why in self.fits.items() if not why)

    def execution(self, dtype: torch.dtype, training: bool) -> Execution:
        """What multiplies in the present phase."""
        backend = self.model.backend
        if not training or not self.packs or backend is None:
            return self.base if training else EMULATE
        return backend.execution(self.choices, self.method.row, self.packs, dtype)

    def operands(self, weight: Tensor, dtype: torch.dtype, training: bool) -> Operands | None:
        """A and B in ``dtype``; None: the layer does what the class it replaces does."""
        if self.model.sharded:
            self.stored(weight)  # refuses what is not attached
            operands: Operands | None = self.gathered.operands(weight, training)
            return operands
        training = self.variant(training)
        if self._plain(dtype, training):
            return None
        if training in self._stored and self.model.store == dtype:
            return self._stored[training]
        return self._make(weight, dtype, training)

    def _plain(self, dtype: torch.dtype, training: bool) -> bool:
        """Whether products see W itself: then nothing is projected, rounded or stored."""
        phase = self.method.phase
        sparse = phase.training if training else phase.evaluation
        return not sparse and not self.execution(dtype, training).rounds

    def variant(self, training: bool) -> bool:
        """True also where the operands of evaluation are those of training."""
        phase = self.method.phase
        same = phase.training == phase.evaluation and not self.packs
        same = same and self.model.execution is EMULATE
        return training or same

    @torch.no_grad()
    def _make(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        training: bool,
        out: Operands | None = None,
    ) -> Operands | None:
        """Project; operands of the stored dtype are kept, in the memory of earlier ones."""
        execution = self.execution(dtype, training)
        with torch.inference_mode(False):  # a training forward may use it next
            self.out = self._room(weight, dtype, out) if training else None
            try:
                forward, mask, backward, scale = self.project(weight, training)
            finally:
                self.out = None
            only_cast, operands = forward is None and not execution.rounds, None
            if not only_cast or (training and any(self.method.changes)):
                forward = weight.detach() if forward is None else forward
                exact = Operands(self.turned(forward), self.turned(backward), scale)
                operands = execution.prepare(exact, dtype, out)
        if self.model.store == dtype and not torch.compiler.is_compiling():
            if training:
                bits = mask is not None and mask.dtype == torch.bool and self.method.packed_masks
                self.kept_mask = pack_rows(mask) if mask is not None and bits else mask
            # a weight that is only cast is not kept: the cast of an edited one is always right
            if operands is None or not only_cast:
                self._stored[training] = operands
        return operands

    def _room(self, weight: Tensor, dtype: torch.dtype, old: Operands | None) -> Tensor | None:
        """Memory for A(W) in the stored dtype: that of earlier operands, or new one."""
        if self.method.row.A == W or self.execution(dtype, True).rounds:
            return None  # nothing is projected, or what is written is rounded again
        if self.model.store != dtype or torch.compiler.is_compiling() or self.model.sharded:
            return None
        earlier = None if old is None else self.turned(old.forward)
        if earlier is None or (earlier.shape, earlier.dtype) != (weight.shape, dtype):
            return torch.empty_like(weight, dtype=dtype)
        return earlier

    @overload
    def turned(self, weight: Tensor) -> Tensor: ...
    @overload
    def turned(self, weight: None) -> None: ...
    def turned(self, weight: Tensor | None) -> Tensor | None:
        """As operands are; Conv1D stores (in_features, out_features)."""
        return weight.t() if weight is not None and self.dim == 0 else weight

    @torch.no_grad()
    def hold(self, weight: Tensor, mask: Tensor) -> None:
        """Training forwards see what ``mask`` leaves of the weight, until :meth:`restore`.

        What is left is the weight, or what a method whose A(W) is no part of W makes of it now.
        """
        if self.model.sharded:
            raise ConfigError("held masks need whole weights, and this model is sharded")
        forward, new, *_ = self.project(weight, training=True)
        if forward is None or self.model.store is None:
            return
        new = self.method.mask(widen(weight.detach()), self.dim) if new is None else new
        wide = weight.detach().to(forward.dtype)
        left = wide if torch.equal(forward[new], wide[new]) else forward
        held = Operands(self.turned(torch.where(mask, left, 0.0)), None, None)
        stored = self._stored.get(True)
        self._stored[True] = self.base.prepare(held, self.model.store, stored)

    def restore(self, weight: Tensor) -> None:
        """Project the changed weight again where operands are stored, else drop them."""
        earlier = self._stored.get(True)
        self.forget()
        if self.gathered is not None:
            self.gathered.restore()
            return
        store = self.model.store
        if store is not None and not self.model.sharded and not self._plain(store, True):
            self._make(weight, store, True, earlier)

    def forget(self) -> None:
        """What was stored is out of date; the next forward makes it again."""
        self._stored, self.kept_mask = {}, None
        if self.gathered is not None:
            self.gathered.forget()

    @torch.no_grad()
    def mask_in_use(self, weight: Tensor) -> Tensor:
        """The mask of the projection, or the one that the method's rule would choose; bool."""
        mask = self.projected_mask(weight)
        mask = self.chosen_mask(weight) if mask is None else mask
        return unpacked(mask, self.stored(weight).shape)

    def projected_mask(self, weight: Tensor) -> Tensor | None:
        """The mask of the projection, bool or packed by rows; None: the method's rule chooses."""
        return self.project(weight).mask if self.kept_mask is None else self.kept_mask

    @torch.no_grad()
    def chosen_mask(self, weight: Tensor) -> Tensor:
        """The mask that the method's rule chooses; bool."""
        master = widen(self.stored(weight).detach())
        if self._by_rows:
            return self.method.mask(master, self.dim).bool()
        mine: Tensor = self.shard.mine(self.method.mask(self.shard.gather(master), self.dim))
        return mine.bool()

    def adjusting_mask(self, weight: Tensor) -> Tensor:
        """:meth:`mask_in_use`, packed by rows if it is there so and the method takes it."""
        kept = self.kept_mask
        return kept if kept is not None and self.method.packed_masks else self.mask_in_use(weight)

    def all_rows(self, rows: Tensor) -> Tensor:
        """Of the rows that this process has of something like the weight; collective if sharded."""
        return rows if self.shard is None else self.shard.gather(rows)

    def whole_groups(self, rows: Tensor) -> Tensor:
        """Rows like those of the weight, each of them on one process, with whole groups of M."""
        size = self.method.options.m if self.dim == 0 else 1
        if self.shard is None or self.shard.whole_groups(size):
            return rows
        gathered: Tensor = self.shard.gather(rows)
        return gathered if self.shard.rank == 0 else gathered[:0]

    def compared_mask(self, weight: Tensor) -> Tensor:
        """The mask of the last comparison, of the shape of ``weight``; bool."""
        return unpack_rows(self.previous_mask, weight.shape)


def _never_called(module: nn.Module, args: Any) -> None:
    """Layer states have no forward."""
