"""One optimizer step: what the host knows at once, and numbers that come from the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsepretrain.errors import INTERRUPTED, PREEMPTED, CheckpointError

STOPS = (PREEMPTED, INTERRUPTED)
"""Exit codes of signals."""

ENDS = (*STOPS, CheckpointError.exit_code)
"""Exit codes to stop with; the first of them that any rank has counts."""


@dataclass
class Step:
    """A step of the optimizer.

    Loss and gradient norm are copied to the host after the backward. Reading them at once would
    leave the device idle while the host launches the optimizer, so the loop reads them one step
    later where the optimizer skips refused gradients by itself.
    """

    number: int
    """Completed steps, this one included."""
    lr: float
    """Learning rate."""
    items: int
    """Items in the global batch, which the loss is the mean over."""
    waited: float
    """Seconds that the step waited for data."""
    losses: Tensor
    """Losses of the micro-batches and a flag per code of :data:`ENDS`; fp64."""
    parameters: list[nn.Parameter]
    """Parameters that have a gradient."""
    norms: Tensor
    """Norm of the gradient of each of them, before clipping."""
    norm: Tensor
    """Norm of all gradients; 0-d."""
    judge: Callable[[Step, float, float], bool]
    """Called with the step, its loss and norm when they are read; False: do not update weights."""

    def __post_init__(self) -> None:
        self.nonfinite = ~torch.isfinite(self.losses.sum() + self.norm)
        """True if no guard accepts the step; 0-d bool on the device."""
        self.event = False
        """True if the record gets a line for this step regardless of ``log.every``: a switch of
        phase, flips that no later line repeats, or a step that was skipped."""
        self.stop: int | None = None
        """Exit code that the ranks agreed to stop with, once the numbers are read."""
        values = torch.cat((self.losses, self.norm.reshape(1).to(self.losses.dtype)))
        self._copy = values.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._numbers: tuple[float, float] | None = None
        self._accepted = False

    def read(self) -> bool:
        """Wait for loss and norm; False if the guard refuses the step.

        Raises:
            DivergedError: the guard does not allow to skip the step.
        """
        if self._numbers is None:
            if self._copied is not None:
                self._copied.synchronize()
            *losses, norm = self._copy.tolist()
            total, self.stop = total_and_stop(losses)
            self._accepted = self.judge(self, total / self.items, norm)
            self._numbers = total / self.items, norm
        return self._accepted

    @property
    def loss(self) -> float:
        """Mean loss of the global batch."""
        self.read()
        assert self._numbers is not None
        return self._numbers[0]

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping."""
        self.read()
        assert self._numbers is not None
        return self._numbers[1]


def total_and_stop(values: list[float]) -> tuple[float, int | None]:
    """Add the losses in the order of the micro-batches; return sum and exit code."""
    *_, total = itertools.accumulate(values[: -len(ENDS)])
    return total, next((c for c, v in zip(ENDS, values[-len(ENDS) :], strict=True) if v), None)
