"""What is sparse about a model as a whole: counters, phase and scalars, in a buffer of its root."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.backend import Backend, FP8Precision
from sparsepretrain.sparsity.method import Method


class ModelState:
    """Counters, phase and scalars: what is one per model.

    The numbers are kept twice: as integers, which eager layers read without waiting for a device,
    and as a buffer of the root, which state dicts hold; whoever writes to it (a loaded checkpoint,
    an average) is followed. A child module would be run where the root is an nn.Sequential. The
    micro-batch is in no buffer: ranks differ in it, and DistributedDataParallel broadcasts buffers.
    """

    def __init__(
        self,
        root: nn.Module,
        method: Method,
        precision: FP8Precision | None,
        backend: Backend | None,
        seed: int,
        device: torch.device,
    ) -> None:
        self.root = root
        names = ["sparsity_counters", *(f"sparsity_counters_{k}" for k in range(2, 1000))]
        self.buffer = next(name for name in names if not hasattr(root, name))
        self.example: Any = None  # a sparse layer, one whose weight is trained if there is any
        self.method = method
        self.precision = precision  # None: products follow autocast
        self.backend = backend  # chooses sparse products; None: all are emulated
        self.seed = seed
        self.step = 0  # completed optimiser steps
        self.micro = 0  # index of the current micro-batch in the global batch
        self.compared_at = 0  # completed steps at the last comparison of masks
        self.flips: Any = None  # (layers,) int64: at the last comparison
        self.interval = 0  # steps between the last two comparisons; 0: none since the numbers came
        self.capacity = 0  # most tokens of a micro-batch if they differ; 0: all have equally many
        self.store: torch.dtype | None = None  # of stored operands; None: every forward projects
        self.expects_attach = True  # to update sparse weights without the hooks is a mistake
        self.told = False  # whether the masked decay that low precision loses was looked at
        self.counting = True  # forwards count micro-batches; no: the loop states them
        self.begins = True  # the next layer that runs begins a micro-batch
        self.emptied = False  # the buffer left the meta device and holds anything
        self.stepping = False  # the optimizer with the hooks is inside its step
        self.baseline_due = False  # weights were replaced: the next step compares masks first
        self._fresh = True  # the next forward is the first one after a step
        self._had_gradient = False
        size = 2 + len(method.scalars) + 1  # step, compared_at, scalars, checksum
        root.register_buffer(self.buffer, torch.zeros(size, dtype=torch.int64, device=device))
        self._hooks = [
            root.register_forward_pre_hook(self.before_forward),
            root.register_load_state_dict_pre_hook(self.before_load),
        ]
        # (completed steps, micro-batch) for compiled and captured graphs
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self._reading: Tensor | None = None  # of the clock as it stands, on a GPU
        self._seen: Any = None
        method.set_step(0)
        self.write()

    def __getstate__(self) -> dict[str, Any]:
        """Of copies, which own their weights no longer and may ride on no optimiser."""
        gone = {"_seen": None, "_reading": None, "store": None}
        return self.__dict__ | gone | {"expects_attach": True}

    @property
    def label(self) -> str:
        """Precision and backend in a word or two; "" if products are dense and follow autocast."""
        words = [str(self.precision).partition(":")[0]] if self.precision else []
        return " ".join([*words, self.backend.name] if self.backend else words)

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
            *values, checksum = buffer.tolist()
            emptied, self.emptied = self.emptied, False
            if emptied and (checksum != _checksum(values) or not any(values)):
                self.write()  # nothing was loaded since
                return
            if checksum != _checksum(values):
                raise ConfigError(
                    "the counters and masks of this sparse model were averaged: they must be "
                    "copied, as AveragedModel(use_buffers=False) and timm's ModelEmaV3 do"
                )
            if values[:2] != [self.step, self.compared_at]:
                self.interval = 0
            self.step, self.compared_at, *scalars = values
            self.method.state = dict(zip(self.method.scalars, scalars, strict=True))
            self.method.set_step(self.step)
            self._set_clock()
        self._seen = (buffer, version)

    def write(self) -> None:
        """Bring buffer and phase up to date with the integers; waits for no device."""
        self.method.set_step(self.step)
        counters = self.root.get_buffer(self.buffer)
        _fill(counters, self._values())
        self._seen = (counters, counters._version)
        self._set_clock()

    def _values(self) -> list[int]:
        """The integers as the buffer holds them."""
        values = [self.step, self.compared_at, *self.method.state.values()]
        return [*values, _checksum(values)]

    def _set_clock(self) -> None:
        device = self.root.get_buffer(self.buffer).device
        if self.clock.device != device:
            with torch.inference_mode(False):
                self.clock = torch.zeros_like(self.clock, device=device)
        self._reading = None
        _fill(self.clock, [self.step, self.micro])

    def before_load(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Add the counters to a dense state dict, which has none: they stay as they are."""
        buffer = self.root.get_buffer(self.buffer)
        if not buffer.is_meta:
            self.sync()
        elif rest[0].get("assign_to_params_buffers"):  # the weights leave the meta device
            given = next((v for k, v in state_dict.items() if k.startswith(prefix)), buffer)
            buffer = torch.tensor(self._values(), device=given.device)
        state_dict.setdefault(prefix + self.buffer, buffer)

    def set_micro(self, micro: int) -> None:
        """The micro-batch that the next forward sees."""
        if micro != self.micro:
            self.micro, self._reading = micro, None
            _fill(self.clock, [micro], 1)

    def begin(self, step: int) -> None:
        """So many optimiser steps are complete; forwards are counted from 0 again.

        The buffer is not written: whoever changes more of the state first writes it all at once.
        """
        self.step, self.micro = step, 0
        self.counting = self.begins = self._fresh = True
        self.method.set_step(step)

    @property
    def is_new(self) -> bool:
        """True if no step was taken; of averaged counters, which nobody reads yet, it is not."""
        try:
            self.sync()
        except ConfigError:
            return False
        return self.step == 0

    def reset(self) -> None:
        """Counters and scalars as before the first step."""
        self.compared_at, self.interval, self.flips = 0, 0, None
        self.method.state = dict(self.method.scalars)
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """:meth:`begin` and :meth:`write`."""
        self.begin(step)
        self.write()

    def release(self) -> None:
        """Take the buffer and the hooks from the root if no layer is sparse any more."""
        if any(getattr(m, "model", None) is self for m in self.root.modules()):
            return
        del self.root._buffers[self.buffer]
        for hook in self._hooks:
            hook.remove()

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of the root: its training forwards are micro-batches."""
        if self.example.sparsity.rows.is_sharded:
            self.sync()
            if self.example.sparsity.cache.is_stale(module.training):
                self.reshard()
        if self.counting and module.training:
            self.begins = False
            # A reentrant checkpoint of the root runs it without gradients first, on inputs that
            # require some.
            if torch.is_grad_enabled() or any(getattr(x, "requires_grad", False) for x in args):
                self.count()

    @torch._disable_dynamo  # torch.compiler.disable, without importing 1.3 s of dynamo for it
    def count(self) -> None:
        """A forward of the root, or of a part of it after a backward, is the next micro-batch."""
        transformed = torch._C._functorch.maybe_current_level() is not None
        if torch._C._current_graph_task_id() != -1 or transformed:  # recomputed, or by torch.func
            return
        # A step that a loss scaler skips is seen by no hook of the optimiser. What is seen is that
        # the gradients are gone though no step was completed. (With zero_grad(set_to_none=False)
        # they are not: such loops call ``Sparsifier.micro_batch``.)
        weight = self.example.weight
        has_gradient = weight.is_leaf and weight.grad is not None
        first = self._fresh or (self._had_gradient and not has_gradient)
        self._had_gradient = has_gradient
        rank, world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.sync()
        self.set_micro(rank if first else self.micro + world)
        self._fresh = self.begins = False

    def reshard(self) -> None:
        """Let FSDP drop gathered operands, which belong to other weights or another phase."""
        if not self.example.sparsity.rows.is_sharded:
            return
        from sparsepretrain.sparsity import sharding

        sharding.reshard(self.root)

    def now(self) -> Any:
        """(step, micro-batch) for the backward; a tensor where a graph reads it when it is run."""
        if torch.compiler.is_compiling():
            return self.clock.clone()
        if not self.clock.is_cuda:
            return self.step, self.micro
        if torch.cuda.is_current_stream_capturing():  # a replay reads the clock again
            return self.clock.clone()
        if self._reading is None:
            self._reading = self.clock.clone()
        return self._reading


def _fill(numbers: Tensor, values: list[int], first: int = 0) -> None:
    """Write from ``first`` on. On a GPU each is a launch: a copy would have to be waited for."""
    with torch.inference_mode(False):
        if numbers.is_cpu:
            numbers[first:].copy_(torch.tensor(values, device=numbers.device))
            return
        for place, value in enumerate(values, first):
            numbers[place].fill_(value)


def _checksum(values: list[int]) -> int:
    own, zeros = (zlib.crc32(repr(v).encode()) for v in (values, [0] * len(values)))
    return own ^ zeros  # zeros, which a dense state dict may bring, are right
