"""Decide from loss and gradient norm if a step may change the weights, and check the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from sparsepretrain.errors import DivergedError
from sparsepretrain.training.world import World

MAX_SKIPS = 10
"""Skipped steps in a row after which ``guard=skip`` gives up."""

MAX_OVERFLOWS = 50
"""Overflows in a row under loss scaling after which the run stops: after 50 halvings no scale is
usable."""


class Guard:
    """Judge steps before the optimizer sees them."""

    def __init__(self, rule: Literal["stop", "skip"]) -> None:
        self.rule = rule
        self.skipped = 0
        """Steps without an update so far."""
        self.skips_in_a_row = 0

    def accepts(
        self,
        loss: float,
        grad_norm: float,
        *,
        step: int,
        scaled: bool,
        culprits: Callable[[], list[str]],
    ) -> bool:
        """Return True if the weights may be updated, and count the step if not.

        Under loss scaling an infinite gradient is an overflow, which every rule skips.

        Args:
            loss: mean loss of the global batch.
            grad_norm: norm of all gradients, unscaled and not clipped.
            step: number of the step, from 1.
            scaled: the loss is scaled.
            culprits: names the parameters whose gradient is not finite, in the model's order.

        Raises:
            DivergedError: ``rule`` allows no skip, or no further one.
        """
        if math.isfinite(loss + grad_norm):
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
            raise DivergedError(
                f"step {step}: {_culprit(loss, culprits)}{times}; nothing was updated. Lower "
                f"optim.lr or clip{hint}"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"skipped": self.skipped, "skips_in_a_row": self.skips_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self.skipped, self.skips_in_a_row = state["skipped"], state["skips_in_a_row"]


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


def _culprit(loss: float, culprits: Callable[[], list[str]]) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    names = culprits()
    if not names:
        return "the gradient norm is not finite"
    # backward carries a NaN from its origin to all layers before it
    others = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]} is not finite{others}"
