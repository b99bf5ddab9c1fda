"""Whether a step may change the weights, by its loss and the norm of its gradients."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sparsepretrain.errors import DivergedError

if TYPE_CHECKING:
    from sparsepretrain.training.session import Session

MAX_SKIPS = 10
"""Skipped steps in a row after which ``guard=skip`` and ``guard=spike`` give up."""

MAX_OVERFLOWS = 50
"""The same for gradients under loss scaling: so many halvings make any usable scale useless."""

SPIKE_WINDOW = 128
"""Steps that a loss and a gradient norm are compared with; nothing is a spike before half of them.

Window and width are those of OLMo's SkipStepOptimizer."""

SPIKE_WIDTH = 6.0
"""Standard deviations above the mean of the window from which on a value is a spike."""


class Guard:
    """Judges steps before the optimizer sees them.

    A spike enters the window like every other value, so that a level which stays is accepted after
    at most four steps. Where the method begins or ends to be sparse the loss jumps on purpose: the
    window begins anew.

    Args:
        rule: ``guard`` of the configuration.
    """

    def __init__(self, rule: Literal["stop", "skip", "spike"]) -> None:
        self.rule = rule
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._sparse = False

    def accepts(
        self,
        t: Session,
        loss: float,
        grad_norm: float,
        *,
        step: int,
        culprits: Callable[[], list[str]],
    ) -> bool:
        """True if the weights may be updated; counted in the session.

        Under loss scaling an infinite gradient is an overflow: skipped whatever the rule.

        Args:
            t: the session.
            loss: mean loss of the global batch.
            grad_norm: norm of all gradients, unscaled and not clipped.
            step: number of the step, from 1.
            culprits: names the parameters whose gradient is not finite, in the model's order.

        Raises:
            DivergedError: ``rule`` does not allow to skip, or not once more.
        """
        finite = math.isfinite(loss + grad_norm)
        if finite and not (self.rule == "spike" and self._is_spike(t, loss, grad_norm)):
            t.skips_in_a_row = 0
            return True
        t.skipped += 1
        t.skips_in_a_row += 1
        allowed = 0 if self.rule == "stop" else MAX_SKIPS
        if t.scaler.is_enabled() and math.isfinite(loss):
            allowed = MAX_OVERFLOWS
        if t.skips_in_a_row > allowed:
            times = f", {t.skips_in_a_row} steps in a row" if allowed else ""
            hint = "" if allowed else ", or continue past single steps with guard=skip"
            spike = "the loss or the gradient norm is a spike"
            what = spike if finite else _culprit(loss, culprits)
            raise DivergedError(
                f"step {step}: {what}{times}; nothing was updated. Lower optim.lr or clip{hint}"
            )
        return False

    def _is_spike(self, t: Session, loss: float, grad_norm: float) -> bool:
        if self._sparse != t.sparsifier.sparse:
            self._sparse = t.sparsifier.sparse
            self._losses.clear()
            self._norms.clear()
        # both windows take the value in: no short circuit
        return any([_far_above(self._losses, loss), _far_above(self._norms, grad_norm)])

    def state_dict(self) -> dict[str, Any]:
        """The window; empty where the rule needs none."""
        if self.rule != "spike":
            return {}
        return {"losses": [*self._losses], "norms": [*self._norms], "sparse": self._sparse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; what another rule returned is empty."""
        if self.rule == "spike" and state:
            self._losses.extend(state["losses"])
            self._norms.extend(state["norms"])
            self._sparse = state["sparse"]


def _far_above(window: deque[float], value: float) -> bool:
    """Whether ``value`` is a spike over the window, which takes it in."""
    limit = math.inf
    if len(window) >= SPIKE_WINDOW // 2:
        limit = statistics.fmean(window) + SPIKE_WIDTH * statistics.stdev(window)
    window.append(value)
    return value > limit


@torch.no_grad()
def require_finite_weights(t: Session) -> None:
    """Stop at a weight that is not finite, even behind a mask, where no loss ever shows it.

    Raises:
        DivergedError: whatever ``guard`` says, since every later step would keep it.
    """
    norm = t.world.whole(torch.nn.utils.get_total_norm(t.parameters))
    if math.isfinite(float(norm)):  # one read of the device
        return
    for name in _not_finite(t, dict(t.model.named_parameters())):
        raise DivergedError(
            f"step {t.step}: {name} holds weights that are not finite (a mask may hide them "
            "from the loss); they are not saved. Continue from the checkpoint before, with a "
            "lower optim.lr or clip"
        )


def _culprit(loss: float, culprits: Callable[[], list[str]]) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    names = culprits()
    if not names:
        return "the gradient norm is not finite"
    # backward carries a NaN from where it arises to the layers before it
    others = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]} is not finite{others}"


def _not_finite(t: Session, tensors: dict[str, Tensor]) -> list[str]:
    """Names of those with such an entry, on any process."""
    shards = {name: getattr(value, "_local_tensor", value) for name, value in tensors.items()}
    mine = [name for name, value in shards.items() if not torch.isfinite(value).all()]
    found = set().union(*t.world.gather(mine))
    return [name for name in tensors if name in found]
