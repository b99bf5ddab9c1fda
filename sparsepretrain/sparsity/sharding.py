"""Sparse weights under FSDP2: a process projects the rows it stores, and what is gathered is A(W).

``fully_shard`` gathers what the local tensor of a parameter returns from ``fsdp_pre_all_gather``.
So the unsharded weight that a forward sees *is* the operand, in buffers that FSDP frees and fills
again; the master weights never leave their process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.execution import Operands

if TYPE_CHECKING:
    from sparsepretrain.sparsity.layer_state import LayerState
    from sparsepretrain.sparsity.layers import SparseLayer
    from sparsepretrain.sparsity.model_state import ModelState

_aten = torch.ops.aten
_KEPT = {
    *(_aten.alias.default, _aten.detach.default, _aten.view.default, _aten.as_strided.default),
    *(_aten.slice.Tensor, _aten.split.Tensor, _aten.clone.default, _aten._to_copy.default),
    *(_aten.new_zeros.default, _aten.empty_like.default, _aten.copy_.default),
}
"""Operations of ``fully_shard`` and of copies, whose results are master shards again."""

ORDER = "sparsify, prepare_sharding, fully_shard, the optimiser, attach"


class MasterShard(Tensor):
    """A sparse weight, or the rows of it that this process stores, which FSDP gathers projected.

    A wrapper of a plain tensor; pickled as that.
    """

    _tensor: Tensor
    __slots__ = ("_tensor",)

    @staticmethod
    def __new__(cls, tensor: Tensor) -> MasterShard:
        """Looks like ``tensor``, and has no memory of its own."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inner, named = tree_map_only(cls, lambda shard: shard._tensor, (args, kwargs or {}))
        result = func(*inner, **named)
        if func is _aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, cls, result) if func in _KEPT else result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> MasterShard:
        return MasterShard(inner["_tensor"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._tensor.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MasterShard({self._tensor})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """A of these rows, and B where the method has one, in the dtype of the products."""
        own: LayerState = module.sparsity  # type: ignore[assignment]
        own.stored(self)  # refuses what is not attached
        parts = own.gathered.parts(mp_policy.param_dtype or self.dtype, module.training)
        # of a single shard FSDP passes on the first tensor only
        alone = parts[1] if len(parts) > 1 and own.shard.world == 1 else None
        return parts, (own.gathered, alone)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered A is the unsharded weight; B is kept beside it."""
        gathered, alone = metadata
        gathered.backward = outputs[1] if len(outputs) > 1 else alone
        return None if out is not None else (outputs[0], ())


class RowsOf:
    """Which rows of the storage of a sparse weight this process has.

    Args:
        name: of the layer.
        parameter: its weight after ``fully_shard``.

    Raises:
        ConfigError: it is not sharded by rows of the storage, along one dimension of a mesh.
    """

    def __init__(self, name: str, parameter: DTensor) -> None:
        mesh, placements = parameter.device_mesh, parameter.placements
        sharded = [i for i, kind in enumerate(placements) if not isinstance(kind, Replicate)]
        if [placements[i] for i in sharded] != [Shard(0)]:
            raise ConfigError(
                f"the weight of {name!r} is sharded as {placements}: only fully_shard along "
                "dimension 0 is supported"
            )
        self.parameter = parameter
        self.group = mesh.get_group(sharded[0])
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.rows = parameter.shape[0]
        self.chunk = -(-self.rows // self.world)  # of the last processes fewer, or none
        self.first = min(self.rank * self.chunk, self.rows)
        self.last = min(self.first + self.chunk, self.rows)

    @property
    def local(self) -> Tensor:
        """The master weight of these rows; looked up, since FSDP may put another in its place."""
        return plain(self.parameter)

    def whole_groups(self, multiple: int) -> bool:
        """Whether every process has whole groups of so many rows, and at least one."""
        if self.world == 1:
            return True
        return self.chunk % multiple == 0 and self.chunk * (self.world - 1) < self.rows

    def gather(self, local: Tensor) -> Tensor:
        """All rows of a tensor that is sharded as the weight is."""
        if self.world == 1:
            return local
        bits = local.view(torch.uint8) if local.dtype == torch.bool else local
        padded = bits.new_zeros(self.chunk, *bits.shape[1:])
        padded[: len(bits)] = bits
        whole = bits.new_empty(self.chunk * self.world, *bits.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self.group)
        return whole[: self.rows].view(local.dtype)

    def mine(self, whole: Tensor) -> Tensor:
        """The rows of this process, in memory of their own."""
        return whole[self.first : self.last].clone()

    def padded(self, local: Tensor) -> Tensor:
        """As many rows as every process has to give."""
        missing = self.chunk - len(local)
        if not missing:
            return local.contiguous()
        return torch.cat([local, local.new_zeros(missing, *local.shape[1:])])

    def wrap(self, local: Tensor) -> DTensor:
        """Rows as a DTensor, so that state dicts know what they are part of."""
        shape = torch.Size((self.rows, *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        spec = self.parameter.device_mesh, self.parameter.placements
        return DTensor.from_local(local, *spec, run_check=False, shape=shape, stride=stride)


class Rows(NamedTuple):
    """What FSDP gathers of a layer from this process."""

    parts: tuple[Tensor, ...]
    wgrad_scale: Tensor | None


class Gathered:
    """The operands of a layer, projected from the rows of this process and gathered by FSDP.

    Args:
        own: the state of the layer, whose rows are known.
    """

    _rows: dict[bool, Rows | None]  # for training (True) and evaluation (False); None: W itself
    _last: bool | None  # whether A or W was gathered last; None: out of date

    def __init__(self, own: LayerState) -> None:
        self.own, self.shard = own, own.shard
        self.backward: Tensor | None = None  # B, as it was gathered
        self._dtype: torch.dtype | None = None  # that FSDP asked for
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what can be computed again."""
        return self.__dict__ | {"_rows": {}}

    def forget(self) -> None:
        """The weight has changed."""
        self._rows, self._last = {}, None

    def restore(self) -> None:
        """Project anew, once FSDP has said in which dtype."""
        if self._dtype is not None:
            self._project(self._dtype, True)

    @torch.no_grad()
    def parts(self, dtype: torch.dtype, training: bool) -> tuple[Tensor, ...]:
        """A of this process's rows, and B if the method has two operands, for FSDP to gather.

        As they are stored, in ``dtype``, with as many rows as every process gives.
        """
        own = self.own
        self._dtype, training = dtype, own.variant(training)
        if training not in self._rows:
            self._project(dtype, training)
        rows, phase = self._rows[training], own.method.phase
        self._last = phase.training if training else phase.evaluation
        if rows is not None:
            return rows.parts
        weight = self.shard.padded(self.shard.local.detach().to(dtype))  # W itself, cast anew
        return (weight, weight) if own.method.two_operands else (weight,)

    @torch.no_grad()
    def _project(self, dtype: torch.dtype, training: bool) -> None:
        own, shard = self.own, self.shard
        with torch.inference_mode(False):
            forward, mask, backward, scale = own.project(shard.local, training)
            if training:
                own.kept_mask = mask
            if forward is None:
                self._rows[training] = None
                return
            if backward is not None and not own.method.two_operands:
                raise ConfigError(
                    f"method {own.method.options.name} returns a backward weight: under FSDP it "
                    "must say so with two_operands"
                )
            parts = [shard.padded(forward.to(dtype))]
            if own.method.two_operands:
                parts.append(parts[0] if backward is None else shard.padded(backward.to(dtype)))
            self._rows[training] = Rows(tuple(parts), scale)

    def is_for(self, training: bool) -> bool:
        """Whether what was gathered last is what a forward in this mode has to see."""
        phase = self.own.method.phase
        return self._last is (phase.training if training else phase.evaluation)

    def operands(self, weight: Tensor, training: bool) -> Operands | None:
        """The gathered weight is A already; None: that is all."""
        own = self.own
        if not self.is_for(training):
            raise ConfigError(
                f"layer {own.layer_name!r} sees what was gathered in another phase, or from "
                "weights that have changed since: call reshard() on the modules of FSDP, or run "
                "the module that was given to sparsify"
            )
        kept = self._rows.get(own.variant(training))
        scale = None if kept is None else kept.wgrad_scale
        two = self._last and own.method.two_operands
        if not two and scale is None and not (training and any(own.method.changes)):
            return None
        backward = None
        if two:
            assert self.backward is not None
            backward = self.backward[: weight.shape[0]]
        return Operands(own.turned(weight.detach()), own.turned(backward), scale)


class WholeLayer:
    """A layer as a method sees it that needs all rows: its tensors are gathered when read."""

    def __init__(self, own: LayerState) -> None:
        self._own = own
        self._gathered: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        if name not in self._own.sharded:
            return value
        if name not in self._gathered:
            self._gathered[name] = self._own.shard.gather(value)
        return self._gathered[name]

    def keep(self) -> None:
        """Take this process's rows of what the method has changed."""
        for name, whole in self._gathered.items():
            getattr(self._own, name).copy_(self._own.shard.mine(whole))


def plain(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, without wrappers."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor._tensor if isinstance(tensor, MasterShard) else tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the same shard without :class:`MasterShard`, in the same memory."""
    if not isinstance(tensor, DTensor):
        return plain(tensor)
    spec = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(plain(tensor), *spec, run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    """All-gather the shards of a tensor; one that is not sharded is returned."""
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = unwrapped(tensor)
    found: Tensor = sharded.full_tensor()
    return found


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """``whole``, sharded as ``like`` is; nothing is sent.

    Args:
        whole: equal on all processes, on any device; sharded already: it is returned.
        like: not sharded, or of another shape: ``whole`` is returned.
    """
    if not isinstance(like, DTensor) or isinstance(whole, DTensor) or whole.shape != like.shape:
        return whole
    rows = RowsOf("a parameter", like)
    return rows.wrap(rows.mine(whole).to(like.device))


def prepare(layers: Mapping[str, SparseLayer], state: ModelState) -> None:
    """Before ``fully_shard``: see :meth:`Sparsifier.prepare_sharding`."""
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            raise ConfigError(f"the weight of {name!r} is sharded already: the order is {ORDER}")
    for layer in layers.values():
        trained = layer.weight.requires_grad
        layer.weight = nn.Parameter(MasterShard(layer.weight.detach().contiguous()), trained)
    state.sharded = True


def bind(layers: Mapping[str, SparseLayer], state: ModelState) -> None:
    """After ``fully_shard``: tell each layer its rows, and cut its tensors."""
    for name, layer in layers.items():
        if layer.sparsity.shard is None and not isinstance(layer.weight, DTensor):
            raise ConfigError(
                f"the weight of {name!r} was prepared and is not sharded: the order is {ORDER}"
            )
    for name, layer in layers.items():
        own = layer.sparsity
        if own.shard is None:
            own.cut(RowsOf(name, layer.weight))
            own.gathered = Gathered(own)
            if own.reset_due:
                own.reset_due = False
                own.reset(layer.weight)
    if len({layer.sparsity.shard.group for layer in layers.values()}) > 1:
        raise ConfigError("sparse layers are sharded over different processes: use one mesh")
    # before those of FSDP, which gather
    hooks: Any = state.root._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook == state.before_forward]:
        hooks.move_to_end(key, last=False)


def reshard(root: nn.Module) -> None:
    """Drop what is gathered: the next forward gathers anew."""
    for module in root.modules():
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()  # type: ignore[operator]
