"""A model shared out over the processes of a run by FSDP2 (``parallel=fsdp``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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


def shard(run: Run, model: nn.Module, sparsifier: Sparsifier, world: World) -> None:
    """Share ``model`` out, in place, block by block; gradients will be sums over all processes.

    A block is gathered for its forward and again for its backward, what is in no block with the
    whole. Gradients are reduced after every micro-batch: none is ever whole on a process for long.

    Args:
        run: of ``parallel=fsdp``.
        model: on the CPU with the initial weights; on all but the first process on the meta device.
        sparsifier: of it, not attached.
        world: of more than one process.
    """
    options, dtype = run.parallel, compute_dtype(run.precision)
    shape = (options.replicas, world.size // options.replicas)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicas", "shards"))
    given = dict(_tensors(model))
    if not world.is_main:
        _make_room(model)
    sparsifier.prepare_sharding()
    policy = MixedPrecisionPolicy()
    if dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*blocks(model), model):
        fully_shard(
            module,
            mesh=mesh if options.replicas > 1 else mesh["shards"],
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
        )
    for part in _sharded(model):  # both settings are those of one module
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    _hand_out(model, given, world)


@torch.no_grad()
def _hand_out(model: nn.Module, given: dict[str, Tensor], world: World) -> None:
    """Give each process its rows of what the first one has, in one message for each tensor."""
    for name, own in _tensors(model):
        source = given[name].detach()
        whole = source if world.is_main else torch.empty_like(source, device="cpu")
        whole = whole.to(world.device).contiguous()
        dist.broadcast(whole, src=0)
        own.copy_(world.part(whole, own))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, also those that no state dict has."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _make_room(model: nn.Module) -> None:
    """Tensors on the CPU instead of the meta device, tied ones once.

    They take no main memory: the system gives a page when something is written, which happens to
    none but copies of the own rows.
    """
    new: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, old in kept.items():
                if old is None:
                    continue
                if old not in new:
                    room = torch.empty_like(old, device="cpu")
                    trained = isinstance(old, nn.Parameter)
                    new[old] = nn.Parameter(room, old.requires_grad) if trained else room
                kept[name] = new[old]  # type: ignore[assignment]


@contextlib.contextmanager
def gathered(run: Run, model: nn.Module) -> Iterator[None]:
    """Inside, every process has the operands of the whole model, in the dtype of the products.

    So in evaluation, generation too, they need not run equally many forwards.
    """
    modules = list(_sharded(model))
    if not modules:
        yield
        return
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
    """The model first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
