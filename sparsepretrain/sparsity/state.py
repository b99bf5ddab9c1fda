"""What is sparse about a model: counters at its root, and a module below every sparse layer.

All of it is in the model's state dict, so that whatever saves, copies or averages the model takes
it along: a copy follows its source when its buffers are copied.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import NoiseKey, noise_key, pack_24, packed_flip_count, unpack_24
from sparsepretrain.kernels.common import widen
from sparsepretrain.sparsity.execution import EMULATE, Execution, Operands
from sparsepretrain.sparsity.method import Method, Projection

PREVIOUS_MASK = "previous_mask"  # buffer: packed mask of the last comparison, (rows, bytes)


class ModelState:
    """Counters, phase and scalars: what is one per model.

    The numbers are kept twice: as integers, which eager layers read without waiting for a device,
    and as a buffer of the root, which state dicts hold; whoever writes to it (a loaded checkpoint,
    an average) is followed. A child module would be run where the root is an nn.Sequential. The
    micro-batch is in no buffer: ranks differ in it, and DistributedDataParallel broadcasts buffers.
    """

    def __init__(
        self, root: nn.Module, method: Method, execution: Execution, seed: int, device: torch.device
    ) -> None:
        self.root = root
        self.buffer = _free_name(root)
        self.example = ""  # name of a sparse layer, one whose weight is trained if there is any
        self.method = method
        self.execution = execution
        self.seed = seed
        self.step = 0  # completed optimiser steps
        self.micro = 0  # index of the current micro-batch in the global batch
        self.compared_at = 0  # completed steps at the last comparison of masks
        self.interval = 0  # steps between the last two comparisons in this process; 0: none yet
        self.capacity = 0  # most tokens of a micro-batch if they differ; 0: all have equally many
        self.store: torch.dtype | None = None  # of stored operands; None: every forward projects
        self.expects_attach = True  # to update sparse weights without the hooks is a mistake
        self.told = False  # whether the masked decay that low precision loses was looked at
        self._counting = True  # forwards count micro-batches; no: the loop states them
        self._fresh = True  # the next forward is the first one after a step
        self._open = True  # the next layer that runs begins a micro-batch
        self._had_gradient = False
        size = 2 + len(method.scalars) + 1  # step, compared_at, scalars, checksum
        root.register_buffer(self.buffer, torch.zeros(size, dtype=torch.int64, device=device))
        self._hooks = [
            root.register_forward_pre_hook(self.before_forward),
            root.register_load_state_dict_pre_hook(self.before_load),
        ]
        # (completed steps, micro-batch) for compiled and captured graphs
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self._seen: Any = None
        method.set_step(0)
        self.write()

    def __getstate__(self) -> dict[str, Any]:
        """Of copies, which own their weights no longer and may ride on no optimiser."""
        return self.__dict__ | {"_seen": None, "store": None, "expects_attach": True}

    @property
    def counters(self) -> Tensor:
        """The buffer."""
        return self.root.get_buffer(self.buffer)

    def sync(self) -> None:
        """Follow what somebody else wrote to the buffer.

        Raises:
            ConfigError: the numbers do not belong together, as after averaging them.
        """
        buffer = self.root._buffers.get(self.buffer)
        if buffer is None:  # the model was densified
            return
        version = 0 if buffer.is_inference() else buffer._version
        if self._seen is not None and self._seen[0] is buffer and self._seen[1] == version:
            return
        if not buffer.is_meta:
            self._read(buffer.tolist())
        self._seen = (buffer, version)

    def _read(self, values: list[int]) -> None:
        self.step, self.compared_at, *scalars, checksum = values
        if checksum != _checksum(values[:-1]):
            raise ConfigError(
                "the counters and masks of this sparse model were averaged: they must be copied, "
                "as AveragedModel(use_buffers=False) and timm's ModelEmaV3 do"
            )
        self.method.state = dict(zip(self.method.scalars, scalars, strict=True))
        self.method.set_step(self.step)
        self._set_clock()

    def write(self) -> None:
        """Bring buffer and phase up to date with the integers; waits for no device."""
        self.method.set_step(self.step)
        values = [self.step, self.compared_at, *self.method.state.values()]
        with torch.inference_mode(False):
            for place, value in enumerate([*values, _checksum(values)]):
                self.counters[place].fill_(value)
        self._seen = (self.counters, self.counters._version)
        self._set_clock()

    def _set_clock(self) -> None:
        with torch.inference_mode(False):
            if self.clock.device != self.counters.device:
                self.clock = torch.zeros_like(self.clock, device=self.counters.device)
            self.clock[0].fill_(self.step)
            self.clock[1].fill_(self.micro)

    def before_load(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Version 0.1 kept the counters in the handle, whose ``load_state_dict`` sets them."""
        state_dict.setdefault(prefix + self.buffer, self.counters)

    def set_micro(self, micro: int) -> None:
        """The micro-batch that the next forward sees."""
        self.micro = micro
        with torch.inference_mode(False):
            self.clock[1].fill_(micro)

    def state_micro_batch(self, micro: int, capacity: int) -> None:
        """The loop says which micro-batch comes next: forwards are not counted in this step."""
        self.capacity, self._counting = capacity, False
        self.set_micro(micro)

    def set_step(self, step: int) -> None:
        """So many optimiser steps are complete; forwards are counted from 0 again."""
        self.step, self.micro = step, 0
        self._counting = self._fresh = self._open = True
        self.write()

    def release(self) -> None:
        """Take the buffer and the hooks from the root if no layer is sparse any more."""
        if any(isinstance(m, LayerState) and m.model is self for m in self.root.modules()):
            return
        del self.root._buffers[self.buffer]
        for hook in self._hooks:
            hook.remove()

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the root: its training forwards are micro-batches."""
        if self._counting and module.training:
            self._open = False
            if torch.is_grad_enabled():
                self._count(None)

    def layer_runs(self, weight: Tensor) -> None:
        """The first layer after a backward counts: some loops call parts of the root."""
        if self._open and self._counting and torch._C._current_graph_task_id() == -1:
            self._count(weight)

    def backward_runs(self) -> None:
        """A backward goes through a sparse layer: what runs after it is another micro-batch."""
        self._open = True

    @torch.compiler.disable
    def _count(self, weight: Any) -> None:
        transformed = torch._C._functorch.maybe_current_level() is not None
        if torch._C._current_graph_task_id() != -1 or transformed:  # recomputed, or by torch.func
            return
        # A step that a loss scaler skips is seen by no hook of the optimiser. What is seen is that
        # the gradients are gone though no step was completed. (With zero_grad(set_to_none=False)
        # they are not: such loops call ``Sparsifier.micro_batch``.)
        if weight is None:
            weight = self.root.get_submodule(self.example).weight
        has_gradient = weight.is_leaf and weight.grad is not None
        first = self._fresh or (self._had_gradient and not has_gradient)
        self._had_gradient = has_gradient
        rank, world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.sync()
        self.set_micro(rank if first else self.micro + world)
        self._fresh = self._open = False

    def now(self) -> Any:
        """(step, micro-batch) for the backward; a tensor where a graph reads it when it is run."""
        if torch.compiler.is_compiling() or self.clock.is_cuda:
            return self.clock.clone()
        return self.step, self.micro


def _free_name(root: nn.Module) -> str:
    """``sparsity_counters``; numbered where sparsify was called for other layers before."""
    names = ["sparsity_counters", *(f"sparsity_counters_{k}" for k in range(2, 1000))]
    return next(name for name in names if not hasattr(root, name))


def _checksum(values: list[int]) -> int:
    own, zeros = (zlib.crc32(repr(v).encode()) for v in (values, [0] * len(values)))
    return own ^ zeros  # zeros, which a dense state dict may bring, are right


class LayerState(nn.Module):
    """What is sparse about one layer: the method's tensors, the last mask, its draws."""

    previous_mask: Tensor
    held: Tensor | None  # the mask before an update, for methods that change weights after it
    _stored: dict[bool, Operands | None]  # operands of training (True) and of evaluation (False)
    _spare: dict[bool, Operands]  # their memory, for the next ones
    _mask: Tensor | None  # taken with the operands of training

    if TYPE_CHECKING:  # the method's tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, model: ModelState, name: str, index: int, weight: Tensor, dim: int) -> None:
        super().__init__()
        self.model = model  # what all sparse layers share
        self.layer_name = name
        self.index = index  # position among the sparse layers: part of the noise key
        self.dim = dim
        self.flips: Tensor | None = None  # 0-d int64: flips at the last comparison
        self.forget()
        rows = weight.new_zeros(weight.shape, dtype=torch.bool)
        self.register_buffer(PREVIOUS_MASK, _pack(rows))
        for key, value in model.method.initial_state(_wide(weight), self).items():
            if hasattr(self, key) or "." in key:
                raise ConfigError(f"initial_state: {key!r} cannot be the name of a tensor")
            if isinstance(value, nn.Parameter):
                self.register_parameter(key, value)
            else:
                self.register_buffer(key, value)
        if model.method.window[0] == 0:
            self.update(weight)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what can be computed again."""
        return self.__dict__ | {"_stored": {}, "_spare": {}, "_mask": None, "held": None}

    def _apply(self, fn: Any, recurse: bool = True) -> LayerState:
        # .to(bfloat16) and the like convert the weight; scales stay fp32
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for key, old in before.items():
            new = self._buffers[key]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[key] = old.to(new.device)
        self.forget()
        return self

    @property
    def method(self) -> Method:
        """The method of the layer."""
        return self.model.method

    @property
    def step(self) -> Any:
        """Completed optimiser steps: an integer, or a 0-d int64 tensor in compiled graphs."""
        return self.model.clock[0] if torch.compiler.is_compiling() else self.model.step

    def key(self, product: int) -> NoiseKey:
        """Noise stream of a product at this step."""
        return noise_key(self.model.seed, self.step, self.index, product)

    def key_at(self, clock: Any, product: int, counters: int, per: int = 1) -> NoiseKey:
        """Noise stream of the draws of a micro-batch: ``counters`` of them, one for ``per`` tokens.

        Each has room for the largest of the global batch, so that no two of them share draws.
        """
        first = clock[1] * max(counters, -(-self.model.capacity // per))
        return noise_key(self.model.seed, clock[0], self.index, product, first)

    @torch.no_grad()
    def project(self, weight: Tensor) -> Projection:
        """What evaluation makes of the weight now; W and no mask in a dense phase."""
        if not torch.compiler.is_compiling():
            self.model.sync()
        return self._projected(weight, training=False)

    def sees(self, training: bool) -> bool:
        """Whether products see the operands of the row, or W, X and G as they are."""
        phase = self.method.phase
        return phase.training if training else phase.evaluation

    def operands(self, weight: Tensor, dtype: torch.dtype, training: bool) -> Operands | None:
        """A and B in ``dtype``; None: the layer does what the class it replaces does."""
        phase = self.method.phase
        if self.model.execution is EMULATE and phase.training == phase.evaluation:
            training = True  # the operands of evaluation are the same
        if self.model.store != dtype:
            return self._prepare(weight, dtype, training, self._projected(weight, training))
        if training in self._stored:
            return self._stored[training]
        return self._keep(weight, training)

    @torch.no_grad()
    def _projected(self, weight: Tensor, training: bool) -> Projection:
        sees = self.sees(training)
        return self.method.project(_wide(weight), self) if sees else Projection(None, None)

    @torch.no_grad()
    def _prepare(
        self, weight: Tensor, dtype: torch.dtype, training: bool, projection: Projection
    ) -> Operands | None:
        forward, mask, backward, scale = projection
        execution = self.model.execution if training else EMULATE
        if forward is None:
            changed = self.sees(training) and any(self.method.changes)
            if execution is EMULATE and not changed:
                return None
            forward = weight.detach()
        if self.dim == 0:  # Conv1D stores (in_features, out_features)
            forward, backward = forward.t(), None if backward is None else backward.t()
        rows = Projection(forward, mask, backward, scale)
        return execution.prepare(rows, dtype, self._spare.pop(training, None))

    def _keep(self, weight: Tensor, training: bool) -> Operands | None:
        """Project and store, in the memory of earlier operands."""
        assert self.model.store is not None
        with torch.inference_mode(False):  # a training forward may use it next
            projection = self._projected(weight, training)
            operands = self._prepare(weight, self.model.store, training, projection)
        if torch.compiler.is_compiling():
            return operands
        if training:
            self._mask = projection.mask
        # a weight that is only cast is not kept: the cast of an edited one is always right
        only_cast = projection.forward is None and self.model.execution is EMULATE
        if operands is None or not only_cast:
            self._stored[training] = operands
        return operands

    def restore(self, weight: Tensor) -> None:
        """The weight changed: project anew where operands are stored, else nothing is kept."""
        kept = self._stored.get(True)
        self.forget()
        if self.model.store is not None:
            self._spare = {} if kept is None else {True: kept}
            self._keep(weight, training=True)

    def forget(self) -> None:
        """What was stored is out of date; the next forward makes it again."""
        self._stored, self._spare, self._mask, self.held = {}, {}, None, None

    @torch.no_grad()
    def mask_in_use(self, weight: Tensor) -> Tensor:
        """The mask of the projection, or the one that the method's rule would choose."""
        mask = self._mask
        if mask is None:
            mask = self.project(weight).mask
        if mask is None:
            mask = self.method.mask(_wide(weight), self.dim)
        if self.model.store is not None:
            self._mask = mask
        return mask

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Let the method bring its tensors up to date with the weight."""
        self.method.update_(weight.detach(), self)

    def take_baseline(self, weight: Tensor) -> None:
        """Remember the current mask as the one that the next comparison starts from."""
        self.previous_mask.copy_(_pack(self.mask_in_use(weight)))
        self.flips = None

    def compare(self, weight: Tensor) -> Tensor:
        """Flips since the last comparison, 0-d int64; the new mask is remembered."""
        new = _pack(self.mask_in_use(weight))
        flips = packed_flip_count(self.previous_mask.flatten(), new.flatten())
        self.previous_mask.copy_(new)
        return flips

    def rename_old_tensors(self, state_dict: dict[str, Any], prefix: str, weight: Tensor) -> None:
        """Tensors of version 0.1 as they are called now; ``prefix`` is that of the layer."""
        old = f"{prefix}sparsity_"
        for key in [key for key in state_dict if key.startswith(old)]:
            name, value = key.removeprefix(old), state_dict.pop(key)
            if name == PREVIOUS_MASK:
                value = _pack(unpack_24(value, weight.shape))
            if name in self._buffers:  # some were derived from the step
                state_dict[f"{prefix}sparsity.{name}"] = value


def _wide(weight: Tensor) -> Tensor:
    """The master weight in fp32 or wider: masks and scales never come from a cast copy."""
    return widen(weight.detach())


def _pack(mask: Tensor) -> Tensor:
    """A mask in bits, whole bytes for every row of the storage, so that rows can be sharded."""
    flat = mask.flatten(1)
    if flat.shape[1] % 8:
        flat = F.pad(flat, (0, -flat.shape[1] % 8))
    return pack_24(flat).view(flat.shape[0], -1)
