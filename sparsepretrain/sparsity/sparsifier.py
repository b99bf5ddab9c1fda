"""Handle to a sparse model: attaches to the optimizer, measures, saves counters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.kernels import nonzeros_per_group, pack_rows
from sparsepretrain.sparsity.adapters import mask_adapters as mask_adapters_of
from sparsepretrain.sparsity.coverage import Coverage, Proof, cover, prove
from sparsepretrain.sparsity.engine.attachments import holder_of
from sparsepretrain.sparsity.engine.layers import SparseLayer
from sparsepretrain.sparsity.engine.model_state import BUFFERS, ModelState
from sparsepretrain.sparsity.engine.sharing import require_unshared
from sparsepretrain.sparsity.engine.steps import (
    Steps,
    require_class,
    require_known,
    require_own_weights,
    require_present,
    require_rates,
)
from sparsepretrain.sparsity.engine.weights import SparseWeight, is_dtensor
from sparsepretrain.sparsity.fsdp.rows import Rows
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import Method, identity
from sparsepretrain.sparsity.metrics import measure
from sparsepretrain.sparsity.patterns import Pattern, texts_of
from sparsepretrain.sparsity.selection import refuse_sharded


def dense_weight(layer: SparseWeight, *, full: bool = True) -> Tensor:
    """Return the weight of evaluation, laid out as stored; ``full``: whole, else a DTensor."""
    operands = layer.operands
    rows = operands.rows
    forward = operands.project(layer.weight).forward
    weight = rows.local(layer.weight).detach() if forward is None else forward
    weight = weight.to(layer.weight.dtype)
    residual = residual_weight(layer)
    if residual is not None:
        weight = weight + rows.own_rows(residual)
    return rows.stored(rows.gather(weight)) if full else rows.wrap(rows.stored(weight))


def residual_weight(layer: SparseWeight) -> Tensor | None:
    """Return the method's residual (low-rank adapters) as a weight laid out like the layer's."""
    state = layer.sparsity
    shape = state.shape
    if len(shape) != 2:
        return None
    identity = torch.eye(shape[state.dim], dtype=layer.weight.dtype, device=layer.weight.device)
    residual = layer.operands.method.residual(identity, cast(LayerState, _Gathered(state)))
    return residual.t() if residual is not None and state.dim == 1 else residual


def _added_to(model: nn.Module) -> tuple[str, ...]:
    """Return beginnings of the keys that ``sparsify`` added to the state dict of a model."""
    keys = []
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if isinstance(module, SparseWeight):
            keys.append(f"{prefix}sparsity.")
        keys += [f"{prefix}{key}" for key in module._buffers if key.startswith(BUFFERS)]
    return tuple(keys)


class _Gathered:
    """State of a layer whose Parameters are gathered when they are read, if FSDP shards them."""

    def __init__(self, state: LayerState) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        return value.full_tensor() if is_dtensor(value) else value


class Sparsifier:
    """Handle to a sparse model; returned by :func:`sparsepretrain.sparsify` and ``sparsifier_of``.

    All counters are in the model's state dict; several handles to one model share them. ``layers``
    maps names to sparse layers, in the model's order.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.layers: dict[str, SparseWeight] = {
            layer.sparsity.layer_name: layer
            for layer in state.root.modules()
            if isinstance(layer, SparseWeight) and layer.sparse_model is state
        }
        self.steps = Steps(state, self.layers)

    def __repr__(self) -> str:
        words = [self._state.title, f"{len(self.layers)} layers"]
        if self._state.label:
            words.append(self._state.label)
        words.append(f"step {self.completed_steps}")
        if self._densified:
            words.append("densified")
        return f"Sparsifier({', '.join(words)})"

    @property
    def method(self) -> Method:
        """Method, with its current phase; with several patterns that of the first layer."""
        self._state.sync()
        return self._state.method

    @property
    def title(self) -> str:
        """Name and patterns, such as ``srste 2:4`` or ``srste 1:4+2:4``."""
        return self._state.title

    @property
    def methods(self) -> list[Method]:
        """Methods of the layers, one for each pattern, alike except for n and m."""
        self._state.sync()
        return list(self._state.methods)

    @property
    def patterns(self) -> dict[str, Pattern]:
        """Layer -> (N, M) of its current masks."""
        self._state.sync()
        return {name: layer.operands.method.pattern for name, layer in self.layers.items()}

    @property
    def refreshed(self) -> bool:
        """True if the last step updated masks that the method keeps for several steps."""
        return self.method.schedule.refresh > 1 and self._state.compared_at == self.completed_steps

    @property
    def flips(self) -> Tensor | None:
        """Mask flips of each layer at the last step, (layers,) int64 on the device.

        None if no masks were compared at that step. Collective if the model is sharded.
        """
        compared = self._state.compared_at == self.completed_steps
        flips = self._state.flips if compared else None
        # a copy, because the all-reduce works in place and this may be read twice
        return None if flips is None else self._rows.total(flips.clone())

    @property
    def slice_flips(self) -> dict[str, Tensor]:
        """Mask flips of the slices of each bank at the last step: name -> (slices,) int64.

        Collective if the model is sharded.
        """
        if self._state.compared_at != self.completed_steps:
            return {}
        flips = self._state.slice_flips.items()
        return {name: self.layers[name].operands.rows.gather(each) for name, each in flips}

    @property
    def completed_steps(self) -> int:
        """Optimizer steps since ``sparsify``, including those before a resume."""
        self._state.sync()
        return self._state.step

    @property
    def decay(self) -> float:
        """Factor λ of the masked decay that the next step applies; 0: no decay."""
        return self.steps.decay

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer that this model is attached to, or None."""
        return self._state.attachment.optimizer

    @property
    def sparse(self) -> bool:
        """True if the next step trains with N:M operands."""
        return bool(self.method.phase.row.sparse)

    def attach(
        self,
        optimizer: Any,
        *others: Any,
        only_finite: bool = False,
        mask_adapters: bool = True,
    ) -> None:
        """Register hooks on the step of the optimizer that holds the sparse weights.

        Before a step they change gradients (J); after it they update counters, masks and operands,
        and count flips. Wrappers that expose ``.optimizer`` (Accelerate, Lightning) are unwrapped,
        and of containers with ``.optimizers`` (torchtitan) the members are taken.
        Before the first step, the masks at this moment are the reference of the first flip rate; a
        resumed model brings its own. Counting flips projects every weight once per step, unless
        operands are stored. Attaching again to the same optimizer does nothing.

        Args:
            optimizer: an optimizer of the model.
            others: further optimizers of the model, such as Muon beside AdamW, in any order.
            only_finite: training ends with the first gradient that is not finite. Then
                ``found_inf`` of a fused optimizer is not read from the device after each step.
            mask_adapters: mask adapters of peft on sparse layers, so that they merge to N:M: see
                :func:`sparsepretrain.mask_adapters`. False: they stay dense branches.

        Raises:
            ConfigError: attached to another optimizer, not an optimizer, a sparse weight is
                missing or shared, sparse weights are in two optimizers, or the model was sharded
                without :meth:`prepare_sharding`, or prepared and not sharded.
        """
        self._require_sparse()
        attached = self._state.attachment.optimizer
        require_unshared(self._state.root, self.layers)
        require_known(self._state.root)
        if mask_adapters:
            mask_adapters_of(self._state.root)
        if attached is None and self._rows.is_sharded:
            from sparsepretrain.sparsity.engine import shard_setup

            shard_setup.bind(self._state, self.layers)
        elif attached is None:
            refuse_sharded(self.layers)
        hooked = holder_of(
            {name: layer.weight for name, layer in self.layers.items()},
            {
                f"{name}.sparsity.{key}": parameter
                for name, layer in self.layers.items()
                for key, parameter in layer.sparsity.named_parameters()
            },
            (optimizer, *others),
            sharded=self._rows.is_sharded,
        )
        if attached is hooked:
            return
        require_rates(self.method, self.layers, hooked)
        require_class(self.method, self.layers, hooked)
        if attached is not None:
            raise ConfigError(
                f"the sparsifier is attached to another {type(attached).__name__}: call detach() "
                "first"
            )
        mark = getattr(hooked, "mark_sparse", None)
        if mark is not None:  # StepAdamW treats sparse parameters differently
            mark([layer.weight for layer in self.layers.values()])
        self.method.read_optimizer(hooked)
        self._state.write()  # the optimizer may have changed scalars and phase
        self.hook(hooked, only_finite=only_finite)
        self._state.watches_reads = not (self._rows.is_sharded or self.steps.checked_first)
        self._state.baseline_due = self.completed_steps == 0
        self.steps.take_baseline()

    def hook(self, optimizer: Optimizer, *, only_finite: bool) -> None:
        """Register the hooks on the optimizer that holds the sparse weights, without checks."""
        steps = self.steps
        self._state.attachment.attach(
            optimizer,
            steps.before,
            steps.after,
            loaded=steps.optimizer_was_loaded if steps.follows_optimizer else None,
            only_finite=only_finite,
        )

    def prepare_sharding(self) -> None:
        """Let FSDP2 gather operands in the dtype of the matmuls; call this before ``fully_shard``.

        The order is ``sparsify``, ``prepare_sharding``, ``fully_shard`` of the blocks and then of
        the model, the optimizer, :meth:`attach`. Sparse weights are replaced by new Parameters with
        the same values. From :meth:`attach` on, each rank projects its rows once per step: call
        :meth:`refresh` after editing weights by hand. :meth:`metrics`, :meth:`masks`,
        :meth:`prove` and evaluation are then collective.

        Raises:
            ConfigError: already prepared, attached or sharded; fp8 or sparse matmuls.
        """
        from sparsepretrain.sparsity.engine import shard_setup  # half a second

        self._require_sparse()
        shard_setup.prepare(self._state, self.layers)

    @property
    def _rows(self) -> Rows:
        """Rows of a layer; all layers are sharded, or none is."""
        return next(iter(self.layers.values())).operands.rows

    def reset(self) -> None:
        """Recompute frozen scales, fixed masks and the flip baseline, and set counters to zero.

        Call this if weights were initialized after :func:`sparsify`, as by ``reset_parameters``.
        Loading a dense state dict before the first step does it too. Collective if sharded.

        Raises:
            ConfigError: the model was densified, or prepared for sharding and not attached.
        """
        self._require_sparse()
        self._state.reset()
        for layer in self.layers.values():
            layer.operands.reset(layer.weight)
        self._state.warn_of_remarks()
        self._state.baseline_due = True
        self.refresh()

    def keep_zeros(self) -> None:
        """Let the fixed masks keep exactly the present non-zeros, which may be fewer than N of M.

        For weights with more zeros than the pattern asks for, where choosing by magnitude would let
        some of them train: 1:4 weights under 2:4, or any zeros with n=4, m=4. Call this before
        :meth:`attach`; :meth:`reset` chooses by magnitude again.

        Raises:
            ConfigError: the method has no fixed mask (``asp`` with ``at=0``, ``slope``), or a group
                has more than N non-zeros.
        """
        self._require_sparse()
        self.keep_masks({name: layer.weight != 0 for name, layer in self.layers.items()})

    @torch.no_grad()
    def keep_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Let the fixed masks be these, such as masks from calibration data.

        A method that learns masks begins from them.

        Call this before :meth:`attach`; :meth:`reset` chooses by magnitude again.

        Args:
            masks: name of every sparse layer -> bool mask of the shape of the stored weight, with
                at most N of M kept, by the pattern of the layer; other names are ignored.

        Raises:
            ConfigError: the method has no fixed mask (``asp`` with ``at=0``, ``slope``), a mask is
                missing or has another shape, or a group keeps more than N.
        """
        self._require_sparse()
        self.require_fixed_masks()
        full = []
        too_full: list[Pattern] = []
        for name, layer in self.layers.items():
            shape = tuple(layer.weight.shape)
            if name in masks and not isinstance(masks[name], Tensor):
                kind = type(masks[name]).__name__
                raise ConfigError(f"mask of {name}: expected a torch.Tensor, got {kind}")
            found = tuple(masks[name].shape) if name in masks else None
            if found != shape:
                raise ConfigError(f"mask of {name}: expected shape {shape}, got {found}")
            n, m = layer.operands.method.pattern
            matrix = layer.operands.rows.local(masks[name])
            nonzeros = nonzeros_per_group(matrix, m, dim=layer.in_dim)
            if count := int((nonzeros > n).sum()):
                full.append(f"{name} ({count:,} of {nonzeros.numel():,})")
                too_full.append((n, m))
        if full:
            more = f" and {len(full) - 3} more layers" if len(full) > 3 else ""
            limits = [text.replace(":", " of ") for text in texts_of(too_full)]
            raise ConfigError(
                f"groups with more than {' or '.join(limits)} non-zeros: {', '.join(full[:3])}"
                f"{more}: choose masks by magnitude, or another pattern (n=4, m=4 keeps any zeros)"
            )
        for name, layer in self.layers.items():
            mask = masks[name].to(layer.weight.device).bool().contiguous()
            layer.sparsity.mask.copy_(pack_rows(layer.operands.rows.local(mask)))
            layer.operands.method.begin_from_mask_(layer.sparsity)
            layer.operands.note_source(layer.weight)
        self._state.baseline_due = True
        self.refresh()

    def require_fixed_masks(self) -> None:
        """Raise ConfigError unless masks can be given to the method."""
        if not self.method.takes_masks:
            raise ConfigError(
                f"{self.method.options.name} has no mask that is fixed from the start: use asp "
                "with at=0, or slope with mask=magnitude, and no window.start; or maskllm or "
                "maskpro, which begin from it"
            )

    def detach(self) -> None:
        """Remove the hooks of :meth:`attach`; the layers stay sparse.

        Nothing refreshes stored operands from here on, so none are stored any more: every forward
        projects. A sharded model still stores them: call :meth:`refresh` after its weights changed.
        """
        self._state.attachment.detach()
        self.steps.end_watch()
        if not self._rows.is_sharded:
            for layer in self.layers.values():
                layer.operands.store_as(None)

    def store_operands(self, dtype: torch.dtype | None = None) -> None:
        """Cache operands: project once per optimizer step instead of in every forward.

        Training operands are rewritten in place after each step, evaluation operands computed on
        first use. Call :meth:`refresh` after editing weights. Copies of the model store none.

        Args:
            dtype: dtype of the matmuls, which is that of autocast where autocast is on. Forwards in
                another dtype project again. None: dtype of the weights.

        Raises:
            ConfigError: the layers have no matmul in ``dtype``.
        """
        self._require_sparse()
        weight = next(iter(self.layers.values())).weight
        state = self._state
        if dtype not in (None, torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"store_operands: dtype must be fp64, fp32, bf16 or fp16, got {dtype}"
            )
        dtype = dtype or weight.dtype
        if state.policy is not None and not weight.is_meta:
            state.policy.require_here(weight.device, dtype, state.precision)
        for layer in self.layers.values():
            layer.operands.store_as(dtype)
        self.refresh()

    def choose_matmuls(self, inputs: Mapping[str, Sequence[int]], micro_batches: int = 1) -> None:
        """Choose the sparse matmuls of each layer now, instead of in its first forward.

        Compiled graphs cannot time alternatives. Call :meth:`store_operands` first.

        Args:
            inputs: name of a layer -> shape of its input in a micro-batch, (…, in_features); other
                names are ignored.
            micro_batches: number per step and rank. Weights are packed once for all of them, so
                ``auto`` divides the time of packing by it.

        Raises:
            ConfigError: a sparse layer is missing.
        """
        layers = {k: layer for k, layer in self.layers.items() if isinstance(layer, SparseLayer)}
        if missing := [name for name in layers if name not in inputs]:
            raise ConfigError(f"choose_matmuls: no shape for {', '.join(missing)}")
        if self._state.policy is not None:
            self._state.policy.micro_batches = micro_batches
        for name, layer in layers.items():
            dtype = layer.operands.stored_dtype or layer.weight.dtype
            has_bias = layer.bias is not None
            layer.operands.try_matmuls(layer.weight, inputs[name], dtype, bias=has_bias)

    @property
    def backend(self) -> dict[str, Any]:
        """Name, chosen sparse matmuls in words, and ``matmuls``: median seconds by layer size.

        Empty with ``sparse_matmuls="emulate"``.
        """
        policy = self._state.policy
        if policy is None:
            return {}
        return {"name": policy.name, "chosen": self.coverage().chosen, "matmuls": policy.table()}

    def micro_batch(self, index: int, rank: int = 0, world: int = 1, *, capacity: int = 0) -> None:
        """Name the micro-batch that the next forward sees; random draws are keyed by its number.

        Its number is index·world + rank. Without this call, the index counts training forwards
        since the last step, and rank and world are those of torch.distributed.

        Args:
            index: micro-batch of this rank within the optimizer step, from 0.
            rank: rank in the data-parallel group.
            world: size of the data-parallel group.
            capacity: largest number of padded tokens of a micro-batch; 0: all have the same number.
        """
        self._state.micro_batches.set_index(index * world + rank, capacity)

    def policy_step(self, loss_of_batch: Callable[[], Tensor]) -> Tensor:
        """Compute the gradients of a method that learns from losses: ``maskpro``.

            for batch in batches:
                loss = sparsifier.policy_step(lambda: loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()

        The loss is computed twice, without gradients: with the masks that were drawn for this step
        and with those that training began from. Both see the same numbers of torch's generators.
        No backward is needed. With torch.distributed the mean over all processes is used.

        Args:
            loss_of_batch: runs the model in training mode; returns the mean loss of the batch of
                this process, 0-d. It may loop over micro-batches.

        Returns:
            The loss with the drawn masks, 0-d, without a graph.

        Raises:
            ConfigError: the method has gradients from a backward.
        """
        if not self.method.follows_policy:
            raise ConfigError(
                f"{self.method.options.name} learns from a backward: call loss.backward()"
            )
        device = self._state.root.get_buffer(self._state.buffer).device
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad():
            with torch.random.fork_rng(devices):
                loss = loss_of_batch()
            with self.first_masks():
                difference = loss.double() - loss_of_batch().double()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(difference)
                difference /= torch.distributed.get_world_size()
        self.follow_policy(difference)
        return loss

    @contextlib.contextmanager
    def first_masks(self) -> Iterator[None]:
        """Let training forwards use the masks that training began from, instead of drawn ones."""
        methods = self.methods
        try:
            for method in methods:
                method.uses_first_mask = True
            self.refresh()
            yield
        finally:
            for method in methods:
                method.uses_first_mask = False
            self.refresh()

    @torch.no_grad()
    def follow_policy(self, difference: Tensor, scale: float | Tensor = 1.0) -> None:
        """Set the gradients of :meth:`policy_step` from two losses; collective if sharded.

        Args:
            difference: loss with the drawn masks minus loss with the first ones, of the global
                batch; 0-d, fp64, equal on all ranks.
            scale: loss scale that the optimizer's step divides gradients by.
        """
        for layer in self.layers.values():
            method = layer.operands.method
            rows = layer.operands.rows
            logits = layer.sparsity.logits
            gradient = functools.partial(method.policy_gradient, difference=difference)
            own = rows.apply(gradient, rows.own_part(logits), layer.sparsity, None)
            assert own is not None, "a method that follows a policy returns a gradient"
            logits.grad = rows.wrap((own * scale).to(logits.dtype))

    def hold(self, masks: Mapping[str, Tensor]) -> None:
        """Apply ``masks`` instead of the current ones in training forwards; probes use this.

        Requires stored operands. Call :meth:`refresh` before the next step.
        """
        self._state.sync()
        for name, layer in self.layers.items():
            layer.operands.override_mask(layer.weight, masks[name])

    def refresh(self) -> None:
        """Recompute stored operands; call this after changing weights by hand."""
        self._require_sparse()
        self.steps.refresh()

    def masks(self) -> dict[str, Tensor]:
        """Return name -> current bool mask, of the shape of the stored weight.

        For S-STE the mask is the non-zeros of S(W). In dense methods and phases it is the mask that
        the method would choose.
        """
        self._require_sparse()
        self._state.sync(always=True)
        masks = {}
        for name, layer in self.layers.items():
            operands = layer.operands
            mask = operands.rows.gather(operands.bool_mask(layer.weight))
            masks[name] = operands.rows.stored(mask).clone()
        return masks

    def metrics(self, *, per_layer: bool = False) -> dict[str, float]:
        """Return metrics of the current weights; synchronizes with the device.

        ``flip_rate``: share of the entries of the sparse weights whose mask flipped at this step
        (arXiv:2404.01847 section 4); absent at steps at which no masks are compared.
        ``flip_interval``: optimizer steps between the two compared masks; absent if it is 1.
        ``density``: share of non-zeros in the forward weights. ``l1_gap``: mean over groups of
        |t3| - |t2|, the margin by which the mask was chosen. ``sparse``: 1 if the next step trains
        sparse, 0 if dense. ``masked_share``: share of Σ|W| in the entries that the end of the run
        prunes, of methods that train dense until then (CAST). A method may add metrics
        (:meth:`Method.metrics`).

        Args:
            per_layer: also ``flip_rate/<layer>`` and ``l1_gap/<layer>``, and of a bank
                ``flip_rate/<bank>/<slice>`` and ``density/<bank>/<slice>``.
        """
        self._state.sync(always=True)
        return self.metrics_with(None, per_layer=per_layer)[0]

    def metrics_with(
        self, counts: Tensor | None, *, per_layer: bool = False
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Return :meth:`metrics` and ``counts`` (k, layers) as lists, in one synchronization.

        Counters that were averaged through ``.data`` go unnoticed: this is for loops that do not.
        """
        self._require_sparse()
        self._state.sync()
        return measure(self.layers, self._state, self.flips, counts, per_layer=per_layer)

    @torch.no_grad()
    def dense_tensors(self, *, full: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of :meth:`dense_state_dict`, one at a time, for large models."""
        yield from self.dense_tensors_of(self._state.root, full=full)

    @torch.no_grad()
    def dense_tensors_of(
        self, model: nn.Module, *, full: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield :meth:`dense_tensors` under the names of a part or a container of the model."""
        self._require_sparse()
        self._state.sync(always=True)
        layers: dict[str, SparseWeight] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, SparseWeight):
                layers[module.weight_key(name)] = module
                module.sparse_model.sync(always=True)
        own = _added_to(model)
        for key, value in model.state_dict().items():
            if key.startswith(own):
                continue
            if key in layers:
                yield key, dense_weight(layers[key], full=full)
            else:
                yield key, value.full_tensor() if full and is_dtensor(value) else value

    def method_tensors_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what ``sparsify`` added to the state dict of the model, or of a container of it.

        Counters, masks, scales and adapters: what a host that saves a part of the model, such as
        the adapters of peft alone, has to save beside it.
        """
        own = _added_to(model)
        return {k: v for k, v in model.state_dict().items() if k.startswith(own)}

    def left_dense_in(self, model: nn.Module) -> list[str]:
        """Return the layers that ``patterns`` leaves dense, under the names of this model.

        ``model``: the one given to ``sparsify``, a part, or a container of it.
        """
        weights = dict(self._state.root.named_parameters(remove_duplicate=False))
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        left = self._state.dense_by_pattern
        named = [weights.get(f"{name}.weight", weights.get(name)) for name in left]
        return [own[id(w)].removesuffix(".weight") for w in named if id(w) in own]

    def dense_state_dict(self, *, full: bool = True) -> dict[str, Tensor]:
        """Return the state dict of the densified model, without changing the model.

        Weights of sparse layers are those of evaluation, with exact zeros; scales and adapters are
        folded in, and keys of the method are left out. Collective if the model is sharded.

        Args:
            full: every rank gets whole tensors. False: a sharded model gives DTensors, laid out as
                its parameters, for ``torch.distributed.checkpoint``.
        """
        return dict(self.dense_tensors(full=full))

    @contextlib.contextmanager
    def without_residual(self) -> Iterator[None]:
        """Leave out the adapters or branches of the method: layers compute X·A(W)ᵀ alone."""
        methods = self.methods
        try:
            for method in methods:
                method.without_residual = True
            yield
        finally:
            for method in methods:
                method.without_residual = False

    def coverage(self) -> Coverage:
        """Return the report of sparse layers and their operands."""
        self._require_sparse()
        self._state.sync(always=True)
        return cover(self.layers, self._state)

    def prove(self) -> Proof:
        """Count the non-zeros of every group of the evaluated weights; collective if sharded."""
        self._require_sparse()
        self._state.sync(always=True)
        return prove(self.layers, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the method's scalars; the model's state dict also has them.

        ``pattern`` is [N, M], or if layers have different ones a list of them by layer.
        """
        methods = [layer.operands.method for layer in self.layers.values()]
        patterns = [list(method.final_pattern) for method in methods]
        return {
            "method": identity(*self._state.methods),
            "pattern": patterns if len({*map(tuple, patterns)}) > 1 else patterns[0],
            "layers": list(self.layers),
            "completed_steps": self.completed_steps,
            "compared_at": self._state.compared_at,
            **self.method.scalars,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counters and scalars; load the model's state dict first.

        Raises:
            CheckpointError: the state belongs to another method, pattern or set of layers.
        """
        own_state = self.state_dict()
        for key in ("method", "pattern", "layers"):
            if state.get(key) != own_state[key]:
                text = f"{key} is {state.get(key)}, this model has {own_state[key]}"
                raise CheckpointError(f"sparsifier state: {text}")
        model = self._state
        model.compared_at = int(state["compared_at"])
        model.flips = None
        model.method.scalars = {key: int(state[key]) for key in model.method.scalars}
        model.set_step(int(state["completed_steps"]))
        self.refresh()

    @property
    def _densified(self) -> bool:
        models = (getattr(layer, "sparse_model", None) for layer in self.layers.values())
        return any(model is not self._state for model in models)

    def _require_sparse(self) -> None:
        if self._densified:
            raise ConfigError("the model was densified: call sparsify again for a new sparsifier")
        require_present(self._state.root, self.layers)
        require_own_weights(self.layers)
