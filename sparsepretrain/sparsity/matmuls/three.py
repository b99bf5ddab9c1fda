"""The three matmuls of a layer.

    matmul  left   right        result
    fprop   Xf(X)  A(W)         Y  = Xf(X) · A(W)ᵀ
    dgrad   P(G)   B(W)         dX = P(G) · B(W)
    wgrad   U(G)   Xw(X)        dW = U(G)ᵀ · Xw(X)

A matmul is one way to compute one of them: dense (here), in fp8 (:mod:`fp8`), sparse, or sparse in
fp8 (:mod:`sparse24`). It prepares both operands (prune first, then cast or quantize, then pack) and
multiplies them. Matmuls are stateless and shared by all layers, because compiled graphs guard on
their identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from sparsepretrain.sparsity.matmuls.geometry import Geometry, Linear, rows_of

Kind = Literal["dense", "fp8", "sparse24", "sparse24_fp8"]

MATMULS = ("fprop", "dgrad", "wgrad")
MATMUL_OF = {"A": "fprop", "Xf": "fprop", "B": "dgrad", "P": "dgrad", "U": "wgrad", "Xw": "wgrad"}
"""Operand -> the matmul that reads it."""


class Prepared(NamedTuple):
    """An operand as its matmul reads it."""

    kind: Kind
    data: Tensor
    scale: Tensor | None = None  # 0-d fp32, for fp8

    def view(self, data: Tensor) -> Prepared:
        """Return the same operand in another layout."""
        return Prepared(self.kind, data, self.scale)


class Estimate(NamedTuple):
    """U(G) before it is drawn: wgrad chooses the memory order of the draw."""

    grad: Tensor
    draw: Callable[[Tensor, str | None], Tensor]

    def sample(self, *, tokens_last: bool = False) -> Tensor:
        """Draw U(G), shape and dtype of G."""
        return self.draw(self.grad, "tokens_last" if tokens_last else None)


class Operands(NamedTuple):
    """A and B of one layer, prepared once per optimizer step where operands are stored."""

    A: Prepared
    B: Prepared | None  # None: A serves both matmuls
    wgrad_scale: Tensor | None  # 0-d factor of dW; None: 1


class MatmulCall(NamedTuple):
    """One matmul of one layer for one micro-batch."""

    name: Literal["fprop", "dgrad", "wgrad"]
    geometry: Geometry
    shape: tuple[int, ...]  # of the result; fprop of a convolution does not read it
    dtype: torch.dtype  # of an fp8 matmul's result

    def dense(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply unpacked operands of one dtype."""
        if self.name == "fprop":
            return self.geometry.fprop(left, right, bias)
        compute = self.geometry.dgrad if self.name == "dgrad" else self.geometry.wgrad
        return compute(left, right, self.shape)

    def matrices(self, left: Prepared, right: Prepared) -> tuple[Prepared, Prepared]:
        """Return views (m, k) and (n, k) whose product left·rightᵀ is a linear layer's result."""
        if self.name == "fprop":
            return left.view(rows_of(left.data)), right
        if self.name == "dgrad":
            return left.view(rows_of(left.data)), right.view(right.data.t())
        grad = left.view(rows_of(left.data).t())
        x = right.view(rows_of(right.data).t())
        return (grad, x) if self.geometry == Linear(1) else (x, grad)


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Multiply zero-filled operands in the dtype of X."""

    kind: ClassVar[Kind] = "dense"
    rounds: ClassVar[bool] = False
    """True if operands are rounded to fp8."""
    packs: str = ""
    """Operand that is packed; "": none is."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def format(self, operand: str) -> str | None:
        """Return the fp8 format of ``operand``; None: it keeps the dtype of the layer."""
        return None

    def encode(self, x: Tensor, operand: str, dtype: torch.dtype) -> Prepared:
        """Cast or quantize a pruned operand."""
        return Prepared("dense", x.to(dtype))

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        """Bring an encoded operand into the memory layout that the matmul reads."""
        return encoded

    def reads_tokens_last(self, grad: Tensor) -> bool:
        """Return True if the matmul reads U(G) along the tokens."""
        return False

    def prepare(self, x: Tensor | Estimate, operand: str) -> Prepared:
        """Encode and arrange Xf, Xw, P or U, or a weight in its own dtype."""
        if not isinstance(x, Estimate):
            return self.arrange(self.encode(x, operand, x.dtype), operand)
        drawn = x.sample(tokens_last=self.reads_tokens_last(x.grad))
        return self.arrange(self.encode(drawn, operand, x.grad.dtype), operand)

    def __call__(
        self, call: MatmulCall, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply prepared operands; only fprop has a bias."""
        return call.dense(left.data, right.data, bias)


class Matmuls(NamedTuple):
    """The matmuls of one layer."""

    fprop: Matmul
    dgrad: Matmul
    wgrad: Matmul

    def __deepcopy__(self, memo: object) -> Matmuls:
        return self

    def prepare(
        self,
        forward: Tensor,
        backward: Tensor | None,
        wgrad_scale: Tensor | None,
        dtype: torch.dtype,
        out: Operands | None = None,
    ) -> Operands:
        """Prepare projected weights.

        Args:
            forward, backward: A(W) and B(W), (out_features, in_features) or a convolution's weight,
                contiguous or transposed; None: B is A.
            wgrad_scale: factor of dW.
            dtype: of the layer's matmuls.
            out: earlier operands of the layer, whose memory is used again.
        """
        a = b = self.fprop.encode(forward, "A", dtype)
        if backward is not None or self.dgrad.format("B") != self.fprop.format("A"):
            b = self.dgrad.encode(forward if backward is None else backward, "B", dtype)
        for_fprop = self.fprop.arrange(a, "A")
        for_dgrad = self.dgrad.arrange(b, "B")
        # compiled graphs break if one tensor is passed twice
        shared = for_fprop.data is for_dgrad.data
        return Operands(
            reuse(for_fprop, out and out.A),
            None if shared else reuse(for_dgrad, out and out.B),
            wgrad_scale,
        )


DENSE = Matmuls(Matmul(), Matmul(), Matmul())
"""Exact arithmetic, in the dtype of autocast or of the weight; always used in evaluation."""


def reuse(new: Prepared, old: Prepared | None) -> Prepared:
    """Copy ``new`` into the memory of ``old`` if both have one kind, dtype and shape."""
    if old is None or (old.kind, old.data.dtype, old.data.shape) != (
        new.kind,
        new.data.dtype,
        new.data.shape,
    ):
        return new
    if old.data.data_ptr() != new.data.data_ptr():  # the method may have written there
        old.data.copy_(new.data)
    if old.scale is not None and new.scale is not None:
        old.scale.copy_(new.scale)
    return old
