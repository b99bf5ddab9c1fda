"""T-SR-STE: transposable masks, masked decay on gradients, MVUE, dense fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity.policy import Method, MethodOptions, Products, Projection, Window

if TYPE_CHECKING:
    from torch import Tensor

    from sparsepretrain.kernels import NoiseKey


@dataclass(slots=True, kw_only=True)
class TSRSTEOptions(MethodOptions):
    """Options of T-SR-STE; the pattern is 2:4."""

    decay: float = 6.0e-5
    """λ of the masked decay on gradients (GPT-2 124M; between 6e-6 and 1e-3 elsewhere)."""
    refresh: int = 40
    """Optimiser steps between two mask searches (GPT-2, BERT)."""
    mvue: Literal["gradient", "none"] = "gradient"
    """Unbiased 2:4 sampling of the output gradient for wgrad, or none."""
    estimator: Literal["approximate", "exact"] = "approximate"
    """The published sampler, or the one of least variance."""
    dense_tail: float = 0.16666667
    """Last part of the run that trains dense, as a fraction (250,000 of 300,000 steps sparse)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from MethodOptions.problems(self)
        if (self.n, self.m) != (2, 4):
            yield "n", f"and m must be 2 and 4 for transposable masks, got {self.n}:{self.m}"
        if self.decay < 0:
            yield "decay", f"must be ≥ 0, got {self.decay}"
        if self.refresh < 1:
            yield "refresh", f"must be ≥ 1, got {self.refresh}"
        if not 0 <= self.dense_tail < 1:
            yield "dense_tail", f"must lie in [0, 1), got {self.dense_tail}"
        elif self.window.start >= 1 - self.dense_tail:
            yield "dense_tail", f"leaves no sparse step after window.start ({self.window.start})"


@register("method", "tsrste")
class TSRSTE(Method):
    """One mask for W and Wᵀ, refreshed every few steps, so that all three products are sparse."""

    Options = TSRSTEOptions
    summary = "transposable mask every 40 steps, masked decay, MVUE, dense tail"
    paper = "arXiv:2404.01847 (ICML 2024)"
    products = Products(A="Mt∘W", U="MVUE(G)", J="dW + λ(1-Mt)∘W")

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self.samples_wgrad = options.mvue == "gradient"

    @property
    def multiples(self) -> tuple[int, int]:
        """Masks are chosen in blocks of 4×4."""
        return 4, 4

    @property
    def compares(self) -> bool:
        """Only a refresh can flip."""
        return (self.step - self.window[0]) % self.options.refresh == 0

    def window_steps(self, window: Window) -> tuple[int, float]:
        """Sparse until the earlier of window.stop and the dense tail."""
        start, stop = Method.window_steps(self, window)
        tail = self.options.dense_tail
        if tail:
            stop = min(stop, self.steps_of(1 - tail, "dense_tail"))
        return start, stop

    def initial_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        """The mask of the initial weight."""
        return {"mask": self.mask(weight, dim)}

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """The best transposable mask (arXiv:2404.01847 section 5.1)."""
        return kernels.transposable_mask(weight)

    def update_(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> None:
        """Search again at the first sparse step and every ``refresh`` steps after it."""
        if self.compares:
            state["mask"].copy_(self.mask(weight, dim))

    def project(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> Projection:
        """A = B = Mt∘W with the current weights under the mask of the last refresh."""
        return Projection(kernels.apply_mask(weight, state["mask"]), state["mask"])

    def wgrad_gradient(self, grad: Tensor, key: NoiseKey) -> Tensor:
        """U(G) = MVUE along tokens (arXiv:2203.10991)."""
        return kernels.mvue(grad, dim=0, estimator=self.options.estimator, key=key)

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """Masked decay on gradients (arXiv:2404.01847 section 4.2)."""
        kernels.masked_decay_(grad, weight, mask, self.options.decay * scale)

    def operands(self) -> dict[str, str]:
        """The mask is 2:4 along out_features too."""
        return {**Method.operands(self), "dgrad": "Mt∘W 2:4"}
