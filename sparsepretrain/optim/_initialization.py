"""Recognize the step with which torch creates an optimizer's state before it loads a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer


def creates_state(optimizer: Optimizer) -> bool:
    """Return True if the step that ``optimizer`` is about to take trains nothing.

    ``torch.distributed.checkpoint.state_dict`` gives an optimizer without state zero gradients and
    learning rate 0, and steps it (``_init_optim_state``). Such a step must not be counted. A
    stateless optimizer is stepped like this at every save. Collective where gradients are sharded.
    """
    groups = optimizer.param_groups
    rates = [group.get("lr") for group in groups]  # None: Adafactor computes its own
    if optimizer.state or any(rate is None or float(rate) != 0.0 for rate in rates):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return False
    # The largest magnitude: squares of tiny gradients would underflow.
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf)
    # All ranks must agree, and a rank may hold no rows of any gradient.
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) == 0.0


def forget_step(optimizer: Optimizer) -> None:
    """Set the step counters that torch's step has raised back to 0.

    A checkpoint has no state of a parameter that had no gradient yet, such as an adapter before its
    phase. Its moments then stay zeros, and its counter must be that of an untouched parameter.
    """
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0
