"""What every execution answers, and the one that emulates sparse products with dense ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from sparsepretrain.kernels.common import LIMITS, Limits
from sparsepretrain.kernels.packed24 import TYPES

Kept = tuple[Tensor, ...]  # what a backward keeps of X
Estimate = Callable[..., Tensor]
"""U: makes the output gradient of wgrad from G, in a memory order of :func:`kernels.mvue`."""


class Operands(NamedTuple):
    """A and B as the products want them: pruned first, then quantised or cast."""

    forward: Tensor  # (out_features, in_features), or a convolution's weight; or packed
    backward: Tensor | None
    """The same for dgrad; None: ``forward`` (one tensor given twice breaks compiled graphs)."""
    wgrad_scale: Tensor | None  # 0-d factor of dW; None: 1
    scales: Tensor | None = None  # (2,) fp32, of A and of B in fp8; None: they are in no fp8

    def for_dgrad(self) -> Tensor:
        """B."""
        return self.forward if self.backward is None else self.backward


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

    rounds: ClassVar[bool] = False
    """Whether operands get other values, and products another dtype, than autocast gives them."""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # stateless, and compiled graphs know it by its identity

    def __str__(self) -> str:
        return ""  # the products follow autocast; else a label and details behind a colon

    @property
    def limits(self) -> Limits:
        """What sizes sparse products ask for."""
        return LIMITS[TYPES[0]]

    def of_layer(
        self, shape: tuple[int, ...], dim: int, device: torch.device
    ) -> tuple[Execution, str]:
        """What multiplies in a layer, and why it is another execution than this; "": it is this.

        Args:
            shape: of the stored weight.
            dim: of in_features in it.
            device: of the weight; the meta device says nothing about where it will train.
        """
        return self, ""

    def require_here(self, device: torch.device) -> None:
        """Refuse a device on which nothing of it can be done.

        Raises:
            ConfigError: says why.
        """

    def unpackable(self, place: str, dtype: torch.dtype | None = None) -> str:
        """Why the operand at a place of the row has no sparse product; "": it can have one.

        ``dtype``: of the products; None: not known yet.
        """
        if dtype is None or dtype in TYPES:
            return ""
        name = str(dtype).removeprefix("torch.")
        return f"sparse products exist in fp16 and bf16, not in {name}"

    def cast(self, weight: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
        """A, or B, as its product sees it."""
        return weight.to(dtype)

    def prepare(self, exact: Operands, dtype: torch.dtype, out: Operands | None) -> Operands:
        """The operands of projected weights, once per step where they are stored.

        ``out``: earlier ones of the same layer, whose memory is used again.
        """
        forward, backward, scale, _ = exact
        old_a, old_b, *_ = out or (None, None)
        a = into(old_a, self.cast(forward, dtype, False))
        b = None if backward is None else into(old_b, self.cast(backward, dtype, True))
        return Operands(a, b, scale)

    def fprop(
        self, how: Geometry, xs: tuple[Tensor, Tensor], operands: Operands, bias: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """Y in the dtype of X, and what the backward needs of X; ``xs`` are Xf(X) and Xw(X)."""
        return how.fprop(xs[0], operands.forward, bias), (xs[1],)

    def dgrad(self, how: Geometry, grad: Tensor, operands: Operands, shape: torch.Size) -> Tensor:
        """DX, of ``shape``, from P(G) and B."""
        return how.dgrad(grad, operands.for_dgrad(), shape)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """DW from X and the ``estimate`` U(G) of G, asked for in the form this product wants."""
        return how.wgrad(estimate(grad).to(kept[0].dtype), kept[0], shape)


def into(old: Tensor | None, new: Tensor) -> Tensor:
    """``new`` in the memory of an earlier operand of the same dtype and shape."""
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        return new
    return old if old.data_ptr() == new.data_ptr() else old.copy_(new)  # or was written there


def misfit(shape: tuple[int, ...], dim: int, out_multiple: int, in_multiple: int) -> str:
    """Why a weight has no products as rows with features of these multiples; "": it has."""
    if len(shape) != 2:
        return "a convolution"
    sizes = ("out", shape[1 - dim], out_multiple), ("in", shape[dim], in_multiple)
    odd = [f"{k}_features = {size}, no multiple of {of}" for k, size, of in sizes if size % of]
    return ", ".join(odd)


EMULATE = Execution()  # the execution of evaluation, whatever training uses
