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
class Totals:
    """Losses of the micro-batches and requests to stop: one vector, so one all-reduce.

    Each loss comes from one rank, so the sum over ranks is exact.
    """

    both: Tensor
    """fp64; a loss per micro-batch of the global batch, then each of its terms in the same way,
    then a flag per code of :data:`ENDS`."""
    terms: tuple[str, ...] = ()
    """Names of the terms."""

    @classmethod
    def zeros(cls, micro_batches: int, device: torch.device, terms: tuple[str, ...] = ()) -> Totals:
        """Return totals without losses and requests."""
        length = micro_batches * (1 + len(terms)) + len(ENDS)
        return cls(torch.zeros(length, dtype=torch.float64, device=device), terms)

    @property
    def sums(self) -> Tensor:
        """Sum over the items of each micro-batch, (1 + terms, micro-batches); the loss first."""
        return self.both[: -len(ENDS)].view(1 + len(self.terms), -1)

    @property
    def stop_flags(self) -> Tensor:
        """Number of ranks that ask for each code of :data:`ENDS`, (codes,)."""
        return self.both[-len(ENDS) :]


@dataclass
class Step:
    """A step of the optimizer.

    Loss and gradient norm are copied to the host after the backward; :meth:`judge` waits for them
    and asks the guard, once.
    """

    number: int
    """Completed steps, this one included."""
    lr: float
    """Learning rate."""
    items: int
    """Items in the global batch, which the loss is the mean over."""
    waited: float
    """Seconds that the step waited for data."""
    totals: Totals
    """Losses and requests to stop of all ranks."""
    parameters: list[nn.Parameter]
    """Parameters that have a gradient."""
    norms: Tensor
    """Norm of the gradient of each of them, before clipping."""
    norm: Tensor
    """Norm of all gradients; 0-d."""
    guard: Callable[[Step, float, float], bool]
    """Called with the step, its loss and norm when they are read; False: do not update weights."""

    def __post_init__(self) -> None:
        self.nonfinite = ~torch.isfinite(self.totals.both.sum() + self.norm)
        """True if no guard accepts the step; 0-d bool on the device."""
        self.event = False
        """True if the record gets a line for this step regardless of ``log.every``: a switch of
        phase, flips that no later line repeats, or a step that was skipped."""
        self.stop: int | None = None
        """Exit code that the ranks agreed to stop with, once the numbers are read."""
        both = self.totals.both
        values = torch.cat((both, self.norm.reshape(1).to(both.dtype)))
        self._copy = values.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._numbers: tuple[float, float] | None = None
        self._accepted = False
        self.terms: dict[str, float] = {}
        """Means of the terms of the loss over the items, once the numbers are read."""

    def judge(self) -> bool:
        """Wait for loss and norm; return False if the guard refuses the step.

        Raises:
            DivergedError: the guard does not allow to skip the step.
        """
        if self._numbers is None:
            if self._copied is not None:
                self._copied.synchronize()
            *values, norm = self._copy.tolist()
            count = (len(values) - len(ENDS)) // (1 + len(self.totals.terms))
            loss, *terms = (
                sum_in_order(values[start : start + count]) / self.items
                for start in range(0, len(values) - len(ENDS), count)
            )
            self.terms = dict(zip(self.totals.terms, terms, strict=True))
            flags = zip(ENDS, values[-len(ENDS) :], strict=True)
            self.stop = next((code for code, ranks in flags if ranks), None)
            self._accepted = self.guard(self, loss, norm)
            self._numbers = loss, norm
        return self._accepted

    @property
    def loss(self) -> float:
        """Mean loss of the global batch; see :meth:`judge`."""
        self.judge()
        assert self._numbers is not None
        return self._numbers[0]

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping; see :meth:`judge`."""
        self.judge()
        assert self._numbers is not None
        return self._numbers[1]


def sum_in_order(losses: list[float]) -> float:
    """Add the losses in the order of the micro-batches: the same bits for any number of ranks."""
    *_, total = itertools.accumulate(losses)
    return total
