"""Products in fp8: those of its tensor cores, or of the same values in wider types."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import dequantize_fp8, matmul_fp8, no_fp8_products, quantize_fp8
from sparsepretrain.kernels.common import LIMITS, Limits
from sparsepretrain.kernels.fp8 import FP8_MULTIPLE
from sparsepretrain.sparsity.execution.base import (
    Estimate,
    Execution,
    Geometry,
    Kept,
    Linear,
    Operands,
    into,
    misfit,
)

Quantised = tuple[Tensor, ...]  # a matrix in fp8 and its scale


@dataclass(frozen=True, kw_only=True)
class SimulatedFP8(Execution):
    """Operands rounded to fp8 values with per-tensor scales, products of these in fp32.

    An operand is pruned first and quantised last, so that an N:M pattern survives. Current scaling
    has no history (S-STE section 5): nothing of it belongs in a checkpoint. Scales are those of a
    micro-batch, so unlike everything else they do change with accumulation.
    """

    rounds: ClassVar[bool] = True
    name: Literal["fp8_sim"]
    recipe: Literal["hybrid", "reference", "e4m3"] = "hybrid"
    """Backward products: e5m2 × e4m3, what fp8 libraries offer; e5m2 × e5m2, the authors' code
    (thu-ml/2by4-pretrain-acc-examples, v2); or e4m3 × e4m3, which sparse hardware multiplies."""

    forward: ClassVar[str] = "e4m3"
    """Both operands of fprop."""

    @property
    def gradient(self) -> str:
        """P(G) and U(G)."""
        return "e4m3" if self.recipe == "e4m3" else "e5m2"

    @property
    def backward(self) -> str:
        """The other operand of dgrad (B) and of wgrad (X)."""
        return "e5m2" if self.recipe == "reference" else "e4m3"

    def __str__(self) -> str:
        other = f"{self.gradient}×{self.backward}"
        both = f"{self.forward}×{self.forward}"
        return f"{self.name} {self.recipe}: fprop {both}, dgrad and wgrad {other}"

    def unpackable(self, place: str, dtype: torch.dtype | None = None) -> str:
        return "its products are in simulated fp8"

    def arrange(self, q: Tensor, place: str) -> Tensor:
        """A or B (out_features, in_features), whichever ``place`` is, as its product reads it."""
        return q

    def prepare(self, exact: Operands, dtype: torch.dtype, out: Operands | None) -> Operands:
        """B has a tensor of its own where its format, or how it is arranged, is another one."""
        forward, backward, wgrad_scale, _ = exact
        old_a, old_b, _, old_scales = out or (None, None, None, None)
        a = b = quantize_fp8(forward, self.forward)
        if backward is not None or self.backward != self.forward:
            b = quantize_fp8(forward if backward is None else backward, self.backward)
        for_fprop, for_dgrad = self.arrange(a[0], "A"), self.arrange(b[0], "B")
        return Operands(
            into(old_a, for_fprop),
            None if for_dgrad is for_fprop else into(old_b, for_dgrad),
            wgrad_scale,
            into(old_scales, torch.stack([a[1], b[1]])),
        )

    def fprop(
        self, how: Geometry, xs: tuple[Tensor, Tensor], operands: Operands, bias: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """Y, and Xw(X) in fp8 with its scale."""
        x, kept = xs[0], quantize_fp8(xs[1], self.backward)
        same = xs[0] is xs[1] and self.backward == self.forward
        seen = kept if same else quantize_fp8(x, self.forward)
        assert operands.scales is not None
        a = operands.forward, operands.scales[0]
        if self.by_rows(how, x):
            y = self.multiply((rows_of(seen[0]), seen[1]), a, bias, x.dtype)
            return y.view(*x.shape[:-1], -1), kept
        bias = None if bias is None else bias.float()
        y = how.fprop(dequantize_fp8(*seen), dequantize_fp8(*a), bias)
        # torch 2.11 compiles a cast that changes nothing here to gradients of zero
        return y if y.dtype == x.dtype else y.to(x.dtype), kept

    def dgrad(self, how: Geometry, grad: Tensor, operands: Operands, shape: torch.Size) -> Tensor:
        """DX of P(G), which was made in high precision, rounded once."""
        assert operands.scales is not None
        g, scale = quantize_fp8(grad, self.gradient)
        b, scale_b = operands.for_dgrad(), operands.scales[1]
        if self.by_rows(how, grad):
            dx = self.multiply((rows_of(g), scale), (b.t(), scale_b), None, grad.dtype)
            return dx.view(shape)
        return how.dgrad(dequantize_fp8(g, scale), dequantize_fp8(b, scale_b), shape)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """DW of U(G), which is made in fp32 and rounded once."""
        u, scale = quantize_fp8(estimate(grad.float()), self.gradient)
        if not self.by_rows(how, grad):
            return how.wgrad(dequantize_fp8(u, scale), dequantize_fp8(*kept), shape)
        both = (rows_of(u).t(), scale), (rows_of(kept[0]).t(), kept[1])
        left, right = both if how == Linear(1) else both[::-1]  # dW is laid out like the weight
        return self.multiply(left, right, None, torch.float32)

    def by_rows(self, how: Geometry, x: Tensor) -> bool:
        """Whether :meth:`multiply` computes products with ``x``; else those of a convolution do."""
        return isinstance(how, Linear) and x.is_cuda

    def multiply(
        self, left: Quantised, right: Quantised, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Left·rightᵀ + bias for (m, k) and (n, k): on GPUs in bf16, which has all fp8 values."""
        (a, scale_a), (b, scale_b) = left, right
        return matmul_fp8(a, b, scale_a, scale_b, bias, out_dtype=dtype, backend="reference")


@dataclass(frozen=True, kw_only=True)
class FP8(SimulatedFP8):
    """The same values, multiplied by fp8 tensor cores."""

    name: Literal["fp8"]  # type: ignore[assignment]
    recipe: Literal["hybrid", "e4m3"] = "hybrid"

    def of_layer(
        self, shape: tuple[int, ...], dim: int, device: torch.device
    ) -> tuple[Execution, str]:
        why = "" if device.type == "meta" else no_fp8_products(device)
        why = why or misfit(shape, dim, FP8_MULTIPLE, FP8_MULTIPLE)
        return (SIMULATED[self.recipe], why) if why else (self, "")

    def require_here(self, device: torch.device) -> None:
        self.require([no_fp8_products(device)])

    def require(self, reasons: Sequence[str]) -> None:
        """Refuse a model of which no layer can be multiplied in fp8.

        Args:
            reasons: those of :meth:`of_layer`.

        Raises:
            ConfigError: says why.
        """
        if "" not in reasons:
            raise ConfigError(
                f"precision=fp8: no product can be in fp8: {statistics.mode(reasons)}: "
                "precision=fp8_sim trains with the same values"
            )

    def unpackable(self, place: str, dtype: torch.dtype | None = None) -> str:
        if place == "A" or self.gradient == self.backward:
            return ""
        return f"cuSPARSELt has no kernel of {self.gradient}×{self.backward}"

    @property
    def limits(self) -> Limits:
        return LIMITS[torch.float8_e4m3fn]

    def arrange(self, q: Tensor, place: str) -> Tensor:
        """Contiguous along the axis that the product sums over."""
        return q.contiguous() if place == "A" else q.t().contiguous().t()

    def by_rows(self, how: Geometry, x: Tensor) -> bool:
        return True

    def multiply(
        self, left: Quantised, right: Quantised, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Left·rightᵀ + bias; what is summed over is filled up with zeros."""
        (a, scale_a), (b, scale_b) = left, right
        missing = -a.shape[1] % FP8_MULTIPLE
        a, b = (F.pad(q, (0, missing)) if missing else q.contiguous() for q in (a, b))
        return matmul_fp8(a, b, scale_a, scale_b, bias, out_dtype=dtype)


SIMULATED = {
    "hybrid": SimulatedFP8(name="fp8_sim", recipe="hybrid"),
    "e4m3": SimulatedFP8(name="fp8_sim", recipe="e4m3"),
}
"""What multiplies in layers that do not fit, by recipe."""


def rows_of(x: Tensor) -> Tensor:
    """X as a matrix of its tokens."""
    return x.reshape(-1, x.shape[-1])
