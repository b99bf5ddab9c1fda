"""Mistakes that the comparisons with one process must notice: patches of the trained code."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule

from sparsepretrain.sparsity import Sparsifier, layer_state
from sparsepretrain.sparsity.engine import operands, steps
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.fsdp.sharding import MasterShard, ShardedRows
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK
from sparsepretrain.training import gradients, loop

place, seed_draws, loss = Sparsifier.micro_batch, loop.seed_draws, gradients.Loss.forward
summed, rows_of = gradients._sum, ShardedRows.own_rows
cut, pack = ShardedRows.shard_buffers, layer_state.pack_rows
project, update = LayerOperands.project, LayerOperands.update
gathered, set_factor = MasterShard.fsdp_post_all_gather, FSDPModule.set_gradient_divide_factor
RANK = int(os.environ.get("RANK", "0"))


def mean(state: Any, bucket: Any) -> Any:
    """What DistributedDataParallel does by default, in two processes."""
    return summed(state, bucket).then(lambda done: done.value() / 2)


mean.__annotations__ = summed.__annotations__


def noise(number: Any) -> Any:
    """Draws that depend on another number than that of the micro-batch."""
    draw = lambda own, index, **options: place(own, number(index), **options)  # noqa: E731
    return patch.object(Sparsifier, "micro_batch", draw)


def factor_of_root(module: Any, factor: float) -> None:
    """``set_gradient_divide_factor`` called for the model alone: it is not recursive."""
    if hasattr(module, "transformer"):
        set_factor(module, factor)


def by_pointer(own: Any, weight: Any, training: bool = False) -> Any:
    """Projections cached by the address of the rows, which changes on some ranks only."""
    if not isinstance(own.rows, ShardedRows):
        return project(own, weight, training)
    key = own.state.step, own._key(training), own.rows.local(weight).data_ptr()
    kept = own.__dict__.setdefault("kept_by_pointer", {})
    if key not in kept:
        kept[key] = project(own, weight, training)
    return kept[key]


def without_b(own: Any, outputs: Any, *rest: Any, **options: Any) -> Any:
    """The first of two gathered operands in place of both."""
    return gathered(own, (outputs[0], outputs[0]), *rest, **options)


def flat(mask: torch.Tensor) -> torch.Tensor:
    """Bits in one vector, whose bytes belong to no row."""
    return pack(mask).flatten()


def cut_flat(rows: Any, layer: Any, shape: tuple[int, ...], first: str) -> None:
    """A flat vector cannot be sharded: each process has one, of its rows."""
    cut(rows, layer, shape, first)
    rows.names = tuple(key for key in rows.names if key != PREVIOUS_MASK)
    del layer.__dict__[PREVIOUS_MASK]
    own = rows.local(None)
    layer._buffers[PREVIOUS_MASK] = flat(torch.zeros_like(own, dtype=torch.bool))


def shifted(own: Any, whole: torch.Tensor) -> torch.Tensor:
    """The rows of this process, those of the second one a row too early."""
    rows = rows_of(own, whole)
    return rows.roll(1, 0) if own.rank == 1 else rows


def shifted_masks(own: Any, weight: torch.Tensor) -> None:
    """What the method stores is shifted like this after every update."""
    update(own, weight)
    if isinstance(own.rows, ShardedRows) and own.rows.rank == 1:
        for key in own.rows.names[1:]:  # after the mask of the last comparison
            mask = own.state.__dict__[key]
            mask.copy_(mask.roll(1, 0))


MUTANTS: dict[str, list[Any]] = {
    "mean": [
        patch.object(gradients, "_sum", mean),
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda own, factor: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda own, enable: None),
        patch.object(gradients.Loss, "forward", lambda own, batch: (2 * loss(own, batch)[0],)),
    ],
    "mean of blocks": [
        patch.object(FSDPModule, "set_gradient_divide_factor", factor_of_root),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda own, enable: None),
    ],
    "local noise": [noise(lambda index: index % 2)],
    "noise by rank": [noise(lambda index: index + 4 * RANK)],
    "local dropout": [
        patch.object(loop, "seed_draws", lambda *key: seed_draws(*key[:2], key[2] % 2))
    ],
    "no no_sync": [
        patch.object(gradients.Summed, "micro_batch", lambda own, *, last: contextlib.nullcontext())
    ],
    "kept by data_ptr": [
        patch.object(LayerOperands, "project", by_pointer),
        # it would project for all before FSDP moves the rows of some
        patch.object(Sparsifier, "store_operands", lambda own, dtype: None),
    ],
    "flat previous mask": [
        patch.object(layer_state, "pack_rows", flat),
        patch.object(operands, "pack_rows", flat),
        patch.object(steps, "pack_rows", flat),
        patch.object(ShardedRows, "shard_buffers", cut_flat),
    ],
    "B dropped": [patch.object(MasterShard, "fsdp_post_all_gather", without_b)],
    "no reshard": [patch.object(LayerOperands, "is_stale", lambda own, training: False)],
    "a shard shifted by one": [
        patch.object(ShardedRows, "own_rows", shifted),
        patch.object(LayerOperands, "update", shifted_masks),
    ],
}
"""Of two processes with two micro-batches each; the pointers need three."""


@contextlib.contextmanager
def mistaken(name: str) -> Iterator[None]:
    """Inside, the code has this mistake; "": none."""
    with contextlib.ExitStack() as stack:
        for mistake in MUTANTS[name] if name else ():
            stack.enter_context(mistake)
        yield
