"""Sparse weights under FSDP2: a process projects the rows it stores, and what is gathered is A(W).

``fully_shard`` gathers what the local tensor of a parameter returns from ``fsdp_pre_all_gather``.
So the unsharded weight that a forward sees *is* the operand, in buffers that FSDP frees and fills
again; the master weights never leave their process. An operand that is 2:4 may travel packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.packing import not_packed

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
    unpacked: bool
    """Whether all that is gathered is copied out of FSDP's buffers, which it may free then."""
    __slots__ = ("_tensor", "unpacked")

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
        self._tensor, self.unpacked = tensor, False

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
        parts = own.to_gather(mp_policy.param_dtype or self.dtype, module.training)
        # of a single shard, which is never packed, FSDP passes on the first tensor only
        alone = parts[1] if len(parts) > 1 and own.shard.world == 1 else None
        return parts, (own, alone)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered A is the unsharded weight; B is kept beside it."""
        own, alone = metadata
        if own.packing is None:
            own.gathered_backward = outputs[1] if len(outputs) > 1 else alone
            return None if out is not None else (outputs[0], ())
        earlier = None if out is None else own.gathered_backward
        found = own.packing.unpack(outputs, {"A": out, "B": earlier})
        own.gathered_backward = found.get("B")
        mine = tuple(found[place] for place in own.packing.packed)  # FSDP frees and allocates them
        return None if out is not None else (found["A"], mine)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Asked before the first forward, by versions of torch that can."""
        return self.unpacked


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


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: collective where it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    rows = DTensor.from_local(plain(tensor), *spec, run_check=False, shape=shape, stride=stride)
    return rows.full_tensor()


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


def prepare(layers: Mapping[str, SparseLayer], state: ModelState, gather: str) -> None:
    """Before ``fully_shard``: see :meth:`Sparsifier.prepare_sharding`."""
    if gather not in ("operand", "packed"):
        raise ConfigError(f"gather must be operand or packed, got {gather!r}")
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            raise ConfigError(f"the weight of {name!r} is sharded already: the order is {ORDER}")
    for layer in layers.values():
        trained = layer.weight.requires_grad
        layer.weight = nn.Parameter(MasterShard(layer.weight.detach().contiguous()), trained)
    state.sharded, state.packs_gathered = True, gather == "packed"


def bind(layers: Mapping[str, SparseLayer], state: ModelState) -> None:
    """After ``fully_shard``: tell each layer its rows, and cut its tensors."""
    for name, layer in layers.items():
        if layer.sparsity.shard is None and not isinstance(layer.weight, DTensor):
            raise ConfigError(
                f"the weight of {name!r} was prepared and is not sharded: the order is {ORDER}"
            )
    reasons = not_packed(state.method) if state.packs_gathered else {}
    for name, layer in layers.items():
        own = layer.sparsity
        if own.shard is None:
            own.cut(RowsOf(name, layer.weight), reasons)
            if own.packing is not None:
                packed = len(own.packing.packed) == len(own.packing.reasons)
                layer.weight._local_tensor.unpacked = packed
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
