"""Make the operands A and B of one layer, and keep them until the weight changes."""

from __future__ import annotations

from typing import Any, Protocol, overload

import torch
from torch import Tensor

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import pack_rows
from sparsepretrain.kernels.common import widen
from sparsepretrain.sparsity.backend import LayerProducts
from sparsepretrain.sparsity.method import Method, Projection
from sparsepretrain.sparsity.model_state import ModelState
from sparsepretrain.sparsity.operand_table import W
from sparsepretrain.sparsity.products import Operands, Prepared
from sparsepretrain.sparsity.rows import Rows


class ProjectingLayer(Protocol):
    """State of a layer, as far as the cache reads it."""

    model: ModelState
    method: Method
    layer_name: str
    dim: int
    rows: Rows
    products: LayerProducts

    def project(self, weight: Tensor, training: bool = False, *, graph: bool = False) -> Projection:
        """Return the projection for evaluation or training."""


class OperandCache:
    """Operands of one layer, one set for training and one for evaluation.

    By default operands are made in every forward. They are kept after ``store_operands``, and under
    FSDP for the rows of this rank; the weight that a forward sees is then the gathered A.
    """

    store: torch.dtype | None = None
    """Dtype of stored operands; None: they are made in every forward."""
    mask: Tensor | None = None
    """Mask of the kept training operands: bool, or packed by rows."""
    out: Tensor | None = None
    """Memory for A while the method projects."""
    _kept: dict[bool, Operands | None]  # key: training (True) or evaluation (False)
    _gathered_sparse: bool | None
    """True if A was gathered last, False if W was; None: neither is up to date."""

    def __init__(self, layer: ProjectingLayer) -> None:
        self.layer = layer
        self._backward: Tensor | None = None  # B, as it was gathered
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, which do not store operands."""
        # a copy (an average of weights) is edited without the hooks that refresh operands
        return self.__dict__ | {"_kept": {}, "mask": None, "store": None}

    def clear(self) -> None:
        """Drop all operands: the weight or the phase has changed."""
        self._kept, self._gathered_sparse, self.mask = {}, None, None

    def refresh(self, weight: Tensor) -> None:
        """Project a changed weight again if operands are kept, into the same memory.

        That allocates nothing, keeps the addresses that captured graphs read, and lets autograd
        notice a backward that still needs the operands of before.
        """
        earlier, store, layer = self._kept.get(True), self.store, self.layer
        self.clear()
        if not (store is None or layer.method.differentiable or self._is_plain(store, True)):
            self._make(weight, store, True, None if layer.rows.is_sharded else earlier)

    def operands(self, weight: Tensor, dtype: torch.dtype, training: bool) -> Operands | None:
        """Return A and B in ``dtype``; None: the layer runs the class that it replaces."""
        if self.layer.rows.is_sharded:
            return self._gathered(weight, dtype, training)
        training = self.uses_training_set(training)
        if self._is_plain(dtype, training):
            return None
        if training in self._kept and self.store == dtype:
            return self._kept[training]
        return self._make(weight, dtype, training)

    def differentiable(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Operands]:
        """Project under autograd; return A, which receives dA, and operands made from its values.

        Nothing is kept: the graph belongs to one forward.
        """
        layer = self.layer
        forward, _, backward, _ = layer.project(weight, True, graph=torch.is_grad_enabled())
        assert forward is not None, "a differentiable method returns A"
        a = self._transposed(forward.detach())
        b = None if backward is None else self._transposed(backward.detach())
        return forward, layer.products.now(dtype, True).prepare(a, b, None, dtype)

    def uses_training_set(self, training: bool) -> bool:
        """Return True for training, and for evaluation if it uses the same operands."""
        layer, phase = self.layer, self.layer.method.phase
        same = phase.training == phase.evaluation and not layer.products.packs
        return training or (same and layer.model.precision is None)

    def _is_plain(self, dtype: torch.dtype, training: bool) -> bool:
        """Return True if matmuls see W itself: nothing is projected, rounded or kept."""
        products = self.layer.products.now(dtype, training)
        return not self._is_sparse(training) and not products.fprop.rounds

    def _is_sparse(self, training: bool) -> bool:
        phase = self.layer.method.phase
        return phase.training if training else phase.evaluation

    @torch.no_grad()
    def _make(
        self, weight: Tensor, dtype: torch.dtype, training: bool, old: Operands | None = None
    ) -> Operands | None:
        """Project; operands of the stored dtype are kept, in the memory of ``old``."""
        layer, store = self.layer, self.store
        products = layer.products.now(dtype, training)
        with torch.inference_mode(False):  # a training forward may use it next
            self.out = self._memory(weight, dtype, old) if training else None
            try:
                forward, mask, backward, scale = layer.project(weight, training)
            finally:
                self.out = None
            only_cast, operands = forward is None and not products.fprop.rounds, None
            if not only_cast or (training and not layer.method.phase.row.keeps_inputs()):
                forward = layer.rows.local(weight).detach() if forward is None else forward
                weights = self._transposed(forward), self._transposed(backward)
                operands = products.prepare(*weights, scale, dtype, old)
        if store == dtype and not torch.compiler.is_compiling():
            if training:
                unpacked = mask is not None and mask.dtype == torch.bool
                self.mask = pack_rows(mask) if mask is not None and unpacked else mask
            # a weight that is only cast is not kept: the cast of an edited one is always right
            if operands is None or not only_cast:
                self._kept[training] = operands
        return operands

    def _memory(self, weight: Tensor, dtype: torch.dtype, old: Operands | None) -> Tensor | None:
        """Return memory for A(W) in the stored dtype: that of ``old``, or new memory."""
        layer = self.layer
        if layer.method.phase.row.A == W or layer.products.now(dtype, True).fprop.rounds:
            return None  # nothing is projected, or the result is rounded again
        if self.store != dtype or layer.rows.is_sharded or torch.compiler.is_compiling():
            return None
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
        return weight.t() if weight is not None and self.layer.dim == 0 else weight

    @torch.no_grad()
    def hold(self, weight: Tensor, mask: Tensor) -> None:
        """Let training forwards see the weight under ``mask``, until :meth:`refresh`.

        A method whose A(W) is no part of W is projected again and masked.
        """
        layer, store = self.layer, self.store
        if layer.rows.is_sharded or store is None:
            raise ConfigError("held masks need whole weights and a call of store_operands()")
        forward, new, *_ = layer.project(weight, training=True)
        if forward is None:
            return
        new = layer.method.mask(widen(weight.detach()), layer.dim) if new is None else new
        wide = weight.detach().to(forward.dtype)
        source = wide if torch.equal(forward[new], wide[new]) else forward
        held = self._transposed(torch.where(mask, source, 0.0))
        base = layer.products.base
        self._kept[True] = base.prepare(held, None, None, store, self._kept.get(True))

    # FSDP2 gathers operands instead of weights.

    @torch.no_grad()
    def to_gather(self, weight: Tensor, dtype: torch.dtype, training: bool) -> tuple[Tensor, ...]:
        """Return the own rows of (A,), or (A, B) if the method has two weights, for FSDP.

        They are in ``dtype``, laid out as the stored weight.
        """
        layer, training = self.layer, self.uses_training_set(training)
        if self.store != dtype:  # `store_operands` named another one, or was not called
            self.store, self._kept = dtype, {}
        self._gathered_sparse = self._is_sparse(training)
        kept = self._kept.get(training) or self._make(weight, dtype, training)
        if kept is None:
            parts = [layer.rows.local(weight).detach().to(dtype)]
        else:
            parts = [self._transposed(part.data) for part in (kept.A, kept.B) if part is not None]
        two = layer.method.sparse_row.has_two_weights()
        if len(parts) > 1 and not two:
            raise ConfigError(
                f"method {layer.method.options.name} returns a backward weight: under FSDP its "
                "sparse_row must have a B of its own"
            )
        return (parts[0], parts[-1]) if two else (parts[0],)

    def take(self, gathered: tuple[Tensor, ...]) -> Tensor:
        """Keep B of the gathered operands and return A, which becomes the unsharded weight."""
        self._backward = gathered[1] if len(gathered) > 1 else None
        return gathered[0]

    def is_stale(self, training: bool) -> bool:
        """Return True if FSDP has to gather again before a forward in this mode."""
        return self.layer.rows.is_sharded and self._gathered_sparse is not self._is_sparse(training)

    def _gathered(self, weight: Tensor, dtype: torch.dtype, training: bool) -> Operands | None:
        """Return the gathered operands in ``dtype``; None: the gathered weight is all it takes."""
        layer, method = self.layer, self.layer.method
        layer.rows.local(weight)  # refuses a model that is not attached
        if self.is_stale(training):
            raise ConfigError(
                f"layer {layer.layer_name!r} sees what was gathered in another phase, or from "
                "weights that have changed since: call reshard() on the modules of FSDP, or run "
                "the module that was given to sparsify"
            )
        kept = self._kept.get(self.uses_training_set(training))
        scale = None if kept is None else kept.wgrad_scale
        two = self._gathered_sparse and method.sparse_row.has_two_weights()
        if not two and scale is None and not (training and not method.phase.row.keeps_inputs()):
            return None
        backward = None
        if two:
            assert self._backward is not None
            part = self._backward[: weight.shape[0]]
            backward = Prepared("dense", self._transposed(part.to(dtype)))
        forward = Prepared("dense", self._transposed(weight.detach().to(dtype)))
        return Operands(forward, backward, scale)
