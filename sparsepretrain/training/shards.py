"""A model shared out over the processes of a run by FSDP2 (``parallel=fsdp``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
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
        model: on the CPU or the device, with initial weights that are equal on all processes.
        sparsifier: of it, not attached.
        world: of more than one process.
    """
    options, dtype = run.parallel, compute_dtype(run.precision)
    shape = (options.replicas, world.size // options.replicas)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicas", "shards"))
    sparsifier.prepare_sharding(gather=options.gather)
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
