"""Handle to a sparse model: attach it to an optimizer, measure, save its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.sparsity import attachments
from sparsepretrain.sparsity.coverage import Coverage, Proof, count_weights, cover, nm_holds
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK
from sparsepretrain.sparsity.layers import SparseLayer, refuse_sharded
from sparsepretrain.sparsity.method import Method, title
from sparsepretrain.sparsity.metrics import measure
from sparsepretrain.sparsity.model_state import ModelState
from sparsepretrain.sparsity.rows import Rows
from sparsepretrain.sparsity.steps import Steps


class Sparsifier:
    """Handle that :func:`sparsepretrain.sparsify` and :func:`sparsepretrain.sparsifier_of` return.

    All numbers are in the model's state dict; several handles to a model share them. ``layers``:
    name -> sparse layer, in the model's order.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.layers: dict[str, SparseLayer] = {
            layer.sparsity.layer_name: layer
            for layer in state.root.modules()
            if isinstance(layer, SparseLayer) and layer.sparsity.model is state
        }
        self.steps = Steps(state, self.layers)

    def __repr__(self) -> str:
        words = [title(self.method), f"{len(self.layers)} layers", self._state.label]
        words += [f"step {self.completed_steps}", "densified" * self._densified]
        return f"Sparsifier({', '.join(filter(None, words))})"

    @property
    def method(self) -> Method:
        """Method in its present phase."""
        self._state.sync()
        return self._state.method

    @property
    def refreshed(self) -> bool:
        """True if masks that are used for several steps were compared after the last step."""
        return self.method.schedule.refresh > 1 and self._state.compared_at == self.completed_steps

    @property
    def flips(self) -> Tensor | None:
        """Flips counted after the last step, (layers,) int64 on the device; None: not compared.

        Collective where the model is sharded.
        """
        compared = self._state.compared_at == self.completed_steps
        flips = self._state.flips if compared else None
        return None if flips is None else self._rows.total(flips.counts.clone())

    @property
    def completed_steps(self) -> int:
        """Optimizer steps since sparsify, resumed ones included."""
        self._state.sync()
        return self._state.step

    @property
    def decay(self) -> float:
        """Factor λ of the masked decay that the next step applies; 0: no decay."""
        return self.steps.decay

    @property
    def sparse(self) -> bool:
        """True if the next step trains with N:M operands."""
        return bool(self.method.phase.row.sparse)

    def attach(self, optimizer: Any) -> None:
        """Attach to ``optimizer``: J before its step; counters, operands and flips after it.

        Wrappers that expose ``.optimizer`` (Accelerate, Lightning) are unwrapped. Keeps the masks
        that the first flip rate is measured against.

        Raises:
            ConfigError: attached already, not an optimizer, a sparse weight is missing in it, or
                the model was sharded without :meth:`prepare_sharding`, or prepared and not sharded.
        """
        self._require_sparse()
        if attachments.attached_optimizer(self._state):
            raise ConfigError("the sparsifier is attached already: call detach() first")
        if self._rows.is_sharded:
            self._bind_shards()
        else:
            refuse_sharded(self.layers)
        while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
            kind, outer = type(optimizer).__name__, optimizer
            optimizer = getattr(outer, "optimizer", None)
            if optimizer is None or optimizer is outer:
                raise ConfigError(f"attach needs a torch optimizer, got {kind}")
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        weights = {name: layer.weight for name, layer in self.layers.items()}
        own = {
            f"{name}.sparsity.{key}": parameter
            for name, layer in self.layers.items()
            for key, parameter in layer.sparsity.named_parameters()
        }
        trained = (weights | own).items()
        missing = [name for name, p in trained if p.requires_grad and id(p) not in held]
        if missing:
            late = ": build the optimizer after sparsify" * (set(missing) <= set(own))
            if self._rows.is_sharded:
                late = ": build the optimizer after fully_shard"
            text = f"sparse weights missing in the optimizer: {', '.join(missing)}"
            raise ConfigError(text + late)
        if (mark := getattr(optimizer, "mark_sparse", None)) is not None:
            mark(weights.values())
        self.method.read_optimizer(optimizer)
        self._state.write()
        attachments.attach(self._state, optimizer, self.steps.before, self.steps.after)
        self._state.baseline_due = self.completed_steps == 0
        self.steps.take_baseline()

    def prepare_sharding(self) -> None:
        """Let FSDP2 gather operands in the dtype of the matmuls; call this before ``fully_shard``.

        The order is ``sparsify``, ``prepare_sharding``, ``fully_shard`` of blocks and then of the
        model, the optimizer, :meth:`attach`. Sparse weights become other Parameters of the same
        values. From :meth:`attach` on, each rank projects its rows once per step, so
        :meth:`refresh` is needed after weights were edited by hand; :meth:`metrics`,
        :meth:`masks`, ``prove`` and evaluation are collective.

        Raises:
            ConfigError: prepared, attached or sharded already; fp8 or sparse matmuls.
        """
        from sparsepretrain.sparsity import sharding

        self._require_sparse()
        if self._rows.is_sharded or attachments.attached_optimizer(self._state):
            done = "prepared for sharding" if self._rows.is_sharded else "attached"
            raise ConfigError(f"the sparsifier is {done} already: the order is {sharding.ORDER}")
        if self._state.precision is not None:
            name = self._state.label.partition(" ")[0]
            raise ConfigError(f"{name} does not go with sharding: leave precision out")
        method = (
            self._state.method
        )  # not synced: counters of a model from the meta device are empty
        if method.differentiable:
            raise ConfigError(
                f"{method.options.name} does not go with sharding: FSDP gathers A(W) without "
                "the graph of its projection; use DistributedDataParallel"
            )
        backend = self._state.backend
        if backend is not None and backend.name != "auto":
            raise ConfigError(
                f"backend={backend.name} does not go with sharding: use auto or emulate"
            )
        sharding.prepare(self.layers)
        for layer in self.layers.values():
            layer.sparsity.rows = sharding.PreparedRows()
            layer.sparsity.choose_products(layer.weight.device)

    def _bind_shards(self) -> None:
        """Find the rows of each layer after ``fully_shard``, and shard its buffers."""
        from sparsepretrain.sparsity import sharding

        found = sharding.shard_rows(self.layers)
        for name, layer in self.layers.items():
            own = layer.sparsity
            if isinstance(own.rows, sharding.ShardedRows):
                continue
            own.rows = found[name]
            found[name].shard_buffers(own, PREVIOUS_MASK)
            own.cache.clear()
            if own.reset_due:
                own.reset_due = False
                own.reset(layer.weight)
        # run before the hooks of FSDP, which gather
        hooks: Any = self._state.root._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if hook == self._state.before_forward]:
            hooks.move_to_end(key, last=False)

    @property
    def _rows(self) -> Rows:
        """Rows of a layer; all layers are sharded, or none is."""
        return next(iter(self.layers.values())).sparsity.rows

    def reset(self) -> None:
        """Restart from the present weights: frozen scales, fixed masks, counters, flip baseline.

        Needed if weights were initialized after :func:`sparsify`: by ``reset_parameters`` after the
        meta device, or by hand. Loading a dense state dict before the first step resets the model
        too. Collective if the model is sharded.

        Raises:
            ConfigError: densified, or prepared for sharding and not attached.
        """
        self._require_sparse()
        self._state.reset()
        for layer in self.layers.values():
            layer.sparsity.reset(layer.weight)
        self.refresh()

    def detach(self) -> None:
        """Undo :meth:`attach`; the layers stay sparse."""
        attachments.detach(self._state)

    def store_operands(self, dtype: torch.dtype | None = None) -> None:
        """Project once per optimizer step instead of in every forward.

        Call :meth:`refresh` after weights were edited between steps (averaged, merged, loaded).
        Operands of training are made after each step in the same memory, operands of evaluation
        when needed. Copies of the model project in every forward again.

        Args:
            dtype: of the matmuls: under autocast the dtype of autocast, else stored operands are
                not used; None: dtype of the weights.

        Raises:
            ConfigError: layers cannot multiply in ``dtype``.
        """
        self._require_sparse()
        weight, state = next(iter(self.layers.values())).weight, self._state
        if dtype not in (None, torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"store_operands: dtype must be fp64, fp32, bf16 or fp16, got {dtype}"
            )
        dtype = dtype or weight.dtype
        if state.backend is not None and not weight.is_meta:
            state.backend.require_here(weight.device, dtype, state.precision)
        for layer in self.layers.values():
            layer.sparsity.cache.store = dtype
        self.refresh()

    def choose_products(self, inputs: Mapping[str, Sequence[int]], micro_batches: int = 1) -> None:
        """Choose the sparse matmuls of each layer now, instead of in its first forward.

        For compiled models: graphs do not try products. Call :meth:`store_operands` first.

        Args:
            inputs: name of a layer -> shape of its input in a micro-batch, (…, in_features); other
                names are ignored.
            micro_batches: number per step and rank. They share packed weights, so ``auto`` divides
                the time of packing by it.

        Raises:
            ConfigError: a sparse layer is missing.
        """
        if missing := [name for name in self.layers if name not in inputs]:
            raise ConfigError(f"choose_products: no shape for {', '.join(missing)}")
        if self._state.backend is not None:
            self._state.backend.micro_batches = micro_batches
        for name, layer in self.layers.items():
            own = layer.sparsity
            own.try_products(
                layer.weight,
                inputs[name],
                own.cache.store or layer.weight.dtype,
                bias=layer.bias is not None,
            )

    @property
    def backend(self) -> dict[str, Any]:
        """Chosen sparse matmuls in words, and ``products``: the trials, a row per layer size.

        Durations are medians in seconds. Empty with ``backend="emulate"``.
        """
        backend = self._state.backend
        if backend is None:
            return {}
        return {"name": backend.name, "chosen": self.coverage().chosen, "products": backend.table()}

    def micro_batch(self, index: int, rank: int = 0, world: int = 1, *, capacity: int = 0) -> None:
        """Set the micro-batch of the global batch that the next forward sees: index·world + rank.

        Without this call, training forwards since the last step are counted, on the rank that
        torch.distributed reports.

        Args:
            index: micro-batch of this rank within the optimizer step, from 0.
            rank, world: of the data-parallel group.
            capacity: largest number of padded tokens in a micro-batch; 0: all have equally many.
        """
        self._state.micro_batches.state(index * world + rank, capacity)

    def hold(self, masks: Mapping[str, Tensor]) -> None:
        """Let training forwards see the present weights under older ``masks``, for probes.

        Needs stored operands. Call :meth:`refresh` before the next step.
        """
        self._state.sync()
        for name, layer in self.layers.items():
            layer.sparsity.cache.hold(layer.weight, masks[name])

    def refresh(self) -> None:
        """Project again where operands are stored; call this after changing weights by hand."""
        self._require_sparse()
        self.steps.refresh()

    def masks(self) -> dict[str, Tensor]:
        """Return name -> bool mask in use, shape of the stored weight.

        S-STE: non-zeros of S(W). Dense methods and phases: the mask that the rule would choose.
        """
        self._require_sparse()
        masks = {}
        for name, layer in self.layers.items():
            own = layer.sparsity
            masks[name] = own.rows.gather(own.mask_in_use(layer.weight)).clone()
        return masks

    def metrics(self, *, per_layer: bool = False) -> dict[str, float]:
        """Return numbers of the current weights; waits for the device.

        ``flip_rate``: flips at the last comparison over all entries of the sparse weights
        (arXiv:2404.01847 section 4), left out before the first one and at steps without one.
        ``flip_interval``: steps between the two masks compared, left out when it is 1.
        ``density``: non-zeros of the forward weights. ``l1_gap``: mean over groups of
        |t3| - |t2|, the distance of a mask from its next best. ``sparse``: 1 when the next step
        trains sparse, 0 when it trains dense. A method may add its own (:meth:`Method.metrics`).

        Args:
            per_layer: also ``flip_rate/<layer>`` and ``l1_gap/<layer>``.
        """
        return self.metrics_with(None, per_layer=per_layer)[0]

    def metrics_with(
        self, counts: Tensor | None, *, per_layer: bool = False
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Return :meth:`metrics`, and the integers ``counts`` (k, layers) as lists, in one wait."""
        self._require_sparse()
        return measure(self.layers, self._state, self.flips, counts, per_layer=per_layer)

    def coverage(self) -> Coverage:
        """Return the report of sparse layers and their operands."""
        self._require_sparse()
        return cover(self.layers, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the method's scalars, which are in the model's state dict too."""
        options = self.method.options
        return {
            "method": options.name,
            "pattern": [options.n, options.m],
            "layers": list(self.layers),
            "completed_steps": self.completed_steps,
            "compared_at": self._state.compared_at,
            **self.method.scalars,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counters and scalars; load the model's state dict first.

        Raises:
            CheckpointError: saved with another method, pattern or set of layers.
        """
        mine = self.state_dict()
        for key in ("method", "pattern", "layers"):
            if state.get(key) != mine[key]:
                text = f"{key} is {state.get(key)}, this model has {mine[key]}"
                raise CheckpointError(f"sparsifier state: {text}")
        own = self._state
        own.compared_at, own.flips = int(state["compared_at"]), None
        own.method.scalars = {key: int(state[key]) for key in own.method.scalars}
        own.set_step(int(state["completed_steps"]))
        self.refresh()

    @property
    def _densified(self) -> bool:
        own = (getattr(layer, "sparsity", None) for layer in self.layers.values())
        return any(state is None or state.model is not self._state for state in own)

    def _require_sparse(self) -> None:
        if self._densified:
            raise ConfigError("the model was densified: call sparsify again for a new sparsifier")
        present = set(self._state.root.modules())
        gone = [name for name, layer in self.layers.items() if layer not in present]
        if gone:
            raise ConfigError(
                f"sparse layers were replaced by others since: {', '.join(gone)}; "
                "sparsifier_of(model) is a handle to those that are left"
            )


@torch.no_grad()
def prove(sparsifier: Sparsifier) -> Proof:
    """Count non-zeros per group of M along in_features in every forward weight."""
    (n, m), phase = sparsifier.method.pattern, sparsifier.method.phase
    why = "" if phase.evaluation else phase.why
    proof = Proof(pattern=f"{n}:{m}", sparse=False, why_dense=why)
    found = {}
    for name, layer in sparsifier.layers.items():
        weight = layer.sparsity.project(layer.weight).forward
        if weight is None:
            continue
        weight = layer.sparsity.rows.gather(weight)
        holds = nm_holds(weight, n, m, layer.sparsity.dim)
        found[name] = torch.stack([holds.long(), (weight == 0).sum()])
        proof.groups += weight.numel() // m
        proof.entries += weight.numel()
    if found:
        proof.sparse = True
        proof.multiplied = count_weights(sparsifier._state.root).multiplied
        rows = dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))
        proof.violations = tuple(name for name, (right, _) in rows.items() if not right)
        proof.zeros = sum(zeros for _, zeros in rows.values())
    return proof
