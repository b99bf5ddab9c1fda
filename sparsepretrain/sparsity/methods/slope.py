"""SLoPe's double pruning: a fixed mask, and a second one for the backward weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity.policy import FPROP, Method, MethodOptions, Products, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from sparsepretrain.kernels import NoiseKey


@dataclass(slots=True, kw_only=True)
class SLoPeOptions(MethodOptions):
    """Options of double pruning."""

    mask: Literal["magnitude", "random"] = "magnitude"
    """How the fixed mask is chosen at the first sparse step."""


@register("method", "slope")
class SLoPe(Method):
    """A = M∘W with a mask that never changes; B is A, pruned once more along out_features.

    Mozaffari et al., ICLR 2025, arXiv:2405.16325: both weights are N:M along the axis that their
    product reduces over. As in the authors' reference code the second mask follows the current
    weights and dW is masked. Their low-rank adapters for the last 1 % of the run are not part of
    this method, and weights outside the mask are kept (unused) instead of zeroed.
    """

    Options = SLoPeOptions
    summary = "fixed mask; dgrad uses the weight pruned a second time"
    paper = "arXiv:2405.16325 (ICLR 2025)"
    products = Products(A="M∘W", B="M2∘M∘W", J="M∘dW")

    @property
    def multiples(self) -> tuple[int, int]:
        """Groups of m along both axes."""
        return self.options.m, self.options.m

    def initial_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        """The mask; chosen when the layer becomes sparse."""
        return {"mask": self.mask(weight, dim)}

    def update_(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> None:
        """Choose the mask at the first sparse step, and never again."""
        if self.step != self.window[0]:
            return
        scores = weight
        if self.options.mask == "random":
            scores = kernels.uniform_like(weight, key(FPROP), dim)
        state["mask"].copy_(self.mask(scores, dim))

    def project(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], key: Callable[[int], NoiseKey]
    ) -> Projection:
        """A = M∘W, B = A under its own N:M mask along out_features."""
        forward = kernels.apply_mask(weight, state["mask"])
        second = kernels.nm_mask(forward, *self.pattern, dim=1 - dim)
        return Projection(forward, state["mask"], kernels.apply_mask(forward, second))

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """Weights outside the mask receive nothing."""
        grad.masked_fill_(~mask, 0)
