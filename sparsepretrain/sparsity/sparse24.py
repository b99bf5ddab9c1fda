"""Matmuls with one 2:4 operand, which is packed and multiplied by cuSPARSELt."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.kernels import compress_24, matmul_24, unscaled
from sparsepretrain.kernels.hardware import LIMITS, Limits
from sparsepretrain.kernels.packed24 import TYPES
from sparsepretrain.sparsity.fp8 import FP8, scale_of
from sparsepretrain.sparsity.geometry import Linear, rows_of
from sparsepretrain.sparsity.products import (
    MATMUL_OF,
    Dense,
    Kind,
    Matmul,
    Prepared,
    Products,
)

PACKED = ("A", "B", "P", "U")
"""Operands that a sparse product can pack."""
TOKENS = 512
"""Sparse products pad their tokens with zeros to a multiple of this.

Each size of a product is checked once and searched for its fastest algorithm, which takes tenths of
a second. With padding, token counts that change from batch to batch (translation, fine-tuning)
share a few sizes. At 16k tokens padding costs at most 3 % of a product, which ``auto`` includes in
its timing. 512 is a multiple of every size in :data:`LIMITS`.
"""


@dataclass(frozen=True, kw_only=True)
class Sparse24(Dense):
    """Pack one 2:4 operand and multiply with cuSPARSELt in the dtype of X.

    Sums are in fp32 and rounded once, as in dense matmuls, but in another order.
    """

    kind: ClassVar[Kind] = "sparse24"

    def packs_estimate(self, grad: Tensor) -> bool:
        return can_pack(self.packs, "U", grad)

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        if not can_pack(self.packs, operand, encoded.data):
            return super().arrange(encoded, operand)
        return Prepared(self.kind, pack(encoded.data, operand), encoded.scale)

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
class Sparse24FP8(Sparse24, FP8):
    """Pack one 2:4 operand and multiply in fp8 with cuSPARSELt.

    The library reads a factor of the product on the host, so scales and bias are applied after it.
    """

    kind: ClassVar[Kind] = "sparse24_fp8"

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
        return unscaled(y, scale_of(left), scale_of(right), bias, out_dtype=matmul.dtype)


@functools.cache
def packing(base: Products, operands: str) -> Products:
    """Return products that pack ``operands`` of :data:`PACKED`; B comes before P."""
    chosen = base._asdict()
    for operand in reversed(operands):
        matmul = MATMUL_OF[operand]
        product = getattr(base, matmul)
        kind = Sparse24FP8 if isinstance(product, FP8) else Sparse24
        chosen[matmul] = kind(**vars(product) | {"packs": operand})
    return Products(**chosen)


def limits_of(product: Dense) -> Limits:
    """Return the multiples that the sizes of a sparse version of ``product`` must have."""
    return LIMITS[torch.float8_e4m3fn if isinstance(product, FP8) else TYPES[0]]


def cannot_pack(product: Dense, dtype: torch.dtype | None = None) -> str:
    """Return the reason for which ``product`` has no sparse version; "": it has one.

    ``dtype``: of the layer; None: not known yet.
    """
    if isinstance(product, FP8):
        if product.simulate:
            return "its matmuls are in simulated fp8"
        same = product.left == product.right
        return "" if same else f"cuSPARSELt has no kernel of {product.left}×{product.right}"
    if dtype is None or dtype in TYPES:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"sparse matmuls exist in fp16 and bf16, not in {name}"


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
