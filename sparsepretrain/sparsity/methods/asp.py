"""ASP-like one-shot pruning: dense training, then one mask that never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsepretrain.registry import register
from sparsepretrain.sparsity import checks
from sparsepretrain.sparsity.policy import Method, MethodOptions, Products, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from sparsepretrain.kernels import NoiseKey


@dataclass(slots=True, kw_only=True)
class ASPOptions(MethodOptions):
    """Options of one-shot pruning."""

    at: float = 0.5
    """When the zeros are written, as a fraction of the run; 0: before the first forward."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from MethodOptions.problems(self)
        yield from checks.proper_fraction(self, "at")


@register("method", "asp")
class ASP(Method):
    """Zeros are stored in the weight itself; gradients and updates are masked from then on."""

    Options = ASPOptions
    summary = "magnitude mask once, at a chosen step; zeros kept from then on"
    paper = "arXiv:2104.08378"
    products = Products(A="W (zeroed once)", J="M∘dW")

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        at = self.steps_of(options.at, "at") if options.at else 0
        self.at = max(at, self.window[0])
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Pruned from step ``at`` on."""
        super().set_step(step)
        self.pruned = step >= self.at

    @property
    def sparse(self) -> bool:
        """Once the zeros are written."""
        return self.pruned

    def initial_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        """The mask, once it is chosen."""
        return {"mask": self.mask(weight, dim)}

    def update_(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> None:
        """Choose the mask at its step, and write zeros from then on."""
        if self.step == self.at:
            state["mask"].copy_(self.mask(weight, dim))
        if self.pruned:
            # after every step: moments and weight decay would move pruned weights otherwise
            weight.masked_fill_(~state["mask"], 0)

    def project(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> Projection:
        """The weight as it is."""
        return Projection(None, state["mask"] if self.pruned else None)

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """Pruned weights receive nothing."""
        if self.pruned:
            grad.masked_fill_(~mask, 0)
