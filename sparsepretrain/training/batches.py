"""Micro-batches in order, prefetched by worker processes if there are any."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from sparsepretrain.errors import DataError, SparsePretrainError
from sparsepretrain.tasks import Batch, Task


class Request(NamedTuple):
    """Arguments of :meth:`Task.batch`; they give the same batch in every process."""

    split: str
    step: int
    positions: range
    size: int


def stream(
    task: Task, requests: Iterable[Request], device: torch.device, workers: int
) -> Iterator[Batch]:
    """Return the batches of ``requests``, in order, on the CPU.

    Args:
        task: with open data.
        requests: batches to make, possibly without end; read a few batches ahead.
        device: where the tensors go next; for a GPU, workers return pinned memory.
        workers: number of processes that make batches; 0: this process, on demand.
    """
    if not workers:
        for request in requests:
            yield task.batch(*request)
        return
    loader = DataLoader(
        _Batches(task),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        # also in a study, which uses a fork server: workers must inherit the open data
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    try:
        while (batch := next(batches, None)) is not None:
            if isinstance(batch, SparsePretrainError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError("workers: a worker process died (out of memory?): lower workers") from error
    finally:
        del batches  # stop the workers now; a traceback would keep this frame until exit


def split_requests(split: str, samples: int, micro: int, batches: int | None) -> list[Request]:
    """Return the first ``batches`` full micro-batches of a split; None: all samples, once each."""
    micro = min(micro, samples)
    if batches is None:
        ends = range(0, samples, micro)
    else:
        ends = range(0, min(batches, samples // micro) * micro, micro)
    return [Request(split, 0, range(i, min(i + micro, samples)), samples) for i in ends]


class TrainingBatches:
    """One rank's micro-batches of each step; consecutive steps are prefetched."""

    def __init__(
        self, task: Task, size: int, micro: int, device: torch.device, workers: int, share: range
    ) -> None:
        self._task = task
        self._size = size
        self._micro = micro
        self._device = device
        self._workers = workers
        self.share = share
        """Indices of the micro-batches within the global batch."""
        self._next = -1
        self._stream: Iterator[Batch] = iter(())

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of ``step``, in order, on the CPU."""
        if step != self._next:
            requests = itertools.chain.from_iterable(map(self._requests, itertools.count(step)))
            self._stream = stream(self._task, requests, self._device, self._workers)
        self._next = step + 1
        return list(itertools.islice(self._stream, len(self.share)))

    def again(self, step: int) -> list[Batch]:
        """Make the micro-batches of a step again, in this process."""
        return [self._task.batch(*request) for request in self._requests(step)]

    def close(self) -> None:
        """Stop the workers; the next :meth:`step` starts new ones."""
        self._next = -1
        self._stream = iter(())

    def _requests(self, step: int) -> list[Request]:
        begins = (index * self._micro for index in self.share)
        positions = [range(begin, begin + self._micro) for begin in begins]
        return [Request("train", step, batch, self._size) for batch in positions]


class _Batches(Dataset[Any]):
    """Dataset of a worker process; it returns user errors, which torch would wrap if raised."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getitem__(self, request: Request) -> Batch | SparsePretrainError:
        try:
            return self._task.batch(*request)
        except SparsePretrainError as error:
            return error


def _start_worker(index: int) -> None:
    # Ctrl-C reaches the whole process group, but only the parent handles it and stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
