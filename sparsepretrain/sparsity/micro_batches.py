"""Number the micro-batches of a step: each has draws of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from sparsepretrain.sparsity.model_state import ModelState


class MicroBatches:
    """Count training forwards since the last step, unless the loop states the micro-batch.

    The number is written to the clock of the model. It is in no buffer: ranks differ in it, and
    DistributedDataParallel broadcasts buffers.

    Args:
        model: state of the model, whose example layer shows if gradients are gone.
    """

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self.capacity = 0
        """Largest number of tokens in a micro-batch; 0: all have equally many."""
        self.counts_forwards = True
        """False if the loop states the micro-batch."""
        self.begins = True
        """True if the next layer that runs begins a micro-batch."""
        self._is_first = True  # the next forward is the first one after a step
        self._had_gradient = False

    def restart(self) -> None:
        """Count from 0 again: a step is complete."""
        self.counts_forwards = self.begins = self._is_first = True

    def state(self, index: int, capacity: int) -> None:
        """Set the micro-batch that the next forward sees."""
        self.capacity, self.counts_forwards = capacity, False
        self.model.clock.set_micro(index)

    def root_runs(self, module: nn.Module, args: Any) -> None:
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
        # although no step was completed. (With zero_grad(set_to_none=False) they are not: such
        # loops call ``Sparsifier.micro_batch``.)
        weight = self.model.example.weight
        has_gradient = weight.is_leaf and weight.grad is not None
        first = self._is_first or (self._had_gradient and not has_gradient)
        self._had_gradient = has_gradient
        rank, world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.model.sync()
        clock = self.model.clock
        clock.set_micro(rank if first else clock.micro + world)
        self._is_first = self.begins = False
