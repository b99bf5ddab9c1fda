"""Prepare sparse layers for ``fully_shard``, and connect them to their shards afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.fsdp.sharding import MasterShard, PreparedRows, ShardedRows
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK

ORDER = "sparsify, prepare_sharding, fully_shard, the optimizer, attach"


def prepare(state: ModelState, layers: Mapping[str, SparseWeight]) -> None:
    """Wrap weights before ``fully_shard``; see :meth:`Sparsifier.prepare_sharding`."""
    prepared = state.is_sharded
    if prepared or state.attachment.optimizer is not None:
        done = "prepared for sharding" if prepared else "attached"
        raise ConfigError(f"the sparsifier is {done} already: the order is {ORDER}")
    if state.precision is not None:
        name = state.label.partition(" ")[0]
        raise ConfigError(f"{name} does not go with sharding: leave precision out")
    if state.policy is not None and state.policy.name != "auto":
        raise ConfigError(
            f"sparse_matmuls={state.policy.name} does not go with sharding: use auto or emulate"
        )
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            raise ConfigError(f"the weight of {name!r} is sharded already: the order is {ORDER}")
    for layer in layers.values():
        weight = layer.weight
        shard = MasterShard(weight.detach().contiguous())
        layer.replace_weight(nn.Parameter(shard, weight.requires_grad))
        layer.operands.rows = PreparedRows()
        layer.operands.moved(weight.device)


def bind(state: ModelState, layers: Mapping[str, SparseWeight]) -> None:
    """Connect each layer to its shard after ``fully_shard``, and shard its buffers."""
    rows = {}
    for name, layer in layers.items():
        weight = layer.weight
        if not isinstance(weight, DTensor):
            raise ConfigError(
                f"the weight of {name!r} was prepared and is not sharded: the order is {ORDER}"
            )
        rows[name] = ShardedRows(name, weight, is_bank=layer.sparsity.slice_rows is not None)
    if len({shard.group for shard in rows.values()}) > 1:
        raise ConfigError("sparse layers are sharded over different processes: use one mesh")
    for name, layer in layers.items():
        operands = layer.operands
        if isinstance(operands.rows, ShardedRows):
            continue
        operands.rows = rows[name]
        rows[name].shard_buffers(layer.sparsity, layer.sparsity.shape, PREVIOUS_MASK)
        operands.clear()
        if operands.reset_due:
            operands.reset_due = False
            operands.reset(layer.weight)
            state.baseline_due = True
    # Our hook drops stale operands, so it must run before the hooks of FSDP, which gather.
    hooks: Any = state.root._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook == state.before_forward]:
        hooks.move_to_end(key, last=False)
