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
from sparsepretrain.sparsity.matmuls.fp8 import FP8, scale_of
from sparsepretrain.sparsity.matmuls.geometry import Linear, rows_of
from sparsepretrain.sparsity.matmuls.three import (
    MATMUL_OF,
    Kind,
    Matmul,
    MatmulCall,
    Matmuls,
    Prepared,
)

PACKED = ("A", "B", "P", "U")
"""Operands that a sparse matmul can pack."""
TOKENS = 512
"""Sparse matmuls pad their tokens with zeros to a multiple of this.

Each new size of a matmul is checked against fp64 once, which takes a few milliseconds of training.
With padding, token counts that change from batch to batch (translation, fine-tuning) share a few
sizes. At 16k tokens padding costs at most 3 % of a matmul, which ``auto`` includes in
its timing. 512 is a multiple of every size in :data:`LIMITS`. Widths are padded to those alone.
"""


@dataclass(frozen=True, kw_only=True)
class Sparse24(Matmul):
    """Pack one 2:4 operand and multiply with cuSPARSELt in the dtype of X.

    Sums are in fp32 and rounded once, as in dense matmuls, but in another order. Operands are
    padded with zeros to sizes that the library takes, which changes no sum, and results are cut.
    """

    kind: ClassVar[Kind] = "sparse24"
    limits: ClassVar[Limits] = LIMITS[torch.bfloat16]

    def reads_tokens_last(self, grad: Tensor) -> bool:
        return can_pack(self.packs, "U", grad) or super().reads_tokens_last(grad)

    def arrange(self, encoded: Prepared, operand: str) -> Prepared:
        if not can_pack(self.packs, operand, encoded.data):
            return super().arrange(encoded, operand)
        return Prepared(self.kind, self.pack(encoded.data, operand), encoded.scale)

    def pack(self, x: Tensor, operand: str) -> Tensor:
        """Pack A (out, in), Bᵀ (in, out), P (tokens, out) or Uᵀ (out, tokens), padded."""
        rows, columns, _, _ = self.limits
        if operand == "P":
            return compress_24(padded(rows_of(x), TOKENS, columns))
        if operand == "U":
            return compress_24(padded(rows_of(x).t(), rows, TOKENS))
        return compress_24(padded(x if operand == "A" else x.t(), rows, columns))

    def __call__(
        self, call: MatmulCall, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        if self.kind not in (left.kind, right.kind):
            return super().__call__(call, left, right, bias)
        _, columns, dense, _ = self.limits
        if right.kind == self.kind:  # Yᵀ = A·Xᵀ + b, dXᵀ = Bᵀ·Gᵀ
            x = padded(rows_of(left.data), TOKENS, columns)
            if bias is not None:
                missing = right.data.shape[0] - bias.shape[0]
                bias = F.pad(bias, (0, missing)) if missing else bias
                bias = bias.to(x.dtype)
            y = matmul_24(right.data, x, bias, transpose_dense=True, transpose_result=True)
        elif call.name == "dgrad":  # dX = P(G)·B
            turned = right.data.t().is_contiguous()  # Conv1D stores (in, out)
            multiples = (dense, columns) if turned else (columns, dense)
            weight = padded(right.data.t() if turned else right.data, *multiples)
            y = matmul_24(left.data, weight, transpose_dense=turned)
        else:  # dW = U(G)ᵀ·X, or its transpose
            x = padded(rows_of(right.data), TOKENS, dense)
            y = matmul_24(left.data, x, transpose_result=call.geometry != Linear(1))
        return cut(y, call.shape).contiguous()


@dataclass(frozen=True, kw_only=True)
class Sparse24FP8(Sparse24, FP8):
    """Pack one 2:4 operand and multiply in fp8 with cuSPARSELt.

    The library reads a factor of the product on the host, so scales and bias are applied after it.
    """

    kind: ClassVar[Kind] = "sparse24_fp8"
    limits: ClassVar[Limits] = LIMITS[torch.float8_e4m3fn]

    def __call__(
        self, call: MatmulCall, left: Prepared, right: Prepared, bias: Tensor | None = None
    ) -> Tensor:
        if self.kind not in (left.kind, right.kind):
            return super().__call__(call, left, right, bias)
        _, columns, dense, _ = self.limits
        # fp8 has kernels for one layout only: packed·denseᵀ with rows along the sum
        multiply = functools.partial(matmul_24, transpose_dense=True, out_dtype=torch.float32)
        if right.kind == self.kind:
            x = padded(rows_of(left.data), TOKENS, columns)
            y = multiply(right.data, x, transpose_result=True)
        elif call.name == "dgrad":
            y = multiply(left.data, padded(right.data.t(), dense, columns))
        else:
            x = padded(rows_of(right.data).t(), dense, TOKENS)
            y = multiply(left.data, x, transpose_result=call.geometry != Linear(1))
        scales = scale_of(left), scale_of(right)
        return unscaled(cut(y, call.shape), *scales, bias, out_dtype=call.dtype)


@functools.cache
def packing(base: Matmuls, operands: str) -> Matmuls:
    """Return matmuls that pack ``operands`` of :data:`PACKED`; B comes before P."""
    chosen = base._asdict()
    for operand in reversed(operands):
        name = MATMUL_OF[operand]
        matmul = getattr(base, name)
        kind = Sparse24FP8 if isinstance(matmul, FP8) else Sparse24
        chosen[name] = kind(**vars(matmul) | {"packs": operand})
    return Matmuls(**chosen)


def padded_features(base: Matmuls, operand: str, out: int, inputs: int) -> tuple[int, int]:
    """Return out_features and in_features of a sparse matmul that packs ``operand``, padded.

    A (out, in), B (in, out), P (tokens, out) and U (out, tokens) are packed; with P and U,
    in_features are the columns of the dense operand.
    """
    matmul = getattr(packing(base, operand), MATMUL_OF[operand])
    rows, columns, dense, _ = matmul.limits
    multiples = {
        "A": (rows, columns), "B": (columns, rows), "P": (columns, dense), "U": (rows, dense)
    }  # fmt: skip
    of_out, of_in = multiples[operand]
    return rounded_up(out, of_out), rounded_up(inputs, of_in)


def rounded_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def padding(base: Matmuls, operand: str, out: int, inputs: int) -> str:
    """Return the zero padding of a sparse matmul that packs ``operand`` in words, or ""."""
    wide = padded_features(base, operand, out, inputs)
    if wide == (out, inputs):
        return ""
    work = wide[0] * wide[1] / (out * inputs) - 1
    return f"{out} × {inputs} to {wide[0]} × {wide[1]} (+{work:.1%} work)"


def cannot_pack(matmul: Matmul, dtype: torch.dtype | None = None) -> str:
    """Return the reason for which ``matmul`` has no sparse version; "": it has one.

    ``dtype``: of the layer; None: not known yet.
    """
    if isinstance(matmul, FP8):
        if matmul.simulate:
            return "its matmuls are in simulated fp8"
        same = matmul.left == matmul.right
        return "" if same else f"cuSPARSELt has no kernel of {matmul.left}×{matmul.right}"
    if dtype is None or dtype in TYPES:
        return ""
    name = str(dtype).removeprefix("torch.")
    return f"sparse matmuls exist in fp16 and bf16, not in {name}"


def can_pack(packs: str, operand: str, x: Tensor) -> bool:
    """Return True if ``operand`` is the packed one and ``x`` has whole groups of four tokens."""
    return operand == packs and not (operand == "U" and spans_samples(x.shape[:-1]))


def spans_samples(shape: tuple[int, ...]) -> str:
    """Return the reason for which tokens (…, tokens of a sample) cannot be packed, or ""."""
    odd = len(shape) > 1 and shape[-1] % 4
    return f"samples of {shape[-1]} tokens, no multiple of 4" if odd else ""


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return a contiguous matrix, padded with zeros to multiples of ``rows`` × ``columns``.

    ``x`` itself if it is such a matrix.
    """
    below = -x.shape[0] % rows
    right = -x.shape[1] % columns
    return (F.pad(x, (0, right, 0, below)) if below or right else x).contiguous()


def cut(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view of a padded result without its padding, in ``shape``."""
    return y[: math.prod(shape[:-1]), : shape[-1]].view(shape)
