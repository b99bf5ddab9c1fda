"""How a layer multiplies: what the operands become, and the three products of them.

What the operands are belongs to the method (:class:`~sparsepretrain.sparsity.method.Row`); the
autograd function calls an execution and knows neither precision nor method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import dequantize_fp8, quantize_fp8

Kept = tuple[Tensor, ...]  # what a backward keeps of X
Estimate = Callable[[Tensor], Tensor]  # U: makes the output gradient of wgrad from G


class Operands(NamedTuple):
    """A and B as the products want them: pruned first, then quantised or cast."""

    forward: Tensor  # (out_features, in_features), or a convolution's weight
    backward: Tensor | None
    """The same for dgrad; None: ``forward`` (one tensor given twice breaks compiled graphs)."""
    wgrad_scale: Tensor | None  # 0-d factor of dW; None: 1


class Linear(NamedTuple):
    """Y = X·Wᵀ + b for X (…, in_features) and operands W (out_features, in_features)."""

    dim: int  # axis of the stored weight that holds in_features: dW is laid out like the weight

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y, shape (…, out_features)."""
        return F.linear(x, weight, bias)

    def dgrad(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """G·W, of ``shape``, that of X."""
        return grad.matmul(weight)

    def wgrad(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Gᵀ·X, of ``shape``, that of the stored weight."""
        rows, tokens = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return rows.t() @ tokens if self.dim == 1 else tokens.t() @ rows

    def bgrad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum of G over the tokens, accumulated in ``dtype``."""
        return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=dtype)

    def tokens(self, grad: Tensor) -> Tensor:
        """G as (…, tokens of one sample, out_features)."""
        return grad

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """Inverse of :meth:`tokens` for G of ``shape``."""
        return tokens


class Convolution(NamedTuple):
    """Y = X ∗ W + b for X (N, C, H, W) and W (out_channels, in_channels / groups, kh, kw).

    The tokens are the output positions, in the order (N, H, W): wgrad reduces over them, and they
    are (N, H'·W', out_channels) as :meth:`tokens`. Dgrad reduces over output channels, fprop over
    input channels, both at every kernel position.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self)

    def dgrad(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return conv2d_input(shape, weight, grad, *self)

    def wgrad(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return conv2d_weight(x, shape, grad, *self)

    def bgrad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        return grad.sum((0, 2, 3), dtype=dtype)

    def tokens(self, grad: Tensor) -> Tensor:
        return grad.flatten(2).transpose(1, 2)

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        return tokens.transpose(1, 2).reshape(shape)


Geometry = Linear | Convolution  # how a kind of layer multiplies dense tensors


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One way to multiply; stateless, shared by all layers. This one emulates.

    Exact arithmetic with dense products of zero-filled operands, in the dtype of X.
    """

    def __str__(self) -> str:
        return ""  # the products follow autocast; else a label and details behind a colon

    def cast(self, weight: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
        """A, or B, as its product sees it."""
        return weight.to(dtype)

    def prepare(self, exact: Operands, dtype: torch.dtype, out: Operands | None) -> Operands:
        """The operands of projected weights, once per step where they are stored.

        ``out``: earlier ones of the same layer, whose memory is used again.
        """
        forward, backward, scale = exact
        old_a, old_b, _ = out or (None, None, None)
        a = _into(old_a, self.cast(forward, dtype, False))
        b = None if backward is None else _into(old_b, self.cast(backward, dtype, True))
        return Operands(a, b, scale)

    def fprop(
        self, how: Geometry, xs: tuple[Tensor, Tensor], operands: Operands, bias: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """Y in the dtype of X, and what the backward needs of X; ``xs`` are Xf(X) and Xw(X)."""
        return how.fprop(xs[0], operands.forward, bias), (xs[1],)

    def dgrad(self, how: Geometry, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """DX, of ``shape``, from P(G) and B."""
        return how.dgrad(grad, weight, shape)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """DW from X and the ``estimate`` U(G) of G, asked for in the form this product wants."""
        return how.wgrad(estimate(grad).to(kept[0].dtype), kept[0], shape)


@dataclass(frozen=True, kw_only=True)
class SimulatedFP8(Execution):
    """Operands rounded to fp8 values with per-tensor scales, products of these in fp32.

    An operand is pruned first and quantised last, so that an N:M pattern survives. Current scaling
    has no history (S-STE section 5): nothing of it belongs in a checkpoint. Scales are those of a
    micro-batch, so unlike everything else they do change with accumulation.
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


def execution_of(precision: Any, backend: str = "emulate") -> Execution:
    """The execution that ``sparsify(precision=…, backend=…)`` asks for.

    Raises:
        ConfigError: what does not exist, naming the argument.
    """
    if backend in ("reference", "triton", "cpu"):
        raise ConfigError(
            f"backend {backend!r} is one of single kernels (sparsepretrain.kernels); layers have "
            f"'emulate' (dense products of sparse operands)"
        )
    if backend != "emulate":
        raise ConfigError(
            f"backend must be 'emulate' (dense products of sparse operands; the only one so far), "
            f"got {backend!r}"
        )
    if precision is None:
        return EMULATE
    if precision == "fp8_sim":
        return SimulatedFP8(name="fp8_sim")
    if isinstance(precision, dict):
        return build(SimulatedFP8, precision, "precision")
    raise ConfigError(
        f"precision must be None (follow autocast), 'fp8_sim' or a dict with its name and recipe, "
        f"got {precision!r}"
    )


def round_fp8(x: Tensor, format: str) -> Tensor:
    """The values that ``x`` has in fp8, as fp32; zeros stay zeros."""
    return dequantize_fp8(*quantize_fp8(x, format))


def _into(old: Tensor | None, new: Tensor) -> Tensor:
    """``new`` in the memory of an earlier operand of the same dtype."""
    return new if old is None or old.dtype != new.dtype else old.copy_(new)


EMULATE = Execution()  # the execution of evaluation, whatever training uses
