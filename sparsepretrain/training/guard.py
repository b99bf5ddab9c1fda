"""Decide from loss and gradient norm if a step may change the weights, and check the weights."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from sparsepretrain.errors import DivergedError
from sparsepretrain.training.world import World

MAX_SKIPS = 10
"""Skipped steps in a row after which ``guard=skip`` and ``guard=spike`` give up."""

MAX_OVERFLOWS = 50
"""Overflows in a row under loss scaling after which the run stops: after 50 halvings no scale is
usable."""

SPIKE_WINDOW = 128
"""Number of past steps whose loss and gradient norm a new step is compared with.

Until half of them exist, no value is a spike. Window and width are those of OLMo's
SkipStepOptimizer."""

SPIKE_WIDTH = 6.0
"""Standard deviations above the mean of the window beyond which a value is a spike."""


class Guard:
    """Judge steps before the optimizer sees them.

    A spike enters the window like every other value, so a new level is accepted after at most four
    steps. The loss is expected to jump where sparse training begins or ends, so the window is
    cleared there.
    """

    def __init__(self, rule: Literal["stop", "skip", "spike"]) -> None:
        self.rule = rule
        self.skipped = 0
        """Steps without an update so far."""
        self.skips_in_a_row = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._sparse = False

    def accepts(
        self,
        loss: float,
        grad_norm: float,
        *,
        step: int,
        sparse: bool,
        scaled: bool,
        culprits: Callable[[], list[str]],
    ) -> bool:
        """Return True if the weights may be updated, and count the step if not.

        Under loss scaling an infinite gradient is an overflow, which every rule skips.

        Args:
            loss: mean loss of the global batch.
            grad_norm: norm of all gradients, unscaled and not clipped.
            step: number of the step, from 1.
            sparse: the step trains sparse.
            scaled: the loss is scaled.
            culprits: names the parameters whose gradient is not finite, in the model's order.

        Raises:
            DivergedError: ``rule`` allows no skip, or no further one.
        """
        finite = math.isfinite(loss + grad_norm)
        if finite and not (self.rule == "spike" and self._is_spike(loss, grad_norm, sparse)):
            self.skips_in_a_row = 0
            return True
        self.skipped += 1
        self.skips_in_a_row += 1
        allowed = 0 if self.rule == "stop" else MAX_SKIPS
        if scaled and math.isfinite(loss):
            allowed = MAX_OVERFLOWS
        if self.skips_in_a_row > allowed:
            times = f", {self.skips_in_a_row} steps in a row" if allowed else ""
            hint = "" if allowed else ", or continue past single steps with guard=skip"
            spike = "the loss or the gradient norm is a spike"
            cause = spike if finite else _culprit(loss, culprits)
            raise DivergedError(
                f"step {step}: {cause}{times}; nothing was updated. Lower optim.lr or clip{hint}"
            )
        return False

    def _is_spike(self, loss: float, grad_norm: float, sparse: bool) -> bool:
        if self._sparse != sparse:
            self._sparse = sparse
            self._losses.clear()
            self._norms.clear()
        # both windows take their value: no short circuit
        return any([_far_above(self._losses, loss), _far_above(self._norms, grad_norm)])

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the window if the rule needs it."""
        state: dict[str, Any] = {"skipped": self.skipped, "skips_in_a_row": self.skips_in_a_row}
        if self.rule == "spike":
            state |= {"losses": [*self._losses], "norms": [*self._norms], "sparse": self._sparse}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters, and the window if it was saved and this rule needs it."""
        self.skipped, self.skips_in_a_row = state["skipped"], state["skips_in_a_row"]
        if self.rule == "spike" and "losses" in state:
            self._losses.extend(state["losses"])
            self._norms.extend(state["norms"])
            self._sparse = state["sparse"]


@torch.no_grad()
def require_finite_weights(
    model: nn.Module, parameters: list[nn.Parameter], world: World, step: int
) -> None:
    """Stop at a weight that is not finite, even behind a mask, where no loss ever shows it.

    Args:
        model: on this rank.
        parameters: of the model.
        world: of all ranks, which raise the same error.
        step: completed steps.
    """
    norm = world.whole(torch.nn.utils.get_total_norm(parameters))
    if math.isfinite(float(norm)):  # one read of the device
        return
    named = {k: getattr(p, "_local_tensor", p) for k, p in model.named_parameters()}
    mine = [name for name, value in named.items() if not torch.isfinite(value).all()]
    found = set().union(*world.gather(mine))
    for name in (name for name in named if name in found):
        raise DivergedError(
            f"step {step}: {name} holds weights that are not finite (a mask may hide them from the "
            "loss); they are not saved. Continue from the checkpoint before, with a lower optim.lr "
            "or clip"
        )


def _far_above(window: deque[float], value: float) -> bool:
    """Return True if ``value`` is a spike, and append it to the window."""
    limit = math.inf
    if len(window) >= SPIKE_WINDOW // 2:
        limit = statistics.fmean(window) + SPIKE_WIDTH * statistics.stdev(window)
    window.append(value)
    return value > limit


def _culprit(loss: float, culprits: Callable[[], list[str]]) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    names = culprits()
    if not names:
        return "the gradient norm is not finite"
    # backward carries a NaN from its origin to all layers before it
    others = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]} is not finite{others}"
