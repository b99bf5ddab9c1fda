"""State that all sparse layers of a model share: counters, clock and phase."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.backend import Backend, FP8Precision
from sparsepretrain.sparsity.clock import Clock, MicroBatches, fill
from sparsepretrain.sparsity.method import Method, enter


class ModelState:
    """Counters and phase of a sparse model, and the settings that its layers share.

    The counters exist twice: as integers, which eager layers read without synchronizing with the
    device, and as a buffer of the root, which is part of state dicts. :meth:`sync` updates the
    integers after the buffer was loaded. It is a buffer of the root, not of a child module, which
    nn.Sequential would call.
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
        # a root may be made sparse twice, for other layers: each call has counters of its own
        names = ["sparsity_counters", *(f"sparsity_counters_{k}" for k in range(2, 1000))]
        self.buffer = next(name for name in names if not hasattr(root, name))
        self.example: Any = None  # a sparse layer, with a trained weight if there is one
        self.method, self.precision, self.backend, self.seed = method, precision, backend, seed
        self.clock = Clock(device)
        self.micro_batches = MicroBatches(self.clock, self._has_gradient, self.sync)
        self.compared_at = 0  # completed steps at the last comparison of masks
        self.flips: Tensor | None = None
        """Flips of the last comparison, (layers,); None: none since a load."""
        self.flip_interval = 1  # steps between the two masks of the last comparison
        self.left_meta = False  # the buffer left the meta device and has no values yet
        self.baseline_due = False  # weights were replaced: compare masks before the next step
        size = 2 + len(method.scalars) + 1  # step, compared_at, scalars, checksum
        root.register_buffer(self.buffer, torch.zeros(size, dtype=torch.int64, device=device))
        self._hooks = [
            root.register_forward_pre_hook(self.before_forward),
            root.register_load_state_dict_pre_hook(self.before_load),
        ]
        self._seen: tuple[Tensor, int] | None = None  # buffer, its version: equal to the integers
        enter(method, 0)
        self.write()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies, which are not attached."""
        return self.__dict__ | {"_seen": None}

    def _has_gradient(self) -> bool:
        weight = self.example.weight
        # torch warns when .grad of a computed weight (functional_call, parametrizations) is read
        return bool(weight.is_leaf and weight.grad is not None)

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.clock.step

    @property
    def label(self) -> str:
        """Precision and backend in a word or two; "" if products are dense and follow autocast."""
        words = [str(self.precision).partition(":")[0]] if self.precision else []
        return " ".join([*words, self.backend.name] if self.backend else words)

    def sync(self) -> None:
        """Update the integers if a loaded state dict or a copy has written the buffer."""
        buffer = self.root._buffers.get(self.buffer)
        if buffer is None:  # the model was densified
            return
        # Torch counts the in-place writes of a tensor. Comparing the counts needs no
        # synchronization with the device, as comparing values would in every forward. Inference
        # tensors have no count.
        version = 0 if buffer.is_inference() else buffer._version
        if self._seen is not None and self._seen[0] is buffer and self._seen[1] == version:
            return
        if not buffer.is_meta:
            *values, checksum = buffer.tolist()
            left_meta, self.left_meta = self.left_meta, False
            if left_meta and (checksum != _checksum(values) or not any(values)):
                self.write()  # nothing was loaded since
                return
            if checksum != _checksum(values):
                raise ConfigError(
                    "the counters and masks of this sparse model were averaged: they must be "
                    "copied, as AveragedModel(use_buffers=False) and timm's ModelEmaV3 do"
                )
            step, compared_at, *scalars = values
            if (step, compared_at) != (self.step, self.compared_at):
                self.flips = None
            self.compared_at = compared_at
            self.baseline_due &= step == 0  # a checkpoint brings its own baseline
            self.method.scalars = dict(zip(self.method.scalars, scalars, strict=True))
            enter(self.method, step)
            self.clock.set(step, buffer.device)
        self._seen = (buffer, version)

    def write(self) -> None:
        """Write the integers to buffer, phase and clock, without synchronizing with the device."""
        enter(self.method, self.step)
        buffer = self.root.get_buffer(self.buffer)
        fill(buffer, self._values())
        self._seen = (buffer, buffer._version)
        self.clock.set(self.step, buffer.device)

    def _values(self) -> list[int]:
        """Return the integers as the buffer holds them."""
        values = [self.step, self.compared_at, *self.method.scalars.values()]
        return [*values, _checksum(values)]

    def before_load(self, module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        """Add the current counters to a dense state dict, which has none."""
        buffer = self.root.get_buffer(self.buffer)
        if not buffer.is_meta:
            self.sync()
        elif args[0].get("assign_to_params_buffers"):  # the weights leave the meta device
            loaded = next((v for k, v in state_dict.items() if k.startswith(prefix)), buffer)
            buffer = torch.tensor(self._values(), device=loaded.device)
        state_dict.setdefault(prefix + self.buffer, buffer)

    def begin(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps; call :meth:`write` afterwards."""
        self.clock.step, self.clock.micro = step, 0
        self.micro_batches.restart()
        enter(self.method, step)

    @property
    def is_new(self) -> bool:
        """True if no step was taken; False if the counters were averaged."""
        try:
            self.sync()
        except ConfigError:
            return False
        return self.step == 0

    def reset(self) -> None:
        """Set counters and scalars to their values before the first step."""
        self.compared_at, self.flips = 0, None
        self.method.scalars = dict(type(self.method).scalars)
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps."""
        self.begin(step)
        self.write()

    def release(self) -> None:
        """Remove buffer and hooks from the root if no layer is sparse any more."""
        for module in self.root.modules():
            if getattr(getattr(module, "sparsity", None), "model", None) is self:
                self.example = module
                return
        del self.root._buffers[self.buffer]
        for hook in self._hooks:
            hook.remove()

    def before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Prepare a forward of the root: drop stale gathered operands, count micro-batches."""
        if self.example.sparsity.rows.is_sharded:
            # Layers sync when they run, which is too late here: FSDP gathers operands before.
            self.sync()
            if self.example.sparsity.cache.is_stale(module.training):
                self.reshard()
        self.micro_batches.root_runs(module, args)

    def reshard(self) -> None:
        """Let FSDP drop gathered operands, which belong to other weights or another phase."""
        if self.example.sparsity.rows.is_sharded:
            for module in self.root.modules():
                if hasattr(module, "set_reshard_after_forward"):
                    module.reshard()  # type: ignore[operator]


def _checksum(values: list[int]) -> int:
    """Return a checksum; counters averaged over two models almost never match theirs."""
    own, zeros = (zlib.crc32(repr(v).encode()) for v in (values, [0] * len(values)))
    return own ^ zeros  # zeros, which a dense state dict may bring, are valid
