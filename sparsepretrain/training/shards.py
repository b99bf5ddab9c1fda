"""Shard the model of a run with FSDP2 (``parallel=fsdp``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sparsepretrain.config.schema import Run
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.training.compilation import blocks
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.world import World


def shard(run: Run, model: nn.Module, sparsifier: Sparsifier | None, world: World) -> None:
    """Shard ``model`` in place, block by block; gradients become sums over all ranks.

    A block is gathered for its forward and again for its backward; parameters outside blocks are
    gathered with the root.

    Args:
        run: of ``parallel=fsdp``.
        model: on the CPU with the initial weights; on all but the first process on the meta device.
        sparsifier: of it, not attached; None: it is a teacher, which has no backward.
        world: of more than one process.
    """
    options = run.parallel
    dtype = compute_dtype(run.precision)
    shape = (options.replicas, world.size // options.replicas)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicas", "shards"))
    given = dict(chain(model.named_parameters(), model.named_buffers()))
    if not world.is_main:
        _materialize(model)
    if sparsifier is not None:
        sparsifier.prepare_sharding()
    policy = MixedPrecisionPolicy()
    if dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*blocks(model), model):
        fully_shard(
            module,
            mesh=mesh if options.replicas > 1 else mesh["shards"],
            # a backward that follows at once would gather the parameters outside blocks again
            reshard_after_forward=True if sparsifier is None else options.reshard_after_forward,
            mp_policy=policy,
        )
    for part in _sharded(model):  # both settings are those of one module
        part.set_gradient_divide_factor(1.0)
        # a factor alone makes FSDP ask for PREMUL_SUM, which gloo does not have
        part.set_force_sum_reduction_for_comms(True)
    _broadcast(model, given, world)


@torch.no_grad()
def _broadcast(model: nn.Module, given: dict[str, Tensor], world: World) -> None:
    """Broadcast each tensor from rank 0; every rank keeps its rows.

    One at a time, so no device holds the whole model.
    """
    for name, target in chain(model.named_parameters(), model.named_buffers()):
        source = given[name].detach()
        whole = source if world.is_main else torch.empty_like(source, device="cpu")
        whole = whole.to(world.device).contiguous()
        dist.broadcast(whole, src=0)
        target.copy_(world.part(whole, target))


def _materialize(model: nn.Module) -> None:
    """Replace meta tensors by empty CPU tensors, tied ones once.

    They take no memory: the system allocates a page when it is written, and only copies of the own
    rows are written.
    """
    new: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in new:
                    room = torch.empty_like(old, device="cpu")
                    trained = isinstance(old, nn.Parameter)
                    new[old] = nn.Parameter(room, old.requires_grad) if trained else room
                tensors[name] = new[old]  # type: ignore[assignment]


@contextlib.contextmanager
def evaluating(run: Run, model: nn.Module, *, whole: bool) -> Iterator[None]:
    """Free what an evaluation gathered: training has other operands.

    Args:
        run: of ``parallel=fsdp``.
        model: sharded.
        whole: keep the operands of the whole model gathered, so that ranks may run different
            numbers of forwards. Otherwise a block is gathered at a time.
    """
    modules = list(_sharded(model))
    if whole:
        modules[0].set_reshard_after_forward(False)
        for module in modules:
            module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
        modules[0].set_reshard_after_forward(run.parallel.reshard_after_forward)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP manages, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
