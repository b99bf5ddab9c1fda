"""Operands A and B of one layer: made from the weight, and kept until the weight changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import pack_rows, unpacked, widen
from sparsepretrain.sparsity.engine.attachments import some_values
from sparsepretrain.sparsity.engine.outside_reads import OutsideReads
from sparsepretrain.sparsity.fsdp.rows import ALL_ROWS, Rows
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK, LayerState
from sparsepretrain.sparsity.matmuls.layer import LayerMatmuls
from sparsepretrain.sparsity.matmuls.three import Operands, Prepared
from sparsepretrain.sparsity.method import Method, Projection
from sparsepretrain.sparsity.operand_table import W

Way = Literal["replaced", "projected", "kept", "gathered", "differentiable"]
"""Source of the operands of a forward.

replaced: it needs none, and the replaced class runs; projected: from the weight, in every forward;
kept: from the last step, after ``store_operands``; gathered: FSDP2 has gathered A (and B) instead
of the weight; differentiable: projected under autograd, which trains Parameters of the method."""

Gathered = Literal["A", "drawn A", "W"]
"""Tensor that FSDP2 has gathered for forwards; drawn A: that of training, if it is another one."""


class LayerOperands:
    """Operands of one layer, one set for training and one for evaluation.

    Args:
        method: of the model.
        state: tensors of the method in this layer.
        matmuls: of this layer; they decide in which form operands are prepared.
    """

    def __init__(self, method: Method, state: LayerState, matmuls: LayerMatmuls) -> None:
        self.method = method
        self.state = state
        self.matmuls = matmuls
        self.rows: Rows = ALL_ROWS
        self.stored_dtype: torch.dtype | None = None
        """Dtype of kept operands; None: they are made in every forward."""
        self.has_run = False
        """True after a training forward of the layer, unless compiled; see ``Steps``."""
        self.ran_in_evaluation = False
        """True after a forward with gradients in evaluation mode, in the same way."""
        self.initialized = True
        """False if the method's tensors left the meta device and have no values."""
        self.reset_due = False
        """True if initial weights were loaded before ``attach`` of a sharded model."""
        self._source: tuple[Tensor, list[int]] | None = None
        """Values of the weight that the method's tensors were computed from, and the versions of
        these tensors."""
        self._kept: dict[bool, Operands | None] = {}  # key: training (True) or evaluation (False)
        self._kept_mask: Tensor | None = None  # of kept training operands; packed by rows
        self._gathered_operand: Gathered | None = None  # None: out of date
        self._gathered_b: Tensor | None = None
        self.outside: OutsideReads | None = None
        """Watch over reads of the weight past the layer, in the first step."""
        self._calls: dict[int, int] = {}  # slice (0: a layer) -> calls in the present micro-batch
        self._begun = -1  # `Clock.begun` of that micro-batch
        self.choose_ways()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, which keep no operands."""
        # a copy (an average of weights) is edited without the hooks that refresh operands
        ways = {
            key: "projected" if self.__dict__[key] == "kept" else self.__dict__[key]
            for key in ("_training_way", "_evaluation_way")
        }
        nothing: dict[str, Any] = {
            "_kept": {},
            "_kept_mask": None,
            "stored_dtype": None,
            "outside": None,
        }
        return self.__dict__ | ways | nothing

    # What a forward reads.

    def choose_ways(self) -> None:
        """Choose how forwards get operands, until phase, storage, sharding or matmuls change."""
        self._training_way: Way = self._way(training=True)
        self._evaluation_way: Way = self._way(training=False)

    def _way(self, *, training: bool) -> Way:
        if self._differentiates(training):
            return "differentiable"
        if self.rows.is_sharded:
            return "gathered"
        key = self._key(training)
        if not self._projects(key) and not (key and self.matmuls.base.fprop.rounds):
            return "replaced"
        return "projected" if self.stored_dtype is None else "kept"

    def watch(self, weight: Tensor) -> Tensor:
        """Return the weight for one forward of the first step, see :class:`OutsideReads`."""
        if not (weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()):
            return weight
        if self.outside is None:
            if weight._backward_hooks:  # a hook of the user may change the gradient
                return weight
            self.outside = OutsideReads(weight)
        # functional_call may run the layer with other weights
        return self.outside.through() if self.outside.weight is weight else weight

    def number_call(self, index: int = 0) -> int:
        """Return the number of this training forward within its micro-batch.

        Calls of one layer (shared weights, chunks, twin encoders) draw independently, and so do the
        slices of a bank, whose number is ``index``. Forwards without gradients draw nothing and are
        not counted. A reentrant checkpoint therefore numbers its calls during recomputation, in
        reverse order.
        """
        if not torch.is_grad_enabled():
            return 0
        if self._begun != self.state.clock.begun:
            self._begun = self.state.clock.begun
            self._calls = {}
        count = self._calls.get(index, 0)
        self._calls[index] = count + 1
        return count * self.state.slices + index

    def get(
        self, weight: Tensor, dtype: torch.dtype, training: bool
    ) -> tuple[Tensor, Operands | None]:
        """Return the tensor that receives dA or dW, and the operands in ``dtype``.

        Without operands the replaced class runs on ``weight``.
        """
        way = self._training_way if training else self._evaluation_way
        if way == "replaced":
            return weight, None
        if way == "gathered":
            return weight, self._gathered(weight, dtype, training)
        if way == "differentiable":
            return self._differentiable(weight, dtype)
        key = self._key(training)
        if way == "kept" and self.stored_dtype == dtype and key in self._kept:
            return weight, self._kept[key]
        return weight, self._make(weight, dtype, key)

    def _differentiable(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Operands]:
        """Project under autograd; return A, which receives dA, and operands made from its values.

        Nothing is kept: the graph belongs to one forward. Under FSDP2 ``weight`` and the Parameters
        of the method are gathered, as those of any module.
        """
        self._require_values(weight)
        if self.rows.is_sharded:
            self.rows.local(weight)  # refuses a model that is not attached
            self._require_fresh(training=True)
            if weight.is_cpu:  # kernels read it through NumPy, and FSDP could not free it any more
                weight = weight.clone()
        state = self.rows.whole_state(self.state)
        forward, _, backward, _ = self.method.project_in_training(widen(weight), state)
        assert forward is not None, "a differentiable method returns A"
        a = self._transposed(forward.detach())
        b = None if backward is None else self._transposed(backward.detach())
        return forward, self.matmuls.now(dtype, True).prepare(a, b, None, dtype)

    def _key(self, training: bool) -> bool:
        """Return the set of operands that forwards in this mode use; True: that of training.

        Evaluation shares it if phase and method treat both alike and nothing is packed or in fp8.
        """
        method = self.method
        matmuls = self.matmuls
        same_weight = not (method.differentiable or method.trains_another_weight)
        same_form = not matmuls.packs and matmuls.precision is None
        same_phase = method.phase.training == method.phase.evaluation
        return training or (same_phase and same_form and same_weight)

    def _differentiates(self, training: bool) -> bool:
        """Return True if forwards in this mode project under autograd."""
        return training and self.method.differentiable and self.method.phase.training

    # Projections of the method.

    @torch.no_grad()
    def project(self, weight: Tensor, training: bool = False) -> Projection:
        """Return the projection for evaluation or training; W and no mask in a dense phase."""
        phase = self.method.phase
        if not (phase.training if training else phase.evaluation):
            return Projection(None, None)
        self._require_values(weight)
        # masks and scales come from the master in fp32 or wider, never from a cast copy
        master = widen(self.rows.local(weight).detach())
        group = self._group(updating=False)
        method = self.method
        draws = training and method.trains_another_weight
        project = method.project_in_training if draws else method.project
        return self.rows.apply(project, master, self.state, group)

    def _require_values(self, weight: Tensor) -> None:
        """Refuse a layer whose tensors have no values (ConfigError)."""
        if not self.initialized:
            raise ConfigError(
                f"layer {self.state.layer_name!r} came from the meta device and its "
                f"{', '.join(self.state.method_tensors)} has no values: call sparsifier.reset() "
                "once the weights are initialized, or load a checkpoint of the sparse model"
            )
        if self.state.previous_mask.is_meta and not weight.is_meta:
            raise ConfigError(
                f"layer {self.state.layer_name!r} has a weight, but its buffers are on the meta "
                "device: offload parameters only (accelerate: offload_buffers=False)"
            )

    def _group(self, *, updating: bool) -> int | None:
        """Rows of the stored weight that the method must see together; None: all of them."""
        outputs, inputs = self.method.multiples
        # a compiled forward may not read the step, as `update_needs_whole` does
        if self.method.update_needs_whole if updating else self.method.needs_whole:
            return None
        if self.method.differentiable and not updating:  # FSDP shards Parameters by their own rows
            return None
        return outputs if self.state.dim == 1 else inputs  # a Conv1D stores (in, out)

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Call ``update_`` of the method with the current weight."""
        master = widen(self.rows.local(weight).detach())
        self.rows.apply(self.method.update_, master, self.state, self._group(updating=True))

    @torch.no_grad()
    def take_proximal_step(self, weight: Tensor) -> None:
        """Call ``proximal_step`` of the method, and write its result into the weight."""
        own = self.rows.local(weight).detach()
        group = self._group(updating=False)
        own.copy_(self.rows.apply(self.method.proximal_step, widen(own), self.state, group))

    def note_source(self, weight: Tensor) -> None:
        """Remember some values of the weight that the method's tensors belong to."""
        self._source = None
        method = self.method
        if method.reads_initial_weights and method.schedule.start == 0 and not weight.is_meta:
            self._source = some_values(weight), self._versions()

    def lost_source(self, weight: Tensor) -> Tensor | None:
        """Return whether the weight was written since, and the method's tensors were not.

        A 0-d bool tensor, so that all layers are read in one wait; None: nothing is known.
        """
        if self._source is None or self.rows.is_sharded:
            return None
        values, versions = self._source
        if versions != self._versions():
            return None
        return (values.to(weight) != some_values(weight)).any()

    def _versions(self) -> list[int]:
        tensors = [getattr(self.state, name) for name in self.state.method_tensors]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    @torch.no_grad()
    def reset(self, weight: Tensor) -> None:
        """Compute the method's tensors from initial weights; collective if sharded."""
        state = self.state
        master = widen(self.rows.gather(self.rows.local(weight).detach()))
        tensors = {PREVIOUS_MASK: pack_rows(torch.zeros_like(master, dtype=torch.bool))}
        for key, value in (tensors | self.method.initial_state(master, state)).items():
            if getattr(state, key).is_meta:  # a dense state dict was assigned to a model on meta
                kind: Any = state._parameters if key in state._parameters else state._buffers
                kind[key] = value
            else:
                self.rows.write(state, key, value)
        self.initialized = True
        if self.method.schedule.start == 0:
            self.update(weight)
        self.note_source(weight)
        self.moved(state.previous_mask.device)

    @torch.no_grad()
    def mask(self, weight: Tensor) -> Tensor:
        """Return the mask of the projection, or the one the method would choose; may be packed."""
        mask = self.method.kept_mask(self.state) if self._kept_mask is None else self._kept_mask
        mask = self.project(weight).mask if mask is None else mask
        if mask is not None:
            return mask

        def choose(master: Tensor, state: LayerState) -> Tensor:
            return self.method.mask(master, state.dim).bool()

        master = widen(self.rows.local(weight).detach())
        return self.rows.apply(choose, master, self.state, self._group(updating=False))

    def bool_mask(self, weight: Tensor) -> Tensor:
        """Return :meth:`mask`, unpacked."""
        return unpacked(self.mask(weight), self.rows.local(weight).shape)

    # Operands that are kept between forwards.

    def store_as(self, dtype: torch.dtype | None) -> None:
        """Keep operands of this dtype from the next projection on; None: keep none."""
        self.clear()
        self.stored_dtype = dtype
        self.choose_ways()

    def clear(self) -> None:
        """Drop all operands: the weight or the phase has changed."""
        self._kept = {}
        self._gathered_operand = None
        self._kept_mask = None

    def free_mask(self) -> None:
        """Free the mask of kept operands, which nothing reads before the next projection."""
        self._kept_mask = None

    def refresh(self, weight: Tensor) -> None:
        """Project a changed weight again if operands are kept, into the same memory.

        That allocates nothing, keeps the addresses that captured graphs read, and lets autograd
        notice a backward that still needs the operands of before.
        """
        earlier = None if self.rows.is_sharded else self._kept.get(True)
        self.clear()
        if self.stored_dtype is None or self.method.differentiable:
            return
        if self._projects(training=True) or self.matmuls.base.fprop.rounds:
            self._make(weight, self.stored_dtype, True, earlier)

    def moved(self, device: torch.device) -> None:
        """Choose matmuls for ``device`` and drop operands that lie elsewhere."""
        self.state.place_index(device)
        self.clear()
        self.matmuls = self.matmuls.on(device, sharded=self.rows.is_sharded)
        self.choose_ways()

    def try_matmuls(
        self, weight: Tensor, inputs: Sequence[int], dtype: torch.dtype, *, bias: bool
    ) -> None:
        """Try the matmuls with the first inputs, of shape (…, tokens of a sample, in_features)."""
        if self.matmuls.try_inputs(weight, inputs, dtype, bias=bias):
            self.choose_ways()
            self.refresh(weight)

    @torch.no_grad()
    def override_mask(self, weight: Tensor, mask: Tensor) -> None:
        """Let training forwards see the weight under ``mask``, until :meth:`refresh`.

        A method whose A(W) is no part of W is projected again and masked. One that trains under
        autograd applies no mask, and nothing changes.
        """
        if self.rows.is_sharded or self.stored_dtype is None:
            raise ConfigError("held masks need whole weights and a call of store_operands()")
        forward, new, *_ = self.project(weight, training=True)
        if forward is None or self.method.differentiable:
            return
        weight = self.rows.local(weight).detach()
        mask = self.rows.local(mask)
        if new is None:
            new = self.method.mask(widen(weight), self.state.dim)
        new = unpacked(new, weight.shape)
        wide = weight.to(forward.dtype)
        source = wide if torch.equal(forward[new], wide[new]) else forward
        masked = self._transposed(torch.where(mask, source, 0.0))
        base = self.matmuls.base
        self._kept[True] = base.prepare(masked, None, None, self.stored_dtype, self._kept.get(True))

    def _projects(self, training: bool) -> bool:
        phase = self.method.phase
        return phase.training if training else phase.evaluation

    @torch.no_grad()
    def _make(
        self, weight: Tensor, dtype: torch.dtype, training: bool, old: Operands | None = None
    ) -> Operands | None:
        """Project; operands of the stored dtype are kept, in the memory of ``old``."""
        matmuls = self.matmuls.now(dtype, training)
        with torch.inference_mode(False):  # a training forward may use it next
            self.state.out = self._memory(weight, dtype, old) if training else None
            try:
                forward, mask, backward, scale = self.project(weight, training)
            finally:
                self.state.out = None
            is_plain_cast = forward is None and not matmuls.fprop.rounds
            changes_inputs = training and not self.method.phase.row.keeps_inputs()
            operands = None  # the replaced class runs
            if not is_plain_cast or changes_inputs:
                forward = self.rows.local(weight).detach() if forward is None else forward
                a = self._transposed(forward)
                b = self._transposed(backward)
                operands = matmuls.prepare(a, b, scale, dtype, old)
        if self.stored_dtype == dtype and not torch.compiler.is_compiling():
            # flips compare masks of evaluation
            if training and not self.method.trains_another_weight:
                if mask is not None and mask.dtype == torch.bool:
                    mask = pack_rows(mask)
                self._kept_mask = mask
            # A plain cast is never kept: edits without refresh() would go unnoticed.
            if operands is None or not is_plain_cast:
                self._kept[training] = operands
        return operands

    def _memory(self, weight: Tensor, dtype: torch.dtype, old: Operands | None) -> Tensor | None:
        """Return memory for A(W) in the stored dtype: that of ``old``, or new memory."""
        if self.method.phase.row.A == W or self.matmuls.now(dtype, True).fprop.rounds:
            return None  # nothing is projected, or the result is rounded again
        if self.stored_dtype != dtype or self.rows.is_sharded or torch.compiler.is_compiling():
            return None
        weight = self.rows.local(weight)
        # a packed A may have the shape of the weight: 36 columns are padded to 64, packed to 36
        earlier = self._transposed(old.A.data) if old and old.A.kind == "dense" else None
        if earlier is None or (earlier.shape, earlier.dtype) != (weight.shape, dtype):
            return torch.empty_like(weight, dtype=dtype)
        return earlier

    @overload
    def _transposed(self, weight: Tensor) -> Tensor: ...
    @overload
    def _transposed(self, weight: None) -> None: ...
    def _transposed(self, weight: Tensor | None) -> Tensor | None:
        """Return a stored weight as (out_features, in_features), or the inverse."""
        return weight.t() if weight is not None and self.state.dim == 0 else weight

    # FSDP2 gathers operands instead of weights.

    @torch.no_grad()
    def to_gather(self, weight: Tensor, dtype: torch.dtype, training: bool) -> tuple[Tensor, ...]:
        """Return the own rows of (A,), or (A, B) if the method has two weights, for FSDP.

        They are in ``dtype``, laid out as the stored weight.
        """
        key = self._key(training)
        if self.stored_dtype != dtype:  # sharded layers always store, in the dtype of FSDP
            self.stored_dtype = dtype
            self._kept = {}
        self._gathered_operand = self._gathers(training)
        kept = None
        if not self._differentiates(key):
            kept = self._kept.get(key) or self._make(weight, dtype, key)
        if kept is None:
            parts = [self.rows.local(weight).detach().to(dtype)]
        else:
            parts = [self._transposed(part.data) for part in (kept.A, kept.B) if part is not None]
        two = self.method.sparse_row.has_two_weights()
        if len(parts) > 1 and not two:
            raise ConfigError(
                f"method {self.method.options.name} returns a backward weight: under FSDP its "
                "sparse_row must have a B of its own"
            )
        return (parts[0], parts[-1]) if two else (parts[0],)

    def take(self, gathered: tuple[Tensor, ...]) -> Tensor:
        """Keep B of the gathered operands and return A, which becomes the unsharded weight."""
        self._gathered_b = gathered[1] if len(gathered) > 1 else None
        return gathered[0]

    def _gathers(self, training: bool) -> Gathered:
        """Return what FSDP gathers for forwards in this mode."""
        if not self._projects(training) or self._differentiates(training):
            return "W"
        return "drawn A" if training and self.method.trains_another_weight else "A"

    def is_stale(self, training: bool) -> bool:
        """Return True if FSDP has to gather again before a forward in this mode."""
        if not self.rows.is_sharded:
            return False
        return self._gathered_operand != self._gathers(training)

    def _require_fresh(self, *, training: bool) -> None:
        if self.is_stale(training):
            raise ConfigError(
                f"layer {self.state.layer_name!r} sees what was gathered in another phase, or from "
                "weights that have changed since: call reshard() on the modules of FSDP, or run "
                "the module that was given to sparsify"
            )

    def _gathered(self, gathered_a: Tensor, dtype: torch.dtype, training: bool) -> Operands | None:
        """Return the gathered operands in ``dtype``; None: the replaced class runs on A."""
        self.rows.local(gathered_a)  # refuses a model that is not attached
        self._require_fresh(training=training)
        kept = self._kept.get(self._key(training))
        scale = None if kept is None else kept.wgrad_scale
        two = self._gathered_operand != "W" and self.method.sparse_row.has_two_weights()
        changes_inputs = training and not self.method.phase.row.keeps_inputs()
        if not two and scale is None and not changes_inputs:
            return None
        backward = None
        if two:
            assert self._gathered_b is not None
            part = self._gathered_b[: gathered_a.shape[0]]
            backward = Prepared("dense", self._transposed(part.to(dtype)))
        forward = Prepared("dense", self._transposed(gathered_a.detach().to(dtype)))
        return Operands(forward, backward, scale)
