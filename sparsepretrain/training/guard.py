"""Decide from loss and gradient norm if a step may change the weights, and check the weights."""

from __future__ import annotations

import math
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
"""Last steps whose loss and gradient norm a new step is compared with. Until half of them exist, no
value is a spike. Window and width are those of OLMo 2 (arXiv:2501.00656, SkipStepOptimizer)."""

SPIKE_WIDTH = 6.0
"""Standard deviations above the mean of the window beyond which a value is a spike."""


class Guard:
    """Judge steps before the optimizer sees them.

    ``guard=spike`` keeps a window of losses and one of gradient norms. Spikes enter it like other
    values, so that a lasting new level is accepted: six standard deviations of 128 values are wide
    enough after four of them. Values that are not finite stay out, or no later value would be a
    spike. The windows start again where training becomes sparse or dense, because the loss jumps
    there.
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

        Under loss scaling an infinite gradient is an overflow, which every rule skips. All ranks
        decide the same, because loss and norm of the global batch are equal on all of them.

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
        spike = finite and self.rule == "spike" and self._is_spike(loss, grad_norm, sparse)
        if finite and not spike:
            self.skips_in_a_row = 0
            return True
        self.skipped += 1
        self.skips_in_a_row += 1
        allowed = 0 if self.rule == "stop" else MAX_SKIPS
        if scaled and math.isfinite(loss) and not spike:
            allowed = MAX_OVERFLOWS
        if self.skips_in_a_row > allowed:
            times = f", {self.skips_in_a_row} steps in a row" if allowed else ""
            hint = "" if allowed else ", or continue past single steps with guard=skip"
            jumps = f"loss {loss:.4g} or gradient norm {grad_norm:.4g} is a spike"
            cause = jumps if spike else _culprit(loss, culprits)
            raise DivergedError(
                f"step {step}: {cause}{times}; nothing was updated. Lower optim.lr or clip{hint}"
            )
        return False

    def _is_spike(self, loss: float, grad_norm: float, sparse: bool) -> bool:
        if self._sparse != sparse:
            self._sparse = sparse
            self._losses.clear()
            self._norms.clear()
        spikes = [_is_far_above(self._losses, loss), _is_far_above(self._norms, grad_norm)]
        self._losses.append(loss)
        self._norms.append(grad_norm)
        return any(spikes)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the windows, which are empty unless the rule is spike."""
        return {
            "skipped": self.skipped,
            "skips_in_a_row": self.skips_in_a_row,
            "losses": [*self._losses],
            "norms": [*self._norms],
            "sparse": self._sparse,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters, and the windows if the rule is spike."""
        self.skipped = state["skipped"]
        self.skips_in_a_row = state["skips_in_a_row"]
        if self.rule == "spike":
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
    nonfinite_here = [name for name, value in named.items() if not torch.isfinite(value).all()]
    nonfinite = set().union(*world.gather(nonfinite_here))
    for name in (name for name in named if name in nonfinite):
        raise DivergedError(
            f"step {step}: {name} holds weights that are not finite (a mask may hide them from the "
            "loss); they are not saved. Continue from the checkpoint before, with a lower optim.lr "
            "or clip"
        )


def _is_far_above(window: deque[float], value: float) -> bool:
    """Return True if ``value`` is above the mean by more than the allowed standard deviations."""
    if len(window) < SPIKE_WINDOW // 2:
        return False
    # math.fsum rounds once, so that ranks on different CPUs cannot decide differently; x * x
    # overflows to infinity, where x**2 would raise an error
    mean = math.fsum(window) / len(window)
    variance = math.fsum((x - mean) * (x - mean) for x in window) / (len(window) - 1)
    return value > mean + SPIKE_WIDTH * math.sqrt(variance)


def _culprit(loss: float, culprits: Callable[[], list[str]]) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    names = culprits()
    if not names:
        return "the gradient norm is not finite"
    # backward carries a NaN from its origin to all layers before it
    more = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]} is not finite{more}"
