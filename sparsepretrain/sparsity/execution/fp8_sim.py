"""Products of operands that have the values of fp8, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsepretrain.kernels import dequantize_fp8, quantize_fp8
from sparsepretrain.sparsity.execution.base import Estimate, Execution, Geometry, Kept, Operands


@dataclass(frozen=True, kw_only=True)
class SimulatedFP8(Execution):
    """Operands rounded to fp8 values with per-tensor scales, products of these in fp32.

    An operand is pruned first and quantised last, so that an N:M pattern survives. Current scaling
    has no history (S-STE section 5): nothing of it belongs in a checkpoint. Scales are those of a
    micro-batch, so unlike everything else they do change with accumulation.
    """

    rounds: ClassVar[bool] = True
    without_sparse: ClassVar[str] = "its products are in simulated fp8"
    name: Literal["fp8_sim"]
    recipe: Literal["hybrid", "reference"] = "hybrid"
    """Backward products: e5m2 × e4m3, what fp8 libraries offer; or e5m2 × e5m2, the authors' code
    (thu-ml/2by4-pretrain-acc-examples, v2)."""

    forward: ClassVar[str] = "e4m3"
    """Both operands of fprop."""
    gradient: ClassVar[str] = "e5m2"
    """P(G) and U(G)."""

    @property
    def backward(self) -> str:
        """The other operand of dgrad (B) and of wgrad (X)."""
        return "e4m3" if self.recipe == "hybrid" else "e5m2"

    def __str__(self) -> str:
        other = f"{self.gradient}×{self.backward}"
        both = f"{self.forward}×{self.forward}"
        return f"{self.name} {self.recipe}: fprop {both}, dgrad and wgrad {other}"

    def prepare(self, exact: Operands, dtype: torch.dtype, out: Operands | None) -> Operands:
        """B has a tensor of its own where its format is another one."""
        if exact.backward is None and self.backward != self.forward:
            exact = exact._replace(backward=exact.forward)
        return super().prepare(exact, dtype, out)

    def cast(self, weight: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
        return round_fp8(weight, self.backward if backward else self.forward)

    def fprop(
        self, how: Geometry, xs: tuple[Tensor, Tensor], operands: Operands, bias: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """Y, and Xw(X) in fp8 with its scale; the bias is added in fp32."""
        x, kept = xs[0], quantize_fp8(xs[1], self.backward)
        same = xs[0] is xs[1] and self.backward == self.forward
        rounded = dequantize_fp8(*kept) if same else round_fp8(x, self.forward)
        bias = None if bias is None else bias.float()
        return how.fprop(rounded, operands.forward, bias).to(x.dtype), kept

    def dgrad(self, how: Geometry, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """DX of P(G), which was made in high precision, rounded once."""
        return how.dgrad(round_fp8(grad.float(), self.gradient), weight, shape)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """DW of U(G), which is made in fp32 and rounded once."""
        rounded = round_fp8(estimate(grad.float()), self.gradient)
        return how.wgrad(rounded, dequantize_fp8(*kept), shape)


def round_fp8(x: Tensor, format: str) -> Tensor:
    """The values that ``x`` has in fp8, as fp32; zeros stay zeros."""
    return dequantize_fp8(*quantize_fp8(x, format))
