"""AdamW with its own update of masked weights: base of the optimizers of AST and CAST."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from sparsepretrain.errors import ConfigError
from sparsepretrain.optim._initialization import creates_state


class MaskedAdamW(Optimizer, abc.ABC):
    """AdamW; a weight with a mask follows :meth:`direction` instead of its first moment.

    In step t, counted from 1, with the gradient g and the mask M of a weight W:

        m ← β1·m + (1-β1)·g
        u = direction(m, W, M)
        v ← β2·v + (1-β2)·u²
        W ← W·(1 - lr·weight_decay) - lr·(u/(1-β1^t)) / (√(v/(1-β2^t)) + ε)

    All other parameters are those of torch.optim.AdamW, where u = m and v is the mean of g².
    ``Sparsifier.attach`` checks the sparse weights, and before each step its hooks pass their masks
    (:attr:`masks`); without it no weight has a mask.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.

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
    ) -> None:
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            name = type(self).__name__
            raise ConfigError(f"{name}: needs lr ≥ 0, eps > 0, weight_decay ≥ 0, betas in [0, 1)")
        self.masks: Mapping[Tensor, Tensor] = {}
        """Masks of the next step: Parameter -> bool, True where kept, of its shape on this rank."""
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @abc.abstractmethod
    def direction(self, momentum: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        """Return u, a new tensor; all have the shape of the weight.

        Args:
            momentum: first moment m, after the gradient was added.
            weight: before this step.
            mask: bool, True where kept.
        """

    def mark_sparse(self, params: Iterable[Tensor]) -> None:
        """Refuse sparse weights in which the decay would be lost to rounding (ConfigError)."""
        if narrow := [p.dtype for p in params if p.requires_grad and p.dtype.itemsize < 4]:
            dtype = str(narrow[0]).removeprefix("torch.")
            raise ConfigError(
                f"{type(self).__name__} needs fp32 weights, got {dtype}: rounding would lose most "
                "of the decay, which moves a weight by less than its last digit in a step; keep "
                "fp32 parameters and use autocast"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        only_creates = creates_state(self)  # a step of torch.distributed.checkpoint
        masks, self.masks = self.masks, {}
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for p in used:
                if not self.state[p]:
                    self.state[p]["step"] = torch.tensor(0.0)  # on the host, where it is read
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            if only_creates:
                continue
            self._update_dense([p for p in used if p not in masks], group)
            for p in used:
                if p in masks:
                    self._update_masked(p, group, masks[p])
        return loss

    def _update_dense(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Take the step of torch.optim.AdamW."""
        if not params:
            return
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            [local(p) for p in params],
            [local(p.grad) for p in params if p.grad is not None],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            # Not fused: on a GPU that step needs its counts there, where reading them waits. On a
            # CPU it would be faster, with other digits, and runs on CPUs check those on GPUs.
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update_masked(self, p: Tensor, group: dict[str, Any], mask: Tensor) -> None:
        """Take the step of a weight with a mask."""
        assert p.grad is not None
        state = self.state[p]
        state["step"] += 1
        t = state["step"].item()
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        weight = local(p)
        momentum = local(state["exp_avg"])
        square = local(state["exp_avg_sq"])
        momentum.lerp_(local(p.grad), 1 - beta1)
        u = self.direction(momentum, weight, mask)
        square.mul_(beta2).addcmul_(u, u, value=1 - beta2)
        denominator = (square / (1 - beta2**t)).sqrt_().add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(u, denominator, value=-rate / (1 - beta1**t))


def local(tensor: Tensor) -> Tensor:
    """Return the plain tensor of a shard, in the same memory; all updates are elementwise."""
    shard = getattr(tensor, "_local_tensor", tensor)
    plain: Tensor = getattr(shard, "_tensor", shard)  # FSDP shards sparse weights as a subclass
    return plain
