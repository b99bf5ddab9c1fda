"""Matmuls of operands that are rounded to fp8 with one scale per tensor."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.kernels import dequantize_fp8, matmul_fp8, no_fp8_matmuls, quantize_fp8
from sparsepretrain.kernels.fp8 import FP8_MULTIPLE
from sparsepretrain.sparsity.matmuls.geometry import LayerSize, Linear
from sparsepretrain.sparsity.matmuls.three import DENSE, Kind, Matmul, MatmulCall, Matmuls, Prepared

LEFT = ("Xf", "P", "U")
"""Left operands of the matmuls."""


@dataclass(frozen=True, kw_only=True)
class FP8(Matmul):
    """Multiply operands with fp8 values and per-tensor scales.

    Current scaling has no history (S-STE section 5), so checkpoints hold no scales. Scales are
    those of a micro-batch: unlike all other numbers, they change with gradient accumulation.
    """

    kind: ClassVar[Kind] = "fp8"
    rounds: ClassVar[bool] = True
    left: str  # e4m3 or e5m2
    right: str
    simulate: bool
    """Multiply in fp32, or on GPUs in bf16, which holds every fp8 value exactly."""

    def format(self, operand: str) -> str | None:
        return self.left if operand in LEFT else self.right

    def encode(self, x: Tensor, operand: str, dtype: torch.dtype) -> Prepared:
        # U(G) arrives in the dtype of G. Rounding a sample to bf16 moves it by at most 2⁻⁹ of
        # itself, e4m3 by 2⁻⁴. Sampling from G in fp32 would move 14 more bytes per element.
        return Prepared("fp8", *quantize_fp8(x, self.format(operand) or ""))

    def reads_tokens_last(self, grad: Tensor) -> bool:
        return not self.simulate  # tensor cores sum along contiguous rows

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        """Make weights contiguous along the axis that fp8 tensor cores sum over."""
        if self.simulate or operand not in ("A", "B"):
            return encoded
        q = encoded.data
        q = q.contiguous() if operand == "A" else q.t().contiguous().t()
        return encoded.view(q)

    def __call__(
        self, call: MatmulCall, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        if self.dequantizes(call, left.data):
            # fp8 values are exact in fp32, so only the sums differ from those of tensor cores
            a, b = (dequantize_fp8(q.data, scale_of(q)) for q in (left, right))
            y = call.dense(a, b, None if bias is None else bias.float())
            # torch 2.11 compiles a cast that changes nothing here to gradients of zero
            return y if y.dtype == call.dtype else y.to(call.dtype)
        left, right = call.matrices(left, right)
        a = left.data
        b = right.data
        if not self.simulate:
            missing = -a.shape[1] % FP8_MULTIPLE
            a, b = (F.pad(q, (0, missing)) if missing else q.contiguous() for q in (a, b))
        scales = (scale_of(left), scale_of(right))
        backend = "reference" if self.simulate else None
        y = matmul_fp8(a, b, *scales, bias, out_dtype=call.dtype, backend=backend)
        return y.view(call.shape)

    def dequantizes(self, call: MatmulCall, x: Tensor) -> bool:
        """Return True if operands are converted to fp32 first: in convolutions and on CPUs."""
        return self.simulate and not (isinstance(call.geometry, Linear) and x.is_cuda)


@functools.cache
def fp8_matmuls(recipe: str, simulate: bool) -> Matmuls:
    """Return fp8 matmuls: e4m3 in fprop, and in dgrad and wgrad the formats of ``recipe``.

    ``hybrid``: e5m2 × e4m3, which fp8 libraries offer. ``reference``: e5m2 × e5m2, as in the
    authors' code (thu-ml/2by4-pretrain-acc-examples, v2). ``e4m3``: e4m3 × e4m3, the only pair that
    sparse hardware multiplies.
    """
    left, right = {
        "hybrid": ("e5m2", "e4m3"),
        "reference": ("e5m2", "e5m2"),
        "e4m3": ("e4m3", "e4m3"),
    }[recipe]
    forward = FP8(left="e4m3", right="e4m3", simulate=simulate)
    backward = FP8(left=left, right=right, simulate=simulate)
    return Matmuls(forward, backward, backward)


def scale_of(operand: Prepared) -> Tensor:
    """Return the scale of an operand in fp8."""
    assert operand.scale is not None
    return operand.scale


@dataclass(frozen=True, kw_only=True)
class FP8Precision:
    """Formats of fp8 training; evaluation never uses fp8."""

    name: Literal["fp8", "fp8_sim"]
    """Tensor cores, or the same values multiplied in wider types on any device."""
    recipe: Literal["hybrid", "reference", "e4m3"] = "hybrid"
    """See :func:`~sparsepretrain.sparsity.matmuls.fp8.fp8_matmuls`."""

    def problems(self) -> Problems:
        """Yield (key, message) of options that do not fit together."""
        if (self.name, self.recipe) == ("fp8", "reference"):
            yield "recipe", "must be one of hybrid, e4m3: no hardware multiplies e5m2×e5m2"

    def __str__(self) -> str:
        fprop, dgrad, _ = fp8_matmuls(self.recipe, True)
        return (
            f"{self.name} {self.recipe}: fprop {fprop.format('Xf')}×{fprop.format('A')}, "
            f"dgrad and wgrad {dgrad.format('P')}×{dgrad.format('B')}"
        )

    @property
    def simulated(self) -> FP8Precision:
        """The same formats without tensor cores."""
        return dataclasses.replace(self, name="fp8_sim")

    def require_here(self, device: torch.device) -> None:
        """Refuse a device without fp8 tensor cores, unless fp8 is simulated (ConfigError)."""
        if self.name == "fp8":
            self.require([no_fp8_matmuls(device)])

    def require(self, reasons: Iterable[str]) -> None:
        """Refuse a device or a model without a single fp8 matmul.

        Args:
            reasons: why each layer has none; "": it has.
        """
        reasons = list(reasons)
        if self.name == "fp8" and "" not in reasons:
            raise ConfigError(
                f"precision=fp8: no matmul can be in fp8: {statistics.mode(reasons)}: "
                "precision=fp8_sim trains with the same values"
            )


def precision_of(precision: str | dict[str, str] | FP8Precision | None) -> FP8Precision | None:
    """Return the formats of ``sparsify(precision=…)``; None: matmuls follow autocast."""
    if precision is None or isinstance(precision, FP8Precision):
        return precision
    given = {"name": precision} if isinstance(precision, str) else precision
    name = given.get("name", "fp8_sim") if isinstance(given, dict) else None
    if name in ("fp8", "fp8_sim"):
        return build(FP8Precision, given, "precision")
    raise ConfigError(
        "precision must be None (follow autocast), 'fp8', 'fp8_sim' or a dict with its name and "
        f"recipe, got {precision!r}"
    )


def unpacked_matmuls(precision: FP8Precision | None, size: LayerSize) -> tuple[Matmuls, str]:
    """Return the matmuls of a layer without packing.

    Also return the reason for which they simulate fp8 if tensor cores were asked for, or "".
    """
    if precision is None:
        return DENSE, ""
    why = ""
    if precision.name == "fp8":
        why = "" if size.device.type == "meta" else no_fp8_matmuls(size.device)
        why = why or size.indivisible(FP8_MULTIPLE)
    return fp8_matmuls(precision.recipe, precision.name == "fp8_sim" or bool(why)), why
