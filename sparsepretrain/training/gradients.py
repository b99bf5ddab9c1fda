# ruff: noqa: D102 - overrides are documented at Gradients
"""Reduce gradients of micro-batches to the global batch, as sums, never as means.

DistributedDataParallel computes a mean over ranks, which changes methods that are not homogeneous
in the gradient: SDGP's epsilon of 1e-4 moves its losses by 9e-4.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsepretrain.config.groups import DataParallel, FullySharded, Parallel
from sparsepretrain.tasks import Batch, Task
from sparsepretrain.training.world import World


class Loss(nn.Module):
    """Loss of a task as a module, so that DistributedDataParallel wraps the whole computation."""

    terms: ClassVar[tuple[str, ...]] = ()
    """Names of further sums over the items, for the record."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the sum of the loss over the items of ``batch``, then those of ``terms``."""
        return (self.task.loss(self.model, batch)[0],)


class Gradients:
    """Gradients of one process, accumulated in ``.grad``.

    Attributes:
        loss: module that the loop calls for each micro-batch, inside :meth:`micro_batch`.
        terms: :attr:`Loss.terms` of it.
    """

    terms: tuple[str, ...] = ()

    def __init__(self, loss: nn.Module, world: World) -> None:
        self.loss = loss
        self.world = world

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Enclose forward and backward of a micro-batch; ``last``: the last one of this rank."""
        return contextlib.nullcontext()

    def reduce(self) -> None:
        """Finish the gradients of the global batch, after the last micro-batch."""


class Summed(Gradients):
    """DistributedDataParallel with sums, reduced while the last backward runs."""

    loss: DistributedDataParallel

    def __init__(self, loss: nn.Module, world: World) -> None:
        # masks and scales are equal on all ranks, so no buffer is broadcast; a method's parameters
        # (adapters) may be unused until a late phase
        unused = any(".sparsity." in name for name, _ in loss.named_parameters())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.15
            wrapped = DistributedDataParallel(
                loss,
                broadcast_buffers=False,
                find_unused_parameters=unused,
                gradient_as_bucket_view=True,
            )
        wrapped.register_comm_hook(None, _sum)
        super().__init__(wrapped, world)

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.loss.no_sync()


class Sharded(Gradients):
    """FSDP2, which sums gradients over the ranks in the backward.

    Between the first and the last micro-batch of a step, every rank adds up gradients of whole
    weights: less traffic for more memory.
    """

    def __init__(self, loss: Loss, world: World, *, reduce_each: bool) -> None:
        super().__init__(loss, world)
        self._model: Any = loss.model
        self._reduce_each = reduce_each

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        self._model.set_requires_gradient_sync(last or self._reduce_each)
        return contextlib.nullcontext()


class Tree(Gradients):
    """Balanced tree over the micro-batches of the global batch: equal bits for every world size.

    A rank adds gradients of equal height only, as a binary counter carries; its micro-batches are
    neighbors and form a subtree. Across ranks each one adds a slice, in rank order. Traffic is that
    of an all-reduce; up to log₂(micro-batches) + 2 further gradients are in memory.
    """

    def __init__(self, loss: nn.Module, world: World) -> None:
        super().__init__(loss, world)
        self._parameters = [p for p in loss.parameters() if p.requires_grad]
        self._sums: list[tuple[int, Tensor]] = []  # height, gradient; heights decrease
        self._used = torch.zeros(len(self._parameters), dtype=torch.int64)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        yield
        if torch.is_grad_enabled():
            self._take()

    @torch.no_grad()
    def _take(self) -> None:
        parts = []
        for index, parameter in enumerate(self._parameters):
            self._used[index] += parameter.grad is not None
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append(gradient.flatten())
            parameter.grad = None
        height = 0
        total = torch.cat(parts)
        while self._sums and self._sums[-1][0] == height:
            total = self._sums.pop()[1] + total
            height += 1
        self._sums.append((height, total))

    @torch.no_grad()
    def reduce(self) -> None:
        ((_, total),) = self._sums
        if self.world.size > 1:
            total = _tree_sum(total, self.world.size)
        used = self.world.sum(self._used).tolist()
        sizes = [parameter.numel() for parameter in self._parameters]
        for count, parameter, part in zip(used, self._parameters, total.split(sizes), strict=True):
            if count:  # else it has no gradient, which is not a gradient of zero
                parameter.grad = part.view_as(parameter).clone()
        self._sums.clear()
        self._used.zero_()


def gradients(
    parallel: Parallel | DataParallel | FullySharded, loss: Loss, world: World
) -> Gradients:
    """Build the reduction of the group ``parallel`` for a sparse and perhaps sharded model."""
    made: Gradients
    if not isinstance(parallel, FullySharded) and parallel.reduction == "tree":
        made = Tree(loss, world)
    elif world.size == 1:
        made = Gradients(loss, world)
    elif isinstance(parallel, FullySharded):
        made = Sharded(loss, world, reduce_each=parallel.reduce_each)
    else:
        made = Summed(loss, world)
    made.terms = loss.terms  # here, as Summed wraps the loss
    return made


# DistributedDataParallel reads these annotations: they cannot be strings
def _sum(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    total: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return total


def _tree_sum(flat: Tensor, size: int) -> Tensor:
    """Sum a vector over ``size`` ranks, a power of two, pairwise in rank order."""
    chunk = -(-flat.numel() // size)
    padded = flat.new_zeros(size * chunk)
    padded[: flat.numel()] = flat
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    parts = list(received.view(size, chunk))
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    # the first name of the collective warns since torch 2.14
    all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    all_gather(padded, parts[0].contiguous())
    return padded[: flat.numel()]
