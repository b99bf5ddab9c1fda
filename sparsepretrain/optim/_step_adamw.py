"""AdamW of STEP: the second moment is watched, then frozen (Lu et al., ICML 2023, 2302.01172)."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError, SparsePretrainWarning

DENOMINATORS = ("sqrt_v_plus_eps34", "sqrt_of_v_plus_eps")


class StepAdamW(Optimizer):
    """AdamW that switches itself from a dense to a sparse phase (AutoSwitch).

    Dense phase: ordinary AdamW. At the end of each step the change of the second moment over all
    sparse coordinates, Z, enters a window; when its mean falls below eps (or clipping says so) the
    second moments of the sparse parameters are frozen as v* and the sparse phase begins. From
    then on their update divides by √v* + eps^¾ and v is not updated; others stay with AdamW.

    The sparse parameters are given by :meth:`mark_sparse` (``Sparsifier.attach`` calls it).

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator; also the threshold of AutoSwitch.
        weight_decay: decoupled.
        option: 1: Z is the arithmetic mean of |Δv|, 2: the geometric mean over Δv ≠ 0.
        clipping: (T_min, T_max) in optimiser steps: never before, always after; None: no bound.
        window: length in steps; None: round(1 / (1 - beta2)).
        amsgrad: freeze (and divide by) the largest second moment so far.
        frozen_bias_correction: divide v* by 1 - beta2^t0; the authors' toolkit does not.
        denominator: ``sqrt_v_plus_eps34`` (the toolkit) or ``sqrt_of_v_plus_eps`` (the paper).
        require_full_window: do not switch before the window is full (without clipping).

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        option: int = 1,
        clipping: tuple[int | None, int | None] = (None, None),
        window: int | None = None,
        amsgrad: bool = False,
        frozen_bias_correction: bool = False,
        denominator: str = "sqrt_v_plus_eps34",
        require_full_window: bool = False,
    ) -> None:
        low, high = clipping
        if option not in (1, 2):
            raise ConfigError(f"StepAdamW: option must be 1 or 2, got {option}")
        if denominator not in DENOMINATORS:
            raise ConfigError(f"StepAdamW: denominator must be one of {', '.join(DENOMINATORS)}")
        if low is not None and high is not None and low > high:
            raise ConfigError(f"StepAdamW: clipping needs T_min ≤ T_max, got {low} and {high}")
        if window is not None and window < 1:
            raise ConfigError(f"StepAdamW: window must be ≥ 1, got {window}")
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ConfigError("StepAdamW: needs lr ≥ 0, eps > 0, weight_decay ≥ 0, betas in [0, 1)")
        self.option = option
        self.clipping = (low, high)
        self.amsgrad = amsgrad
        self.frozen_bias_correction = frozen_bias_correction
        self.denominator = denominator
        self.require_full_window = require_full_window
        self.steps = 0
        self.switched_at: int | None = None
        self._sparse: set[int] = set()
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        beta2 = self.param_groups[0]["betas"][1]
        self._changes: deque[float] = deque(maxlen=window or max(1, round(1 / (1 - beta2))))

    @property
    def sparse_phase(self) -> bool:
        """Whether the switch has happened; the step that switches is still a dense one."""
        return self.switched_at is not None

    @property
    def window_mean(self) -> float | None:
        """Mean of the changes in the window; None before the first step."""
        return sum(self._changes) / len(self._changes) if self._changes else None

    @property
    def threshold(self) -> float:
        """ε of the sparse parameters: the phase ends when :attr:`window_mean` falls below it."""
        groups = self.param_groups
        sparse = (g for g in groups if any(id(p) in self._sparse for p in g["params"]))
        return float(next(sparse)["eps"])

    def mark_sparse(self, params: Iterable[Tensor]) -> None:
        """Name the parameters whose second moments are watched and frozen.

        Raises:
            ConfigError: one of them is not in this optimiser, or they differ in eps or beta2,
                for which AutoSwitch has one value.
        """
        marked = {id(p) for p in params}
        groups = [g for g in self.param_groups if any(id(p) in marked for p in g["params"])]
        if not marked <= {id(p) for g in groups for p in g["params"]}:
            raise ConfigError("StepAdamW: a sparse parameter is not in the optimiser")
        if len({(g["eps"], g["betas"][1]) for g in groups}) > 1:
            raise ConfigError("StepAdamW: sparse parameters must share eps and beta2")
        self._sparse = marked

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, then decide about the switch."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.steps += 1
        changes: list[tuple[Tensor, Any]] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sparse = id(p) in self._sparse
                delta = self._update(p, group, sparse)
                if sparse and delta is not None and not self.sparse_phase:
                    changes.append(self._measure(delta))
        if changes:
            totals, counts = zip(*changes, strict=True)
            mean = _number(torch.stack(totals).sum()) / max(_number(sum(counts)), 1.0)
            self._decide(mean if self.option == 1 else math.exp(mean))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state; phase, step count and window included."""
        own = {"steps": self.steps, "switched_at": self.switched_at, "changes": [*self._changes]}
        return super().state_dict() | {"autoswitch": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        own = state_dict["autoswitch"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "autoswitch"})
        self.steps, self.switched_at = own["steps"], own["switched_at"]
        self._changes = deque(own["changes"], maxlen=self._changes.maxlen)

    def _update(self, p: Tensor, group: dict[str, Any], sparse: bool) -> Tensor | None:
        """One parameter; returns v_t - v_{t-1}, or None where v is frozen."""
        beta1, beta2 = group["betas"]
        grad = p.grad
        assert grad is not None
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
            if self.amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        delta, freeze = None, sparse and self.sparse_phase
        if not (freeze and "frozen" in state):
            delta = grad.square().sub_(state["exp_avg_sq"]).mul_(1 - beta2)
            v = state["exp_avg_sq"].add_(delta)
            if self.amsgrad:
                v = torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])
        if not freeze:
            correction = math.sqrt(1 - beta2**self.steps)
            denominator = v.sqrt().div_(correction).add_(group["eps"])
        else:
            if "frozen" not in state:  # had no gradient before the switch
                state["frozen"] = v.clone()
            frozen = state["frozen"]
            if self.frozen_bias_correction:
                assert self.switched_at is not None
                frozen = frozen / (1 - beta2**self.switched_at)
            if self.denominator == "sqrt_of_v_plus_eps":
                denominator = (frozen + group["eps"]).sqrt_()
            else:
                denominator = frozen.sqrt().add_(group["eps"] ** 0.75)
        p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**self.steps))
        return delta

    def _measure(self, delta: Tensor) -> tuple[Tensor, Any]:
        """(Σ|Δ|, number of coordinates), or the sum of logarithms over the non-zero ones."""
        size = delta.abs().double()
        if self.option == 1:
            return size.sum(), size.numel()
        moved = size > 0
        return torch.where(moved, size, 1.0).log_().sum(), moved.sum()

    def _decide(self, change: float) -> None:
        self._changes.append(change)
        mean = self.window_mean
        assert mean is not None
        low, high = self.clipping
        full = len(self._changes) == self._changes.maxlen or not self.require_full_window
        settled = mean < self.threshold and full and (low is None or self.steps > low)
        if not settled and (high is None or self.steps <= high):
            return
        self.switched_at = self.steps
        v = "max_exp_avg_sq" if self.amsgrad else "exp_avg_sq"
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) in self._sparse and self.state[p]:
                    self.state[p]["frozen"] = self.state[p][v].clone()
        correction = 1 - self.param_groups[0]["betas"][1] ** self.steps
        if correction < 0.99 and not self.frozen_bias_correction:
            warnings.warn(
                f"StepAdamW switched at step {self.steps}, before its second moments had settled: "
                f"steps become {correction**-0.5:.2f} times longer; see frozen_bias_correction and "
                "clipping",
                SparsePretrainWarning,
                stacklevel=3,
            )


def _number(value: Any) -> float:
    """Of a sum over sharded tensors (DTensor) that of all shards."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
