"""Shard sparse weights with FSDP2: each rank projects its rows, and FSDP gathers A(W).

``fully_shard`` gathers the tensors that a parameter returns from ``fsdp_pre_all_gather``. So the
unsharded weight that a forward sees *is* the operand, in buffers that FSDP frees and fills again;
master weights never leave their rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels.common import packed_shape
from sparsepretrain.sparsity.fsdp.rows import Rows

S = TypeVar("S")  # LayerState
T = TypeVar("T")
_aten = torch.ops.aten
_KEPT = {
    *(_aten.alias.default, _aten.detach.default, _aten.view.default, _aten.as_strided.default),
    *(_aten.slice.Tensor, _aten.split.Tensor, _aten.clone.default, _aten._to_copy.default),
    *(_aten.new_zeros.default, _aten.empty_like.default, _aten.copy_.default),
}
"""Operations of ``fully_shard`` and of copies whose results are master shards again."""


class MasterShard(Tensor):
    """FSDP2 shard of a master weight, which is gathered as operands.

    Wraps a plain tensor, and is pickled as one.
    """

    _tensor: Tensor
    __slots__ = ("_tensor",)

    @staticmethod
    def __new__(cls, tensor: Tensor) -> MasterShard:
        """Create a tensor with the metadata of ``tensor`` and no memory."""
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
        if func is _aten.copy_.default:  # in place: the caller keeps its object, not a new wrapper
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
        """Return the own rows of (A,) or (A, B) in the dtype of the matmuls, padded."""
        owner: Any = module  # a layer, or a module with banks
        own = getattr(owner, "operands", None)
        operands = owner.operands_of(self._tensor) if own is None else own
        parts = operands.to_gather(self, mp_policy.param_dtype or self.dtype, module.training)
        parts = tuple(map(operands.rows.padded, parts))
        # FSDP drops all tensors but the first if there is one shard
        return parts, (operands, parts[1:] if operands.rows.world == 1 else ())

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the gathered A as the unsharded weight; the layer keeps B."""
        operands, dropped = metadata
        forward = operands.rows.stored(operands.take((*outputs, *dropped)))
        # with `out` FSDP has filled the memory of the first gather again, which is the weight
        return None if out is not None else (forward, ())


class PreparedRows(Rows):
    """Rows between ``prepare_sharding`` and ``attach``: not known yet."""

    is_sharded = True
    is_prepared = True

    def local(self, weight: Tensor) -> Tensor:
        """Refuse to run or measure the model (ConfigError)."""
        raise ConfigError(
            "the model was prepared for sharding: call fully_shard(model) and "
            "sparsifier.attach(optimizer) before it is run or measured"
        )


class ShardedRows(Rows):
    """Rows of the storage of a sparse weight that this rank has."""

    is_sharded = True

    def __init__(self, name: str, parameter: DTensor, *, is_bank: bool = False) -> None:
        mesh = parameter.device_mesh
        placements = parameter.placements
        sharded = [i for i, kind in enumerate(placements) if not isinstance(kind, Replicate)]
        if [placements[i] for i in sharded] != [Shard(0)]:
            raise ConfigError(
                f"the weight of {name!r} is sharded as {placements}: only fully_shard along "
                "dimension 0 is supported"
            )
        self._parameter = parameter
        self.group = mesh.get_group(sharded[0])
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        outer, *inner = parameter.shape
        if is_bank and outer % self.world:
            raise ConfigError(
                f"the bank {name!r} of {outer} slices is sharded over {self.world} processes: "
                "expected a divisor; use fewer (HSDP: replicas), or exclude it"
            )
        self._inner = tuple(inner)
        self._is_bank = is_bank
        unit = math.prod(inner[:-1]) if is_bank else 1  # rows of the matrix per shard of axis 0
        self.rows = outer * unit
        self.chunk = -(-outer // self.world) * unit  # the last ranks have fewer rows, or none
        self.first = min(self.rank * self.chunk, self.rows)
        self.last = min(self.first + self.chunk, self.rows)
        self.names: tuple[str, ...] = ()
        """Buffers of the layer that are sharded like the weight; the last mask comes first."""

    def local(self, weight: Tensor) -> Tensor:
        """Return the own rows of the master weight; ``weight`` may be the gathered A."""
        # looked up: FSDP may put another tensor in its place
        return self._matrix(plain(self._parameter))

    def parameter(self, weight: Tensor) -> Tensor:
        return self._parameter

    def gradient(self, weight: Tensor) -> Tensor | None:
        gradient = self._parameter.grad
        return None if gradient is None else self._matrix(plain(gradient))

    def own_part(self, parameter: Tensor) -> Tensor:
        return plain(parameter)

    def shard_like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        return part_of(whole, parameter)

    def _matrix(self, local: Tensor) -> Tensor:
        return local.view(-1, local.shape[-1]) if self._is_bank else local

    def stored(self, rows: Tensor) -> Tensor:
        return rows.view(-1, *self._inner) if self._is_bank else rows

    def has_whole_groups(self, group: int) -> bool:
        """Return True if each rank has whole groups of ``group`` rows, and at least one."""
        return self.chunk % group == 0 and self.chunk * (self.world - 1) < self.rows

    def gather(self, rows: Tensor) -> Tensor:
        if self.world == 1:
            return rows
        bits = rows.view(torch.uint8) if rows.dtype == torch.bool else rows
        whole: Tensor = self.wrap(bits).full_tensor()
        return whole.view(rows.dtype)

    def own_rows(self, whole: Tensor) -> Tensor:
        # of a tensor with one value per slice: the rows of one
        unit = self.rows // len(whole) if self._is_bank else 1
        return whole[self.first // unit : self.last // unit].clone()

    def padded(self, rows: Tensor) -> Tensor:
        """Pad this rank's rows with zeros to the largest shard: all-gathers need equal sizes."""
        missing = self.chunk - len(rows)
        if not missing:
            return rows.contiguous()
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])

    def total(self, counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=self.group)
        return counts

    def complete(self, rows: Tensor, group: int) -> Tensor:
        """Return the own rows if no group spans ranks, else all rows on rank 0."""
        if self.has_whole_groups(group):
            return rows
        gathered = self.gather(rows)
        return gathered if self.rank == 0 else gathered[:0]

    def apply(
        self,
        function: Callable[[Tensor, S], T],
        rows: Tensor,
        state: S,
        group: int | None,
    ) -> T:
        """Call ``function`` with the own rows, or with all rows if it must see them together."""
        if group is not None and self.has_whole_groups(group):
            return function(rows, state)
        whole: Any = self.whole_state(state)
        result = function(self.gather(rows), whole)
        whole.write_back()
        own: T = self._own(result)
        return own

    def whole_state(self, state: S) -> S:
        return cast(S, WholeState(state, self))

    def _own(self, result: Any) -> Any:
        """Return the own rows of a tensor or of a tuple of tensors; scalars have no rows."""
        if isinstance(result, Tensor):
            return self.own_rows(result) if result.dim() else result
        return type(result)(*map(self._own, result)) if isinstance(result, tuple) else result

    def wrap(self, rows: Tensor) -> DTensor:
        of_slices = self._is_bank and rows.dim() != 2
        count = self._parameter.shape[0] if of_slices else self.rows
        shape = torch.Size((count, *rows.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        spec = self._parameter.device_mesh, self._parameter.placements
        return DTensor.from_local(rows, *spec, run_check=False, shape=shape, stride=stride)

    def shard_buffers(self, layer: nn.Module, shape: tuple[int, ...], first: str) -> None:
        """Keep the own rows of ``first`` and of all buffers shaped like the weight or its mask.

        Also of buffers with one value per slice of a bank. ``shape`` is that of the weight, as a
        matrix if it is a bank.
        """
        packed = torch.uint8, packed_shape(shape)
        slices = self._parameter.shape[:1] if self._is_bank else None
        alike = [
            name
            for name, value in layer.named_buffers()
            if value.shape in (shape, slices) or (value.dtype, value.shape) == packed
        ]
        self.names = tuple(dict.fromkeys([first, *alike]))
        for name in self.names:
            layer._buffers[name] = self.wrap(self.own_rows(layer.get_buffer(name)))
        self.follow(layer)

    def follow(self, layer: nn.Module) -> None:
        # State dicts see the DTensor. Attributes in __dict__ are found before buffers, also by
        # get_buffer, which would return the tensor of before here.
        for name in self.names:
            layer.__dict__[name] = plain(cast(Tensor, layer._buffers[name]))

    def write(self, layer: nn.Module, name: str, value: Tensor) -> None:
        buffer = getattr(layer, name)
        if name in self.names:
            buffer.copy_(self.own_rows(value))
        elif name in layer._parameters:  # FSDP shards Parameters of the method by itself
            plain(buffer).copy_(ShardedRows(name, buffer).own_rows(value))
        else:
            buffer.copy_(value)


class WholeState:
    """State of a layer for a method that needs all rows: sharded tensors are gathered when read.

    Parameters of the method are whole between the gathers of FSDP, and shards otherwise.
    """

    def __init__(self, state: Any, rows: ShardedRows) -> None:
        self._state = state
        self._rows = rows
        self._gathered: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        if isinstance(value, DTensor):
            return value.full_tensor()
        if name not in self._rows.names:
            return value
        if name not in self._gathered:
            self._gathered[name] = self._rows.gather(value)
        return self._gathered[name]

    def write_back(self) -> None:
        """Copy the own rows of gathered tensors, which the method may have changed."""
        for name, whole in self._gathered.items():
            getattr(self._state, name).copy_(self._rows.own_rows(whole))


def plain(tensor: Tensor) -> Tensor:
    """Return the local tensor without wrappers."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor._tensor if isinstance(tensor, MasterShard) else tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the same shard without :class:`MasterShard`, in the same memory."""
    if not isinstance(tensor, DTensor):
        return plain(tensor)
    spec = tensor.device_mesh, tensor.placements
    shape = tensor.shape
    stride = tensor.stride()
    return DTensor.from_local(plain(tensor), *spec, run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    """All-gather the shards of a tensor; return an unsharded tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = unwrapped(tensor)
    gathered: Tensor = sharded.full_tensor()
    return gathered


def part_of(whole: Any, like: Tensor) -> Tensor:
    """Shard ``whole`` like another tensor, without communication.

    Args:
        whole: a tensor, equal on all ranks, on any device, or a stored tensor that can be sliced by
            rows; a DTensor is returned as it is.
        like: if it is not sharded or has another shape, all of ``whole`` is returned.
    """
    if isinstance(whole, DTensor):
        return whole
    if not isinstance(like, DTensor) or tuple(whole.shape) != tuple(like.shape):
        all_rows: Tensor = whole[...]
        return all_rows
    rows = ShardedRows("a parameter", like)
    return rows.wrap(rows.own_rows(whole).to(like.device))
