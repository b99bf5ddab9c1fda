"""MDGF: pruned weights fade out, instead of vanishing at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain.registry import register
from sparsepretrain.sparsity import checks
from sparsepretrain.sparsity.methods.ste import STE
from sparsepretrain.sparsity.policy import MethodOptions, Products, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from sparsepretrain.kernels import NoiseKey


@dataclass(slots=True, kw_only=True)
class MDGFOptions(MethodOptions):
    """Options of the decaying mask."""

    shape: Literal["linear", "exponential"] = "linear"
    """Of d between 1 and 0: 1 - f or e^(-rate·f), where f is the completed part of the decay."""
    rate: float = 5.0
    """Of ``exponential``: what is left just before the end is e^-rate."""
    until: float = 0.5
    """Fraction of the run at which d becomes 0 and the weights N:M."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from MethodOptions.problems(self)
        yield from checks.at_least(0, self, "rate")
        yield from checks.fraction(self, "until")


@register("method", "mdgf")
class MDGF(STE):
    """Y = X·((M + d(1-M))∘W)ᵀ with d falling from 1 to 0; the gradient passes straight through.

    Mask Decay Gradient Flow (Bambhaniya et al., arXiv:2402.04744). The authors' code decays by a
    coefficient per step and makes the mask binary for its fine-tuning epochs; here both ends are
    fractions of the run (``window.start``, ``until``). Until d is 0 the weights are not N:M, and
    evaluation and ``densify`` use them as they are: densify after ``until``.
    """

    Options = MDGFOptions
    summary = "pruned weights are scaled by d, which decays from 1 to 0"
    paper = "arXiv:2402.04744"
    products = Products(A="(M + d(1-M))∘W")

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        until = self.steps_of(options.until, "until") if options.until else 0
        self.until = max(until, self.window[0])
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Binary from step ``until`` on."""
        super().set_step(step)
        self.binary = step >= self.until

    @property
    def sparse(self) -> bool:
        """Once d is 0."""
        return self.binary

    @property
    def factor(self) -> float:
        """The factor d of pruned weights at this step."""
        if self.binary:
            return 0.0
        if self.step <= self.window[0]:
            return 1.0
        part = (self.step - self.window[0]) / (self.until - self.window[0])
        return 1 - part if self.options.shape == "linear" else math.exp(-self.options.rate * part)

    def metrics(self) -> dict[str, float]:
        """``mask_decay``: d."""
        return {"mask_decay": self.factor}

    def initial_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        """The factor d, as a tensor: it changes every step."""
        return {"factor": weight.new_ones(()).float()}

    def update_(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> None:
        """The factor of the next step."""
        state["factor"].fill_(self.factor)

    def project(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> Projection:
        """A = (M + d(1-M))∘W."""
        if self.binary:
            return super().project(weight, dim, state, key)
        mask = self.mask(weight, dim)
        return Projection(weight.where(mask, weight * state["factor"]), mask)

    def operands(self) -> dict[str, str]:
        """Of the end: N:M once d is 0."""
        n, m = self.pattern
        return {"fprop": f"M∘W {n}:{m} from until", "dgrad": "A", "wgrad": "G"}
