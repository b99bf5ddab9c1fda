"""State that all sparse layers of a model share: counters, clock and phase."""

from __future__ import annotations

import itertools
import sys
import warnings
import zlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.sparsity.clock import Clock, MicroBatches, fill
from sparsepretrain.sparsity.engine.attachments import (
    Attachment,
    frames_to_the_caller,
    some_values,
)
from sparsepretrain.sparsity.engine.data_parallel import require_known_parameters
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.engine.stored_masks import require_masks
from sparsepretrain.sparsity.matmuls.fp8 import FP8Precision
from sparsepretrain.sparsity.matmuls.policy import SparseMatmulPolicy
from sparsepretrain.sparsity.method import Method, identity, title
from sparsepretrain.sparsity.patterns import Pattern, pattern_text

BUFFERS = ("sparsity_counters", "sparsity_method")
"""Names of the buffers of the root; a root that is made sparse again has more, with a number."""
METHOD_BYTES = 64
"""Size of the buffer that names method and patterns: constant, so that any name loads."""


class ModelState:
    """Counters and phase of a sparse model, and the settings that its layers share.

    Layers with different patterns have methods of their own, alike except for n and m. The first
    one, :attr:`method`, has the scalars and reads the optimizer; the others follow it.

    The counters exist twice: as integers, which eager layers read without synchronizing with the
    device, and as a buffer of the root, which is part of state dicts. :meth:`sync` updates the
    integers after the buffer was loaded. It is a buffer of the root, not of a child module, which
    nn.Sequential would call.
    """

    def __init__(
        self,
        root: nn.Module,
        methods: Mapping[str, Method],
        precision: FP8Precision | None,
        policy: SparseMatmulPolicy | None,
        seed: int,
        device: torch.device,
    ) -> None:
        self.root = root
        self.methods = [*dict.fromkeys(methods.values())]
        """One method for each pattern, in the order of the layers (``methods``: by layer)."""
        self.method = method = self.methods[0]
        self.dense_by_pattern: tuple[str, ...] = ()
        """Selected layers that ``patterns`` leaves dense."""
        patterns = [each.final_pattern for each in methods.values()]
        self._stored_title = _stored_title(identity(*self.methods), patterns)
        self.precision = precision
        self.policy = policy
        self.operands: list[LayerOperands] = []
        """Operands of all layers, which follow the phase."""
        self.watched: tuple[str, Any] | None = None  # a SparseWeight
        """Name and layer of a trained weight, whose updates without the hooks are noticed."""
        self.watches_reads = False
        """True while the first step looks for modules that read a sparse weight themselves."""
        self.clock = Clock(seed, device)
        self.micro_batches = MicroBatches(self.clock, self._check_hooks)
        self.attachment = Attachment()
        self.compared_at = 0  # completed steps at the last comparison of masks
        self.flips: Tensor | None = None
        """Flips of the last comparison, (layers,); None: none since a load."""
        self.slice_flips: dict[str, Tensor] = {}
        """Flips of the slices of each bank on this rank, at the same comparison."""
        self.flip_interval = 1  # steps between the two masks of the last comparison
        self._data_was_written = False  # writes that raise no version were seen once
        self._read_in_training = True  # mode of the layers when the counters were last read
        self.left_meta = False  # the buffer left the meta device and has no values yet
        self.baseline_due = False  # weights were replaced: compare masks before the next step
        # a root may be made sparse twice, for other layers: each call has buffers of its own
        ends = itertools.chain([""], (f"_{k}" for k in itertools.count(2)))
        counters, named = BUFFERS
        end = next(end for end in ends if not hasattr(root, f"{counters}{end}"))
        self.buffer = f"{counters}{end}"
        self.method_buffer = f"{named}{end}"
        size = 2 + len(method.scalars) + 1  # step, compared_at, scalars, checksum
        root.register_buffer(self.buffer, torch.zeros(size, dtype=torch.int64, device=device))
        root.register_buffer(self.method_buffer, _encoded(self._stored_title).to(device))
        self._hooks = [
            root.register_forward_pre_hook(self.before_forward),
            root.register_load_state_dict_pre_hook(self.before_load),
            root.register_load_state_dict_post_hook(self.after_load),
            # torch sets an attribute of this hook, which a bound method does not have
            root.register_state_dict_post_hook(partial(ModelState.after_state_dict, self)),
        ]
        self._warned_of_saving = False
        self._copy: CopyWatch | None = None
        """Watch over a copy, such as an average of weights; None: this is no copy."""
        self._seen: tuple[Tensor, int] | None = None  # buffer, its version: equal to the integers
        for each in self.methods:
            each.set_step(0)
        self.write()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies, which are not attached."""
        return self.__dict__ | {
            "_seen": None,
            "attachment": Attachment(),
            "_copy": CopyWatch(),
            "watches_reads": False,
        }

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.clock.step

    @property
    def title(self) -> str:
        """Name, and the patterns of the layers."""
        return title(*([operands.method for operands in self.operands] or self.methods))

    @property
    def label(self) -> str:
        """Precision and policy of sparse matmuls; "" if matmuls are dense and follow autocast."""
        words = [str(self.precision).partition(":")[0]] if self.precision else []
        return " ".join([*words, self.policy.name] if self.policy else words)

    @property
    def adds_parameters(self) -> bool:
        """True if the method trains Parameters of its own."""
        return bool(self.operands) and bool(self.operands[0].state._parameters)

    def count_parameters(self) -> int:
        """Return the entries of the Parameters, without logits of masks, which no export has."""
        learned: set[int] = set()
        if self.method.trains == "method":
            learned = {id(p) for operands in self.operands for p in operands.state.parameters()}
        return sum(p.numel() for p in self.root.parameters() if id(p) not in learned)

    @property
    def is_copy(self) -> bool:
        """True if the model, or a part of it, was copied from the one given to ``sparsify``."""
        return self._copy is not None

    @property
    def is_sharded(self) -> bool:
        """True if FSDP shards the layers; all of them, or none."""
        return self.operands[0].rows.is_sharded

    def _enter(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps."""
        before = [method.phase for method in self.methods]
        for method in self.methods:
            method.scalars = self.method.scalars
            method.set_step(step)
        if [method.phase for method in self.methods] != before:
            for operands in self.operands:
                operands.choose_ways()

    def sync(self, *, always: bool = False) -> None:
        """Update the integers if a loaded state dict or a copy has written the buffer.

        Args:
            always: read the buffer even if its version is the same, which waits for the device.
                Writes to ``.data``, by which Lightning averages weights, raise no version.

        Raises:
            ConfigError: the counters were averaged.
        """
        buffer = self.root._buffers.get(self.buffer)
        if buffer is None:  # the model was densified
            return
        # Torch counts the in-place writes of a tensor. Comparing the counts needs no
        # synchronization with the device, as comparing values would in every forward. Inference
        # tensors have no count.
        version = 0 if buffer.is_inference() else buffer._version
        is_known = self._seen is not None and self._seen[0] is buffer and self._seen[1] == version
        if is_known and not (always or self._data_was_written):
            return
        if not buffer.is_meta:
            *values, checksum = buffer.tolist()
            if is_known:
                if [*values, checksum] == self._values():
                    return
                self._data_was_written = True  # and may be again, such as to swap weights back
            left_meta = self.left_meta
            self._name_method()
            if left_meta and (checksum != _checksum(values) or not any(values)):
                self.write()  # nothing was loaded since
                return
            if checksum != _checksum(values):
                raise ConfigError(
                    "the counters and masks of this sparse model were averaged: buffers must be "
                    "copied, as AveragedModel, timm's ModelEmaV3 and Lightning's "
                    "EMAWeightAveraging(use_buffers=False) do"
                )
            step, compared_at, *scalars = values
            if (step, compared_at) != (self.step, self.compared_at):
                self.flips = None
            self.compared_at = compared_at
            self.baseline_due &= step == 0  # a checkpoint brings its own baseline
            self.method.scalars = dict(zip(self.method.scalars, scalars, strict=True))
            self._enter(step)
            self.clock.set(step, buffer.device)
        self._seen = (buffer, version)

    def sync_in(self, *, training: bool) -> None:
        """Read the counters when layers go from training to evaluation, or back.

        Hosts write averages of the weights there, through ``.data`` (:meth:`sync`).
        """
        self.sync(always=training is not self._read_in_training)
        self._read_in_training = training

    def write(self) -> None:
        """Write the integers to buffer, phase and clock, without synchronizing with the device."""
        self._enter(self.step)
        self._name_method()
        buffer = self.root.get_buffer(self.buffer)
        fill(buffer, self._values())
        self._seen = (buffer, buffer._version)
        self.clock.set(self.step, buffer.device)

    def _name_method(self) -> None:
        """Write the buffer of the method's title once it has left the meta device."""
        codes = self.root.get_buffer(self.method_buffer)
        if self.left_meta and not codes.is_meta:
            codes.copy_(_encoded(self._stored_title))
            self.left_meta = False

    def _values(self) -> list[int]:
        """Return the integers as the buffer holds them."""
        values = [self.step, self.compared_at, *self.method.scalars.values()]
        return [*values, _checksum(values)]

    def before_load(self, module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuse the state of another method, and add the counters that a dense one lacks."""
        this = _decoded(_encoded(self._stored_title))  # a long name of a plug-in is cut
        stored = state_dict.get(prefix + self.method_buffer)
        # A model that left the meta device may pass its own buffer, which has no values yet.
        named = stored is not None and not (stored.is_meta or self.left_meta)
        if named and (other := _decoded(stored)) != this:
            raise ConfigError(
                f"the state dict is of a model with {other}, this one has {this}: call sparsify "
                "with the method, n, m and patterns of the checkpoint"
                f"{', and its total_steps' if self.method.follows_length else ''}"
            )
        buffer = self.root.get_buffer(self.buffer)
        if not buffer.is_meta:
            self.sync()
            device = buffer.device
        elif args[0].get("assign_to_params_buffers"):  # the weights leave the meta device
            device = next((v for k, v in state_dict.items() if k.startswith(prefix)), buffer).device
            buffer = torch.tensor(self._values(), device=device)
        else:
            device = buffer.device
        state_dict.setdefault(prefix + self.buffer, buffer)
        state_dict.setdefault(prefix + self.method_buffer, _encoded(this).to(device))

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Refuse averaged counters and masks."""
        self.sync()
        self.require_masks()

    def require_masks(self) -> None:
        """Refuse stored masks that are not N:M, once the method has reached its pattern."""
        if self.phase_is_final and not self.is_sharded:
            # a model that left the meta device may be loaded in pieces
            require_masks(operands for operands in self.operands if operands.initialized)

    def after_state_dict(self, module: nn.Module, *args: Any) -> None:
        """Refuse averaged counters; warn once if another library saves the dense weights."""
        self.sync(always=True)
        self.watch_copy()
        if self._warned_of_saving or not self.method.phase.evaluation:
            return
        frame: Any = sys._getframe(1)
        saving = None
        while frame is not None:
            function = frame.f_code.co_name
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if function in ("_save_checkpoint", "save_state"):
                return  # of transformers' Trainer and Accelerate, which continue from it
            if function == "save_pretrained" and package == "sparsepretrain":
                return  # ours passes the sparse weights
            # a Trainer collects the weights of sharded models before it calls save_pretrained
            collects = package in ("accelerate", "transformers", "trl")
            if function == "save_pretrained" or (
                collects and function in ("get_state_dict", "save_model")
            ):
                saving = function
            frame = frame.f_back
        if saving is None:
            return
        self._warned_of_saving = True
        warnings.warn(
            f"{saving} takes the stored weights of a sparse model, which are dense: a run "
            "can continue from them, but a plain from_pretrained computes something else. Use "
            "sparsepretrain.save_pretrained(model, directory) to write the sparse weights",
            SparsePretrainWarning,
            stacklevel=frames_to_the_caller(),
        )

    def watch_copy(self) -> None:
        """Warn once if the weights of a copy keep changing and its counters do not.

        YOLO's ModelEMA and ema_pytorch average floating-point tensors and leave integers out. Only
        before the final pattern is reached: the copy would keep an earlier one.
        """
        if self._copy is None or self.root.training:
            return
        watched = self._watched_weight()
        if self.phase_is_final or watched is None or watched[0].is_meta:
            return
        if self._copy.changes(watched[0], self.step):
            warnings.warn(
                f"the weights of this copy ({self.method.options.name}) change, but its counters "
                f"stay at step {self.step}, so it keeps the phase of that step: copy integer "
                "buffers too, as AveragedModel and timm's ModelEmaV3 do",
                SparsePretrainWarning,
                stacklevel=frames_to_the_caller(),
            )

    @property
    def phase_is_final(self) -> bool:
        """True if evaluation uses the final pattern of the method, not an earlier one."""
        phase = self.method.phase
        reached = all(m.phase.row.A.pattern == m.sparse_row.A.pattern for m in self.methods)
        reached |= self.method.trains_another_weight  # training has weights of its own
        # STEP evaluates N:M weights while it still trains dense ones
        return phase.evaluation and (reached or not phase.training)

    def _check_hooks(self) -> None:
        """Warn if the watched weight was updated without the hooks; see :class:`Attachment`."""
        if watched := self._watched_weight():
            self.attachment.check(*watched, self.step)

    def check_step(self, *, ended: bool) -> None:
        """Watch the same weight at the begin and the end of the step with the hooks."""
        if watched := self._watched_weight():
            if ended:
                self.attachment.after_step(watched[0])
            else:
                self.attachment.before_step(*watched)

    def _watched_weight(self) -> tuple[Tensor, str] | None:
        """Return the watched weight, and its layer and method, unless the model is sharded.

        Sharded models refuse to run unattached.
        """
        if self.watched is None or self.is_sharded:
            return None
        name, layer = self.watched
        weight = layer.weight if layer.has_own_weight() else None
        return None if weight is None else (weight, f"{name!r} ({self.method.options.name})")

    def advance_to(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps; call :meth:`write` afterwards."""
        self.clock.advance_to(step)
        self.micro_batches.restart()
        self._enter(step)

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
        self.compared_at = 0
        self.flips = None
        self.method.scalars = dict(type(self.method).scalars)
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps."""
        self.advance_to(step)
        self.write()

    def warn_of_remarks(self) -> None:
        """Warn of what the method noticed about weights while it updated all layers."""
        remarks = [remark for method in self.methods for remark in method.take_remarks().items()]
        for text, layers in remarks:
            shown = ", ".join(layers[:3])
            more = f" and {len(layers) - 3} more layers" if len(layers) > 3 else ""
            warnings.warn(
                f"{self.method.options.name}: {text} {shown}{more}",
                SparsePretrainWarning,
                stacklevel=frames_to_the_caller(),
            )

    def release(self, densified: Collection[nn.Module], gone: set[LayerOperands]) -> None:
        """Forget layers that were densified; remove buffers and hooks with the last one."""
        self.attachment = Attachment()
        self.operands = [operands for operands in self.operands if operands not in gone]
        if self.operands:
            if self.watched is not None and self.watched[1] in densified:
                self.watched = None  # the next one that is trained
                for name, layer in self.root.named_modules():
                    own = getattr(layer, "sparse_model", None) is self
                    if own and layer.weight.requires_grad:
                        self.watched = name, layer
                        break
            return
        del self.root._buffers[self.buffer]
        del self.root._buffers[self.method_buffer]
        for hook in self._hooks:
            hook.remove()

    def before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Prepare a forward of the root: drop stale gathered operands, number micro-batches."""
        if self.is_sharded:
            # Layers sync when they run, which is too late here: FSDP gathers operands before.
            self.sync()
            if self.operands[0].is_stale(module.training):
                self.reshard()
        self.micro_batches.root_runs(module, args)
        if not torch.compiler.is_compiling() and self.adds_parameters:
            require_known_parameters(self.root, self.method.options.name)
        if self._copy is not None and not torch.compiler.is_compiling():
            self.watch_copy()

    def reshard(self) -> None:
        """Let FSDP drop gathered operands, which belong to other weights or another phase."""
        if self.is_sharded:
            for module in self.root.modules():
                if hasattr(module, "set_reshard_after_forward"):
                    module.reshard()  # type: ignore[operator]


class CopyWatch:
    """Changes of a weight of a copied model while its counters stay the same."""

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._step = 0
        self._count = 0
        self._told = False

    def changes(self, weight: Tensor, step: int) -> bool:
        """Return True once, when the weight has changed twice: one change may be an edit."""
        now = some_values(weight)
        before, self._values = self._values, now
        if self._told or before is None or step != self._step or before.shape != now.shape:
            self._step, self._count = step, 0
            return False
        self._count += not torch.equal(before, now.to(before.device))
        self._told = self._count > 1
        return self._told


def _checksum(values: list[int]) -> int:
    """Return a checksum that uninitialized memory and averaged counters do not have.

    Zeros, which a dense state dict may bring, are valid.
    """
    checksum, zeros = (zlib.crc32(repr(v).encode()) for v in (values, [0] * len(values)))
    return checksum ^ zeros


def _stored_title(named: str, patterns: list[Pattern]) -> str:
    """Return the name that checkpoints store; it tells which layer has which of several patterns.

    Args:
        named: method and patterns, see :func:`identity`.
        patterns: of the sparse layers, in the model's order.
    """
    if len(set(patterns)) == 1:
        return named
    layers = zlib.crc32(",".join(map(pattern_text, patterns)).encode())
    end = f" [{layers:08x}]"
    return named[: METHOD_BYTES - len(end)] + end


def _encoded(text: str) -> Tensor:
    """Return a text as UTF-8 in a tensor of constant size, filled up with zeros."""
    codes = text.encode()[:METHOD_BYTES]
    return torch.tensor([*codes, *bytes(METHOD_BYTES - len(codes))], dtype=torch.uint8)


def _decoded(codes: Tensor) -> str:
    return bytes(codes.tolist()).rstrip(b"\0").decode(errors="replace")
