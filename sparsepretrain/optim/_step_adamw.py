"""AdamW of STEP, which freezes the second moments (Lu et al., ICML 2023, arXiv:2302.01172)."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.optim._initialization import creates_state

DENOMINATORS = ("sqrt_v_plus_eps34", "sqrt_of_v_plus_eps")

Tensors = list[Tensor] | tuple[Tensor, ...]

AT_ONCE = 2**16
"""Maximum elements of a foreach call over small parameters; fits CPU caches."""


class StepAdamW(Optimizer):
    """AdamW with an automatic switch from a dense to a sparse phase (AutoSwitch).

    The dense phase is ordinary AdamW. After each step, the change Z of the second moments of all
    sparse coordinates enters a window. When the window's mean falls below eps, or at the bounds of
    ``clipping``, the second moments of sparse parameters are frozen as v*. In the sparse phase
    their update divides by √v* + eps^¾; other parameters continue with AdamW.

    :meth:`mark_sparse`, called by ``Sparsifier.attach``, sets the sparse parameters.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator; also the threshold of AutoSwitch.
        weight_decay: decoupled weight decay.
        option: 1: Z is the arithmetic mean of |Δv|, 2: the geometric mean over Δv ≠ 0.
        clipping: (T_min, T_max), bounds of the switch in optimizer steps; None: no bound.
        window: window length in steps; None: round(1 / (1 - beta2)).
        amsgrad: freeze (and divide by) the largest second moment so far.
        frozen_bias_correction: divide v* by 1 - beta2^t0; the authors' toolkit does not.
        denominator: ``sqrt_v_plus_eps34`` (the toolkit) or ``sqrt_of_v_plus_eps`` (the paper).
        require_full_window: do not switch before the window is full, except at T_max.

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
        self._sparse: set[int] = set()
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        beta2 = self.param_groups[0]["betas"][1]
        self.window = window or max(1, round(1 / (1 - beta2)))
        # Stored in a group: torch's distributed checkpoints save groups and state only.
        self.param_groups[0] |= {"steps": 0, "switched_at": None, "changes": []}

    @property
    def steps(self) -> int:
        """Completed steps."""
        return int(self.param_groups[0]["steps"])

    @property
    def switched_at(self) -> int | None:
        """Last step of the dense phase; None before the switch."""
        return self.param_groups[0]["switched_at"]

    @property
    def changes(self) -> list[float]:
        """Z of at most :attr:`window` last steps of the dense phase."""
        return self.param_groups[0]["changes"]

    @property
    def sparse_phase(self) -> bool:
        """True after the switch; the switching step itself is dense."""
        return self.switched_at is not None

    @property
    def window_mean(self) -> float | None:
        """Mean of the changes in the window; None before the first step."""
        return sum(self.changes) / len(self.changes) if self.changes else None

    @property
    def threshold(self) -> float:
        """Threshold of :attr:`window_mean`: eps of the sparse parameters."""
        groups = self.param_groups
        sparse = (g for g in groups if any(id(p) in self._sparse for p in g["params"]))
        # without one, since all are frozen, nothing is compared with the threshold
        return float(next(sparse, groups[0])["eps"])

    def mark_sparse(self, params: Iterable[Tensor]) -> None:
        """Set the parameters whose second moments are monitored and frozen.

        Parameters that are not trained may join the optimizer later.
        """
        params = list(params)
        marked = {id(p) for p in params}
        groups = [g for g in self.param_groups if any(id(p) in marked for p in g["params"])]
        held = {id(p) for g in groups for p in g["params"]}
        if any(p.requires_grad and id(p) not in held for p in params):
            raise ConfigError("StepAdamW: a sparse parameter is not in the optimizer")
        if len({(g["eps"], g["betas"][1]) for g in groups}) > 1:
            raise ConfigError("StepAdamW: sparse parameters must share eps and beta2")
        self._sparse = marked

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient, then decide about the switch."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if creates_state(self):  # a step of torch.distributed.checkpoint, which trains nothing
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._begin(p)
            return loss
        self.param_groups[0]["steps"] += 1
        every = [_local(p) for group in self.param_groups for p in group["params"]]
        # temporaries of a call are at most twice those of the largest parameter
        most = max([AT_ONCE, *(p.numel() for p in every if not p.is_cpu)])
        measured: list[Tensor] = []
        watched: list[Tensor] = []
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            new = [p for p in used if not self.state[p]]
            for p in new:
                self._begin(p)
            if self.sparse_phase and (late := [p for p in new if id(p) in self._sparse]):
                self._second_moments(late, group)  # first gradient after the switch: v* = first v
            for params in _parts([p for p in used if id(p) not in self._sparse], most):
                self._update(params, group, self._second_moments(params, group)[1])
            sparse = [p for p in used if id(p) in self._sparse]
            for params in _parts(sparse, most):
                if self.sparse_phase:
                    self._update_frozen(params, group)
                    continue
                delta, v = self._second_moments(params, group)
                measured.append(self._measure(delta))
                del delta  # free memory before denominators are allocated
                self._update(params, group, v)
            watched += sparse
        if measured:
            total, moved = _over_shards(torch.stack(measured).sum(0), watched[0]).tolist()
            count = sum(p.numel() for p in watched) if self.option == 1 else moved
            mean = total / max(count, 1.0)
            self._decide(mean if self.option == 1 else math.exp(mean))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; raise ValueError for another optimizer's."""
        if "switched_at" not in state_dict["param_groups"][0]:
            raise ValueError("StepAdamW: its phase is missing in the first parameter group")
        super().load_state_dict(state_dict)

    def _begin(self, p: Tensor) -> None:
        state = self.state[p]
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
        if self.amsgrad:
            state["max_exp_avg_sq"] = torch.zeros_like(p)

    def _local_state(self, params: list[Tensor], key: str) -> list[Tensor]:
        return [_local(self.state[p][key]) for p in params]

    def _second_moments(
        self, params: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensors, Tensors]:
        """Update v; return v_t - v_{t-1} and the second moments for the denominators."""
        beta2 = group["betas"][1]
        grads = _gradients(params)
        v = self._local_state(params, "exp_avg_sq")
        delta = torch._foreach_mul(grads, grads)
        torch._foreach_sub_(delta, v)
        torch._foreach_mul_(delta, 1 - beta2)
        torch._foreach_add_(v, delta)
        if self.amsgrad:
            newest, v = v, self._local_state(params, "max_exp_avg_sq")
            torch._foreach_maximum_(v, newest)
        return delta, v

    def _update(self, params: list[Tensor], group: dict[str, Any], v: Tensors) -> None:
        """Apply AdamW's step."""
        denominators = torch._foreach_sqrt(v)
        torch._foreach_div_(denominators, math.sqrt(1 - group["betas"][1] ** self.steps))
        torch._foreach_add_(denominators, group["eps"])
        self._divide(params, group, denominators)

    def _update_frozen(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Apply the step of the sparse phase with constant v* = v."""
        v: Tensors = self._local_state(params, "max_exp_avg_sq" if self.amsgrad else "exp_avg_sq")
        if self.frozen_bias_correction:
            assert self.switched_at is not None
            v = torch._foreach_div(v, 1 - group["betas"][1] ** self.switched_at)
        if self.denominator == "sqrt_of_v_plus_eps":
            denominators = torch._foreach_add(v, group["eps"])
            torch._foreach_sqrt_(denominators)
        else:
            denominators = torch._foreach_sqrt(v)
            torch._foreach_add_(denominators, group["eps"] ** 0.75)
        self._divide(params, group, denominators)

    def _divide(self, params: list[Tensor], group: dict[str, Any], denominators: Tensors) -> None:
        """Apply weight decay, update the first moments and step along them."""
        beta1 = group["betas"][0]
        weights = [_local(p) for p in params]
        m = self._local_state(params, "exp_avg")
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(m, _gradients(params), 1 - beta1)
        rate = -group["lr"] / (1 - beta1**self.steps)
        torch._foreach_addcdiv_(weights, m, denominators, value=rate)

    def _measure(self, delta: Tensors) -> Tensor:
        """Return [Σ|Δ|, 0], or Σ log|Δ| and the count of coordinates with Δ ≠ 0."""
        size = torch.cat([part.flatten() for part in delta]).abs_()
        if self.option == 1:
            total = size.sum(dtype=torch.float64)
            return torch.stack([total, torch.zeros_like(total)])
        moved = size > 0
        logs = size.masked_fill_(~moved, 1.0).log_()
        return torch.stack([logs.sum(dtype=torch.float64), moved.sum()])

    def _decide(self, change: float) -> None:
        group = self.param_groups[0]
        group["changes"] = [*self.changes, change][-self.window :]  # state dicts share the old list
        mean = self.window_mean
        assert mean is not None
        low, high = self.clipping
        full = len(self.changes) == self.window or not self.require_full_window
        settled = mean < self.threshold and full and (low is None or self.steps > low)
        if not settled and (high is None or self.steps <= high):
            return
        group["switched_at"] = self.steps
        correction = 1 - group["betas"][1] ** self.steps
        if correction < 0.99 and not self.frozen_bias_correction:
            warnings.warn(
                f"StepAdamW switched at step {self.steps}, before its second moments had settled: "
                f"steps become {correction**-0.5:.2f} times longer; see frozen_bias_correction and "
                "clipping",
                SparsePretrainWarning,
                stacklevel=3,
            )


def _parts(params: list[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Split ``params`` into lists of about ``most`` elements, at most twice as many."""
    ends = itertools.accumulate(_local(p).numel() for p in params)
    for _, part in itertools.groupby(zip(params, ends, strict=True), lambda pair: pair[1] // most):
        yield [p for p, _ in part]


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard; all operations except the sum over Δv are elementwise."""
    return getattr(tensor, "_local_tensor", tensor)


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [_local(p.grad) for p in params if p.grad is not None]


def _over_shards(sums: Tensor, like: Any) -> Tensor:
    """All-reduce sums over local shards of tensors sharded like ``like``."""
    if not hasattr(like, "placements"):
        return sums
    from torch.distributed.tensor import DTensor, Partial, Replicate

    places = [Partial() if place.is_shard() else Replicate() for place in like.placements]
    return DTensor.from_local(sums, like.device_mesh, places, run_check=False).full_tensor()
