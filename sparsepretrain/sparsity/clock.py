"""Clock of a model: completed steps and micro-batch, which key all random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ClockReading = tuple[int, int] | Tensor
"""(completed steps, micro-batch): integers, or int64 (2,), which a graph reads when it runs."""


class Clock:
    """Seed, completed steps and micro-batch, which key the draws of a backward."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.step = 0
        self.micro = 0
        self.begun = 0
        """Micro-batches begun in this process; calls of a layer are numbered within each."""
        self.capacity = 0
        """Largest number of tokens in a micro-batch; 0: all have equally many."""
        self.tensor = torch.zeros(2, dtype=torch.int64, device=device)
        """(step, micro) for compiled and captured graphs, which read it when they run."""
        self._reading: Tensor | None = None  # copy of the tensor as it is now, on a GPU

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reading": None}

    def set(self, step: int, device: torch.device) -> None:
        """Set the completed steps, and move the tensor to ``device``."""
        self.step = step
        self._reading = None
        if self.tensor.device != device:
            # an inference tensor could not be written in training
            with torch.inference_mode(False):
                self.tensor = torch.zeros_like(self.tensor, device=device)
        fill(self.tensor, [step, self.micro])

    def advance_to(self, step: int) -> None:
        """Begin the first micro-batch after ``step`` completed steps; call :meth:`set` later."""
        self.step = step
        self.micro = 0
        self.begun += 1

    def begin_micro(self, micro: int) -> None:
        """Begin the micro-batch that the next forward sees."""
        self.begun += 1
        if micro != self.micro:
            self.micro = micro
            self._reading = None
            fill(self.tensor, [micro], 1)

    def read(self) -> ClockReading:
        """Return (step, micro-batch), as a tensor if a graph has to read it when it runs.

        A forward saves the result for its backward, which may run, or run again under activation
        checkpointing, when the loop has set the clock to another micro-batch. So tensors are
        copies.
        """
        if torch.compiler.is_compiling():
            return self.tensor.clone()
        if not self.tensor.is_cuda:
            return self.step, self.micro
        if torch.cuda.is_current_stream_capturing():  # a replay reads the clock again
            return self.tensor.clone()
        if self._reading is None:
            self._reading = self.tensor.clone()
        return self._reading


class MicroBatches:
    """Number the training forwards since the last step, unless the loop names its micro-batches.

    The number is written to the clock of the model. It is in no buffer: ranks differ in it, and
    DistributedDataParallel broadcasts buffers.

    Args:
        clock: of the model.
        on_begin: called at the start of every micro-batch.
    """

    def __init__(self, clock: Clock, on_begin: Callable[[], None]) -> None:
        self.clock = clock
        self._on_begin = on_begin
        self.counts_forwards = True
        """False if the loop calls `Sparsifier.micro_batch`."""
        self._layer_may_begin = True  # for a root that is bypassed
        self._is_first = True  # the next forward is the first one after a step

    def restart(self) -> None:
        """Begin again with number 0: a step is complete."""
        self.counts_forwards = self._layer_may_begin = self._is_first = True

    def set_index(self, index: int, capacity: int) -> None:
        """Set the micro-batch that the next forward sees."""
        self.clock.capacity = capacity
        self.counts_forwards = False
        self.clock.begin_micro(index)

    def root_runs(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Begin a micro-batch with a training forward of the root."""
        if not (self.counts_forwards and module.training):
            return
        self._layer_may_begin = False
        # A reentrant checkpoint of the root runs it without gradients first, on inputs that
        # require some.
        if torch.is_grad_enabled() or any(getattr(x, "requires_grad", False) for x in args):
            self._begin()

    def layer_runs(self) -> None:
        """Begin a micro-batch with the first layer after a backward if the root was bypassed."""
        # also without gradients, for checkpoints that are recomputed
        if self.counts_forwards and self._layer_may_begin:
            self._begin()

    def backward_runs(self) -> None:
        """Let the next forward begin another micro-batch."""
        self._layer_may_begin = True

    # The public torch.compiler.disable imports 1.3 s of dynamo where it decorates.
    @torch._disable_dynamo
    def _begin(self) -> None:
        if is_recomputing():
            return
        rank = 0
        world = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
            world = torch.distributed.get_world_size()
        self.clock.begin_micro(rank if self._is_first else self.clock.micro + world)
        self._on_begin()
        self._is_first = self._layer_may_begin = False


def is_recomputing() -> bool:
    """Return True in a forward that activation checkpointing runs again.

    Such a forward runs inside a backward, which torch tells by no public function.
    """
    return torch._C._current_graph_task_id() != -1


def fill(numbers: Tensor, values: list[int], first: int = 0) -> None:
    """Write ``values`` from index ``first`` on.

    On a GPU each value is a launch, because a copy from the host would have to be waited for.
    """
    with torch.inference_mode(False):
        if numbers.is_cpu:
            numbers[first:].copy_(torch.tensor(values, device=numbers.device))
            return
        for index, value in enumerate(values, first):
            numbers[index].fill_(value)
