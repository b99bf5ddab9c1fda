"""Ranks of a run and their collectives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepretrain.config.schema import Run, shares
from sparsepretrain.errors import ConfigError, RankError, SparsePretrainError, one_line, warn_once
from sparsepretrain.runs.checkpoint import Ranks
from sparsepretrain.runs.tensors import RowSlice, Stored
from sparsepretrain.training.hardware import unusable_gpu

T = TypeVar("T")

LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Words in errors of torch.distributed when another rank is gone or does not answer."""
TIMES_OUT = ("imed out", "wait timeout")
"""Words in those of a rank that does not answer, of gloo and NCCL or of the store."""


@dataclass(frozen=True, slots=True)
class World(Ranks):
    """Rank of this process, and collectives.

    In a world of one process every collective returns its argument.
    """

    device: torch.device
    """Device of this process."""
    rank: int = 0
    size: int = 1
    host: Any = None
    """Process group for CPU tensors and objects; None in a world of one."""
    timeout: timedelta | None = None
    """Time that a collective waits for the others."""

    @classmethod
    def single(cls, device: str) -> World:
        """Return a world of one process on ``parallel.device``."""
        available = torch.cuda.is_available()
        why = "" if available or device == "cpu" else unusable_gpu()
        if device == "cuda" and not available:
            raise ConfigError(
                f"parallel.device=cuda, but {why or 'torch sees no GPU: use auto or cpu'}"
            )
        if why and os.environ.get("RANK", "0") == "0":
            warn_once(f"parallel.device=auto trains on the CPU: {why}")
        if available and device != "cpu":  # with its number, as the tensors on it say
            return cls(torch.device("cuda", torch.cuda.current_device()))
        return cls(torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True for the rank that prints and writes."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum ``value`` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=None if value.is_cuda else self.host)
        return value

    def whole(self, tensor: Tensor) -> Tensor:
        """All-gather a tensor if it is sharded."""
        if self.size == 1:
            return tensor
        from sparsepretrain.sparsity.fsdp import sharding

        return sharding.whole(tensor)

    def rows(self, tensor: Tensor) -> Tensor | RowSlice | None:
        """Return what this rank saves of a tensor: its rows, all of it, or None.

        Of several replicas of a shard the first one saves it.
        """
        if self.size == 1:
            return tensor
        from torch.distributed.tensor import DTensor

        from sparsepretrain.sparsity.fsdp import sharding

        if not isinstance(tensor, DTensor):
            return tensor if self.is_main else None
        rows = sharding.ShardedRows("a tensor", tensor)
        place = tensor.device_mesh.get_coordinate()
        copies = zip(place or (), tensor.placements, strict=True)
        is_first = not any(index and kind.is_replicate() for index, kind in copies)
        local = sharding.plain(tensor).detach()
        return RowSlice(local, rows.first) if is_first and len(local) else None

    def part(self, tensor: Tensor | Stored, like: Tensor) -> Tensor:
        """Return the own shard of ``tensor``, sharded like ``like``, or all of it."""
        if self.size == 1:
            return tensor[...]
        from sparsepretrain.sparsity.fsdp import sharding

        return sharding.part_of(tensor, like)

    def for_thread(self) -> World:
        """Return this world with a host group of its own, which another thread needs."""
        return replace(self, host=dist.new_group(backend="gloo", timeout=self.timeout))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0; all ranks return its result.

        Raises:
            RankError: on the other ranks, if rank 0 raises.
        """
        if self.size == 1:
            return action()
        shared: list[Any] = [None, 0]
        try:
            if self.is_main:
                shared[0] = action()
        except BaseException as error:
            shared[1] = error.exit_code if isinstance(error, SparsePretrainError) else 1
            raise
        finally:
            dist.broadcast_object_list(shared, src=0, group=self.host)
        result: T = shared[0]
        if exit_code := shared[1]:
            # wait for rank 0: a launcher that sees another rank end first would kill rank 0 before
            # it has reported its error
            with contextlib.suppress(RuntimeError):
                dist.barrier(group=self.host)
            raise RankError(exit_code)
        return result

    def together(self, action: Callable[[], object]) -> None:
        """Run ``action`` on every rank, and :meth:`first` raises what it raised on one of them."""
        failure: SparsePretrainError | None = None
        try:
            action()
        except SparsePretrainError as error:
            failure = error
        failures = [found for found in self.gather(failure) if found is not None]

        def report() -> None:
            for found in failures:
                raise found

        self.first(report)


@contextlib.contextmanager
def join(run: Run) -> Iterator[World]:
    """Join the ranks that a launcher has started for ``run``; all leave together."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    single = World.single(run.parallel.device)
    wanted = getattr(run.parallel, "nproc", None)
    if size == 1:
        if wanted not in (None, 1):
            raise ConfigError(
                f"parallel.nproc={wanted}, but this is the only process: start it with "
                "`sparsepretrain train` or torchrun"
            )
        yield single
        return
    if run.parallel.name == "single":
        raise ConfigError(
            f"parallel=single, but {size} processes were started: give parallel=ddp or fsdp"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if wanted not in (None, here):
        raise ConfigError(f"parallel.nproc={wanted}, but {here} processes were started here")
    if problems := [(key, f" {text}") for key, text in shares(run, size)]:
        raise ConfigError(problems)
    rank = int(os.environ["RANK"])
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = single.device
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=run.parallel.timeout)
    try:
        dist.init_process_group(backend, timeout=patience)
        host: Any = dist.group.WORLD
        if backend != "gloo":
            host = dist.new_group(backend="gloo", timeout=patience)
        yield World(device, rank, size, host, patience)
        dist.barrier(group=host)
        dist.destroy_process_group()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(w in str(error) for w in LOST):
            raise
        if any(word in str(error) for word in TIMES_OUT):  # the other ranks are alive and hang
            seconds = run.parallel.timeout
            raise SparsePretrainError(
                f"the others did not answer for parallel.timeout={seconds} seconds"
            ) from error
        text = f"the other processes are gone: {one_line(error)[:200]}"
        raise RankError(1, text) from error
