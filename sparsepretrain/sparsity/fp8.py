"""Simulated fp8: operands rounded to fp8 values, products of those values in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import dequantize_fp8, quantize_fp8


@dataclass(frozen=True, kw_only=True)
class FP8Recipe:
    """Formats of the six operands; per-tensor scales of the current values (S-STE section 5).

    An operand is pruned first and quantised last, so that an N:M pattern survives. Current scaling
    has no history: nothing of it belongs in a checkpoint. Scales are those of a micro-batch, so
    unlike everything else they do change with accumulation.
    """

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
        products = f"fprop {self.forward}×{self.forward}, dgrad and wgrad {other}"
        return f"{self.name} {self.recipe}: {products}"


def recipe_from(precision: Any) -> FP8Recipe | None:
    """The recipe that ``sparsify(precision=…)`` asks for: None, ``"fp8_sim"`` or a dict.

    Raises:
        ConfigError: anything else, naming the key.
    """
    if precision is None:
        return None
    if precision == "fp8_sim":
        return FP8Recipe(name="fp8_sim")
    if isinstance(precision, dict):
        return build(FP8Recipe, precision, "precision")
    raise ConfigError(
        f"precision must be None (follow autocast), 'fp8_sim' or a dict with its name and recipe, "
        f"got {precision!r}"
    )


def round_fp8(x: Tensor, format: str) -> Tensor:
    """The values that ``x`` has in fp8, as fp32; zeros stay zeros."""
    return dequantize_fp8(*quantize_fp8(x, format))
