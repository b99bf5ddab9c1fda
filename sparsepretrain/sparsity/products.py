"""The three matmuls of a layer, each of them dense, in fp8, sparse, or sparse in fp8.

    matmul  left   right        result
    fprop   Xf(X)  A(W)         Y  = Xf(X) · A(W)ᵀ
    dgrad   P(G)   B(W)         dX = P(G) · B(W)
    wgrad   U(G)   Xw(X)        dW = U(G)ᵀ · Xw(X)

A product is one way to compute one of them. It prepares both operands (prune first, then cast or
quantize, then pack) and multiplies them. Products are stateless and shared by all layers, because
compiled graphs guard on their identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.kernels import (
    compress_24,
    dequantize_fp8,
    matmul_24,
    matmul_fp8,
    quantize_fp8,
    unscaled,
)
from sparsepretrain.kernels.fp8 import FP8_MULTIPLE
from sparsepretrain.kernels.hardware import LIMITS, Limits
from sparsepretrain.kernels.packed24 import TYPES
from sparsepretrain.sparsity.geometry import Geometry, Linear, rows_of

Kind = Literal["dense", "fp8", "sparse24", "sparse24_fp8"]

MATMULS = ("fprop", "dgrad", "wgrad")
MATMUL_OF = {"A": "fprop", "Xf": "fprop", "B": "dgrad", "P": "dgrad", "U": "wgrad", "Xw": "wgrad"}
"""Operand -> the matmul that reads it."""
PACKED = ("A", "B", "P", "U")
"""Operands that a sparse product can pack."""
LEFT = ("Xf", "P", "U")
TOKENS = 512
"""Sparse products pad their tokens with zeros to a multiple of this.

Each size of a product is checked once and searched for its fastest algorithm, which takes tenths of
a second. With padding, token counts that change from batch to batch (translation, fine-tuning)
share a few sizes. At 16k tokens padding costs at most 3 % of a product, which ``auto`` includes in
its timing. 512 is a multiple of every size in :data:`LIMITS`.
"""


class Prepared(NamedTuple):
    """An operand as its matmul reads it."""

    kind: Kind
    data: Tensor
    scale: Tensor | None = None  # 0-d fp32, for fp8

    def view(self, data: Tensor) -> Prepared:
        """Return the same operand in another layout."""
        return Prepared(self.kind, data, self.scale)


class Estimate(NamedTuple):
    """U(G) before it is drawn: wgrad chooses the precision and memory order of the draw."""

    grad: Tensor
    draw: Callable[[Tensor, str | None], Tensor]

    def sample(self, *, wide: bool = False, tokens_last: bool = False) -> Tensor:
        """Draw U(G), shape of G; ``wide``: from G in fp32."""
        grad = self.grad.float() if wide else self.grad
        return self.draw(grad, "tokens_last" if tokens_last else None)


class Operands(NamedTuple):
    """A and B of one layer, prepared once per optimizer step where operands are stored."""

    A: Prepared
    B: Prepared | None  # None: A serves both matmuls
    wgrad_scale: Tensor | None  # 0-d factor of dW; None: 1


class Matmul(NamedTuple):
    """One matmul of one layer for one micro-batch."""

    name: Literal["fprop", "dgrad", "wgrad"]
    geometry: Geometry
    shape: tuple[int, ...]  # of the result; a linear layer's fprop ends with -1 for out_features
    dtype: torch.dtype  # of an fp8 product's result

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
        grad, x = left.view(rows_of(left.data).t()), right.view(rows_of(right.data).t())
        return (grad, x) if self.geometry == Linear(1) else (x, grad)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Multiply zero-filled operands in the dtype of X."""

    kind: ClassVar[Kind] = "dense"
    rounds: ClassVar[bool] = False
    """True if operands are rounded to fp8."""
    packs: str = ""
    """Operand that is packed; "": none is."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def limits(self) -> Limits:
        """Multiples that the sizes of a sparse product must have."""
        return LIMITS[TYPES[0]]

    def cannot_pack(self, dtype: torch.dtype | None = None) -> str:
        """Return the reason for which this matmul has no sparse version; "": it has one.

        ``dtype``: of the layer; None: not known yet.
        """
        if dtype is None or dtype in TYPES:
            return ""
        name = str(dtype).removeprefix("torch.")
        return f"sparse products exist in fp16 and bf16, not in {name}"

    def sparse(self, operand: str) -> Dense:
        """Return the sparse version of this product, which packs ``operand``."""
        return Sparse24(packs=operand)

    def format(self, operand: str) -> str | None:
        """Return the fp8 format of ``operand``; None: it keeps the dtype of the layer."""
        return None

    def encode(self, x: Tensor, operand: str, dtype: torch.dtype) -> Prepared:
        """Cast or quantize a pruned operand."""
        return Prepared("dense", x.to(dtype))

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        """Bring an encoded operand into the memory layout that the matmul reads."""
        return encoded

    def prepare(self, x: Tensor | Estimate, operand: str) -> Prepared:
        """Encode and arrange Xf, Xw, P or U, or a weight in its own dtype."""
        if not isinstance(x, Estimate):
            return self.arrange(self.encode(x, operand, x.dtype), operand)
        tokens_last = can_pack(self.packs, operand, x.grad)
        drawn = x.sample(wide=self.rounds, tokens_last=tokens_last)
        return self.arrange(self.encode(drawn, operand, x.grad.dtype), operand)

    def __call__(
        self, matmul: Matmul, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply prepared operands; only fprop has a bias."""
        return matmul.dense(left.data, right.data, bias)


@dataclass(frozen=True, kw_only=True)
class FP8(Dense):
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

    @property
    def limits(self) -> Limits:
        return LIMITS[torch.float8_e4m3fn]

    def cannot_pack(self, dtype: torch.dtype | None = None) -> str:
        if self.simulate:
            return "its products are in simulated fp8"
        same = self.left == self.right
        return "" if same else f"cuSPARSELt has no kernel of {self.left}×{self.right}"

    def sparse(self, operand: str) -> Dense:
        return Sparse24FP8(left=self.left, right=self.right, simulate=self.simulate, packs=operand)

    def format(self, operand: str) -> str | None:
        return self.left if operand in LEFT else self.right

    def encode(self, x: Tensor, operand: str, dtype: torch.dtype) -> Prepared:
        return Prepared("fp8", *quantize_fp8(x, self.format(operand) or ""))

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        """Make weights contiguous along the axis that fp8 tensor cores sum over."""
        if self.simulate or operand not in ("A", "B"):
            return encoded
        q = encoded.data
        q = q.contiguous() if operand == "A" else q.t().contiguous().t()
        return encoded.view(q)

    def __call__(
        self, matmul: Matmul, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        if self.dequantizes(matmul, left.data):
            # fp8 values are exact in fp32, so only the sums differ from those of tensor cores
            a, b = (dequantize_fp8(q.data, _scale(q)) for q in (left, right))
            y = matmul.dense(a, b, None if bias is None else bias.float())
            # torch 2.11 compiles a cast that changes nothing here to gradients of zero
            return y if y.dtype == matmul.dtype else y.to(matmul.dtype)
        left, right = matmul.matrices(left, right)
        a, b = left.data, right.data
        if not self.simulate:
            missing = -a.shape[1] % FP8_MULTIPLE
            a, b = (F.pad(q, (0, missing)) if missing else q.contiguous() for q in (a, b))
        y = matmul_fp8(
            a,
            b,
            _scale(left),
            _scale(right),
            bias,
            out_dtype=matmul.dtype,
            backend="reference" if self.simulate else None,
        )
        return y.view(matmul.shape)

    def dequantizes(self, matmul: Matmul, x: Tensor) -> bool:
        """Return True if operands are converted to fp32 first: in convolutions and on CPUs."""
        return self.simulate and not (isinstance(matmul.geometry, Linear) and x.is_cuda)


@dataclass(frozen=True, kw_only=True)
class Sparse24(Dense):
    """Pack one 2:4 operand and multiply with cuSPARSELt in the dtype of X.

    Sums are in fp32 and rounded once, as in dense matmuls, but in another order.
    """

    kind: ClassVar[Kind] = "sparse24"

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        if not can_pack(self.packs, operand, encoded.data):
            return encoded
        return Prepared(self.kind, pack(encoded.data, operand))

    def __call__(
        self, matmul: Matmul, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        if right.kind == self.kind:  # Yᵀ = A·Xᵀ + b, dXᵀ = Bᵀ·Gᵀ
            x = left.data
            bias = None if bias is None else bias.to(x.dtype)
            y = matmul_24(
                right.data, padded_rows(x), bias, transpose_dense=True, transpose_result=True
            )
            return cut(y, matmul.shape)
        if left.kind != self.kind:
            return super().__call__(matmul, left, right, bias)
        if matmul.name == "dgrad":  # dX = P(G)·B
            turned = right.data.t().is_contiguous()  # Conv1D stores (in, out)
            weight = right.data.t() if turned else right.data.contiguous()
            dx = matmul_24(left.data, weight, transpose_dense=turned)
            return cut(dx, matmul.shape)
        # dW = U(G)ᵀ·X, or its transpose
        turned = matmul.geometry != Linear(1)
        return matmul_24(left.data, padded_rows(right.data), transpose_result=turned)


@dataclass(frozen=True, kw_only=True)
class Sparse24FP8(FP8):
    """Pack one 2:4 operand and multiply in fp8 with cuSPARSELt.

    The library reads a factor of the product on the host, so scales and bias are applied after it.
    """

    kind: ClassVar[Kind] = "sparse24_fp8"

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        if not can_pack(self.packs, operand, encoded.data):
            return super().arrange(encoded, operand)
        return Prepared(self.kind, pack(encoded.data, operand), encoded.scale)

    def __call__(
        self, matmul: Matmul, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        if self.kind not in (left.kind, right.kind):
            return super().__call__(matmul, left, right, bias)
        # fp8 has kernels for one layout only: packed·denseᵀ with rows along the sum
        multiply = functools.partial(matmul_24, transpose_dense=True, out_dtype=torch.float32)
        if right.kind == self.kind:
            y = multiply(right.data, padded_rows(left.data), transpose_result=True)
        elif matmul.name == "dgrad":
            y = multiply(left.data, right.data.t())
        else:
            turned = matmul.geometry != Linear(1)
            y = multiply(left.data, padded_columns(right.data), transpose_result=turned)
        if matmul.name != "wgrad":
            y = cut(y, matmul.shape)
        return unscaled(y, _scale(left), _scale(right), bias, out_dtype=matmul.dtype)


class Products(NamedTuple):
    """The products of one layer."""

    fprop: Dense
    dgrad: Dense
    wgrad: Dense

    def __deepcopy__(self, memo: object) -> Products:
        return self

    @property
    def rounds(self) -> bool:
        """True if operands are rounded to fp8."""
        return self.fprop.rounds

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
        for_fprop, for_dgrad = self.fprop.arrange(a, "A"), self.dgrad.arrange(b, "B")
        # compiled graphs break if one tensor is passed twice
        shared = for_fprop.data is for_dgrad.data
        return Operands(
            reuse(for_fprop, out and out.A),
            None if shared else reuse(for_dgrad, out and out.B),
            wgrad_scale,
        )

    def packing(self, operands: str) -> Products:
        """Return products that pack ``operands`` of :data:`PACKED`; B comes before P."""
        return _packing(self, operands)


DENSE = Products(Dense(), Dense(), Dense())
"""Exact arithmetic, in the dtype of autocast or of the weight; always used in evaluation."""


@functools.cache
def _packing(base: Products, operands: str) -> Products:
    chosen = base._asdict()
    for operand in reversed(operands):
        chosen[MATMUL_OF[operand]] = getattr(base, MATMUL_OF[operand]).sparse(operand)
    return Products(**chosen)


@functools.cache
def fp8_products(recipe: str, simulate: bool) -> Products:
    """Return fp8 products: e4m3 in fprop, and in dgrad and wgrad the formats of ``recipe``.

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
    return Products(forward, backward, backward)


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


def can_pack(packs: str, operand: str, x: Tensor) -> bool:
    """Return True if ``operand`` is the packed one and ``x`` has whole groups of four tokens."""
    return operand == packs and not (operand == "U" and straddles(x.shape[:-1]))


def pack(x: Tensor, operand: str) -> Tensor:
    """Pack A (out, in), Bᵀ (in, out), P (tokens, out) or Uᵀ (out, tokens)."""
    if operand == "A":
        return compress_24(x.contiguous())
    if operand == "B":
        return compress_24(x.t().contiguous())
    return compress_24(padded_rows(x) if operand == "P" else padded_columns(x))


def straddles(shape: tuple[int, ...]) -> str:
    """Return the reason for which tokens (…, tokens of a sample) cannot be packed, or ""."""
    odd = len(shape) > 1 and shape[-1] % 4
    return f"samples of {shape[-1]} tokens, no multiple of 4" if odd else ""


def padded_rows(x: Tensor) -> Tensor:
    """Return a contiguous matrix (tokens, features), its tokens padded to :data:`TOKENS`."""
    rows = rows_of(x)
    missing = -rows.shape[0] % TOKENS
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).contiguous()


def padded_columns(x: Tensor) -> Tensor:
    """Return the transpose of :func:`padded_rows`, contiguous."""
    columns = rows_of(x).t()
    missing = -columns.shape[1] % TOKENS
    return (F.pad(columns, (0, missing)) if missing else columns).contiguous()


def cut(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Drop padded tokens and return ``shape``."""
    return rows[: math.prod(shape[:-1])].view(shape)


def _scale(operand: Prepared) -> Tensor:
    assert operand.scale is not None
    return operand.scale
