"""Clock of a model: completed steps and micro-batch, which key all random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Moment = tuple[int, int] | Tensor
"""(completed steps, micro-batch): integers, or int64 (2,), which a graph reads when it runs."""


class Clock:
    """Completed steps and micro-batch, which key the draws of a backward."""

    def __init__(self, device: torch.device) -> None:
        self.step, self.micro = 0, 0
        self.tensor = torch.zeros(2, dtype=torch.int64, device=device)
        """(step, micro) for compiled and captured graphs, which read it when they run."""
        self._reading: Tensor | None = None  # copy of the tensor as it is now, on a GPU

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reading": None}

    def set(self, step: int, device: torch.device) -> None:
        """Set the completed steps, and move the tensor to ``device``."""
        self.step, self._reading = step, None
        if self.tensor.device != device:
            # an inference tensor could not be written in training
            with torch.inference_mode(False):
                self.tensor = torch.zeros_like(self.tensor, device=device)
        fill(self.tensor, [step, self.micro])

    def set_micro(self, micro: int) -> None:
        """Set the micro-batch that the next forward sees."""
        if micro != self.micro:
            self.micro, self._reading = micro, None
            fill(self.tensor, [micro], 1)

    def now(self) -> Moment:
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
    """Count training forwards since the last step, unless `Sparsifier.micro_batch` is called.

    The number is written to the clock of the model. It is in no buffer: ranks differ in it, and
    DistributedDataParallel broadcasts buffers.
    """

    def __init__(
        self, clock: Clock, has_gradient: Callable[[], bool], sync: Callable[[], None]
    ) -> None:
        self.clock, self._has_gradient, self._sync = clock, has_gradient, sync
        self.capacity = 0
        """Largest number of tokens in a micro-batch; 0: all have equally many."""
        self.counts_forwards = True
        """False if the loop calls `Sparsifier.micro_batch`."""
        self.begins = True
        """True if the next layer that runs begins a micro-batch."""
        self._is_first = True  # the next forward is the first one after a step
        self._had_gradient = False

    def restart(self) -> None:
        """Count from 0 again: a step is complete."""
        self.counts_forwards = self.begins = self._is_first = True

    def set_index(self, index: int, capacity: int) -> None:
        """Set the micro-batch that the next forward sees."""
        self.capacity, self.counts_forwards = capacity, False
        self.clock.set_micro(index)

    def root_runs(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Count a training forward of the root."""
        if self.counts_forwards and module.training:
            self.begins = False
            # A reentrant checkpoint of the root runs it without gradients first, on inputs that
            # require some.
            if torch.is_grad_enabled() or any(getattr(x, "requires_grad", False) for x in args):
                self.count()

    def layer_runs(self) -> None:
        """Count the training forward of a layer whose root was bypassed."""
        # also without gradients, for checkpoints that are recomputed
        if self.counts_forwards and self.begins:
            self.count()

    def backward_runs(self) -> None:
        """Let the next forward begin another micro-batch."""
        self.begins = True

    @torch._disable_dynamo  # torch.compiler.disable without importing 1.3 s of dynamo
    def count(self) -> None:
        """Begin the next micro-batch."""
        transformed = torch._C._functorch.maybe_current_level() is not None
        if torch._C._current_graph_task_id() != -1 or transformed:  # recomputed, or by torch.func
            return
        # No hook of the optimizer sees a step that a loss scaler skips. But the gradients are gone
        # although no step was completed. (This is not seen with one micro-batch per step or with
        # zero_grad(set_to_none=False): such loops call ``Sparsifier.micro_batch``.)
        has_gradient = self._has_gradient()
        first = self._is_first or (self._had_gradient and not has_gradient)
        self._had_gradient = has_gradient
        rank, world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._sync()
        self.clock.set_micro(rank if first else self.clock.micro + world)
        self._is_first = self.begins = False


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
