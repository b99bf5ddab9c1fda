"""SDGP: dense weights, N:M output gradients in the matmul that yields the input gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.kernels import AnyKey
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Row
from sparsepretrain.sparsity.method import FineTuning


@dataclass(slots=True, kw_only=True)
class SDGPOptions(MethodOptions):
    """Options of SDGP; n:m is the pattern of the gradient along out_features."""

    variant: Literal["rescaled", "magnitude", "random"] = "rescaled"
    """Largest with the L1 norm restored (paper: maxnorm), largest (max), or any (rnd)."""
    scope: Literal["channel", "group", "tensor"] = "channel"
    """Entries that share one factor of ``rescaled``; channel: per sample and out_feature (per
    micro-batch and out_feature if a sample is one row); tensor: per micro-batch."""
    epsilon: Annotated[float, "≥ 0"] = 0.0
    """Added to the divisor of ``rescaled``; the authors' 1e-4 shrinks gradients whose sums are near
    it, so that results depend on the loss scale; 0 restores the norm exactly."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        if self.m > 32:
            yield "m", f"must be ≤ 32, got {self.m}"


@register("method", "sdgp")
class SDGP(Method):
    """dX = N:M(G)·W; the forward and the weight gradient stay dense."""

    Options = SDGPOptions
    options: SDGPOptions
    summary = "prunes the output gradient of dgrad only"
    paper = "arXiv:2202.00774 (ICPR 2022)"
    finetuning = FineTuning("dense")

    @property
    def sparse_row(self) -> Row:
        return Row(P=self.nm("N:M(G)", "out"))

    @property
    def multiples(self) -> tuple[int, int]:
        """Gradients are pruned along out_features; logged masks run along in_features."""
        return self.options.m, self.options.m

    def dgrad_gradient(self, grad: Tensor, key: AnyKey) -> Tensor:
        variant = self.options.variant
        scope = self.options.scope
        epsilon = self.options.epsilon
        draws = key if variant == "random" else None
        return kernels.prune_gradient(
            grad, *self.pattern, variant=variant, scope=scope, epsilon=epsilon, key=draws
        )
