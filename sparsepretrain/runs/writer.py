"""Checkpoint writer, synchronous or in a background thread."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sparsepretrain.errors import one_line
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.checkpoint import ALONE, Ranks, Retention, step_name, writing
from sparsepretrain.runs.tensors import memory


class Writer:
    """Writer of a run's checkpoints, one at a time.

    Args:
        directory: ``checkpoints`` of a run directory.
        background: copy the state in :meth:`save` and write it in a thread; the next :meth:`save`
            or :meth:`join` raises its errors.
        ranks: those that save together; a writer in the background needs a group of its own.
    """

    def __init__(self, directory: Path, *, background: bool, ranks: Ranks = ALONE) -> None:
        self.directory = directory
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[Path] | None = None
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    @property
    def failed(self) -> bool:
        """True if a background write failed and its error was not raised yet."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def save(
        self, step: int, parts: dict[str, Any], *, config: str, keep: Callable[[], Retention]
    ) -> None:
        """Wait for the previous save, then call :func:`checkpoint.save` with ``keep()``."""
        self.join()

        def write(state: dict[str, Any]) -> Path:
            return checkpoint.save(
                self.directory, step, state, config=config, keep=keep(), ranks=self._ranks
            )

        if self._thread is None:
            write(parts)
        else:
            with writing(self.directory / step_name(step)):
                state = self._snapshot(parts)
            self._pending = self._thread.submit(write, state)

    def join(self) -> None:
        """Wait for the pending write and raise its error."""
        if self._pending is not None:
            wait([self._pending])
            done, self._pending = self._pending, None
            done.result()

    def close(self, warn: Callable[[str], None]) -> None:
        """Finish the pending write; its error is only a warning, since the run is ending."""
        if self._thread is not None:
            self._thread.shutdown()
        try:
            self.join()
        except Exception as error:
            warn(one_line(error))

    def _snapshot(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Copy ``parts`` into the host memory of the last snapshot, pinned for a GPU.

        Reuse the memory, because allocating it costs several times the copy: the system clears new
        pages. Copies to pinned memory are asynchronous; one synchronization at the end suffices.
        """
        before, self._copies = self._copies, {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return copy.deepcopy(value)
            # Weights and moments are updated in place, so the next save finds their addresses. A
            # new tensor at an old address is copied like the old one.
            key = memory(value)
            tensor = value.detach()
            if key not in self._copies:  # tied weights stay tied
                old = before.pop(key, None)
                self._copies[key] = (
                    tensor.to("cpu", copy=True, non_blocking=True)  # allocates pinned memory
                    if old is None
                    else old.copy_(tensor, non_blocking=True)
                )
            return self._copies[key]

        state: dict[str, Any] = tree_map(copied, parts)
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(parts)):
            torch.cuda.synchronize()
        return state
