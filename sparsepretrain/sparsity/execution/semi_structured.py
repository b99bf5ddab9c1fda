"""Sparse products of packed 2:4 operands, and which products of which layer are worth one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.kernels import compress_24, matmul_24
from sparsepretrain.kernels.cusparselt.packed24 import seconds, unsupported
from sparsepretrain.kernels.packed24 import LIMITS, TYPES
from sparsepretrain.sparsity.execution.base import (
    EMULATE,
    Estimate,
    Execution,
    Geometry,
    Kept,
    Linear,
    Operands,
    into,
)

if TYPE_CHECKING:
    from sparsepretrain.sparsity.method import Row

SPARSE, DENSE, _ = LIMITS[torch.float16]
PRODUCT = {"A": "fprop", "Xf": "fprop", "B": "dgrad", "P": "dgrad", "U": "wgrad", "Xw": "wgrad"}
"""Place of an operand in the row -> the product that it belongs to."""
PACKED = ("A", "B", "P", "U")
"""Places whose operands are packed."""
ROUNDS = 5
"""Of a trial, in which sparse and emulated products take turns."""


@dataclass(frozen=True, kw_only=True)
class SemiStructured(Execution):
    """Sparse products of some operands of a layer; the others are emulated.

    Sums are in fp32 and rounded once to the dtype of X, as in dense products, but in another order.
    """

    packs: str
    """Of :data:`PACKED`, those that are here. A and B are, with the operands of a step
    (B transposed: its groups run along out_features); P(G) and U(G)ᵀ in each backward."""

    def __str__(self) -> str:
        return f"semi_structured: {self.packs}"

    def prepare(self, exact: Operands, dtype: torch.dtype, out: Operands | None) -> Operands:
        """A of (out, in·9/16) and B of (in, out·9/16) where they are packed."""
        old_a, old_b, _ = out or (None, None, None)
        a = exact.forward.to(dtype)
        b = a if exact.backward is None else exact.backward.to(dtype)
        has_b = exact.backward is not None or bool({"A", "B"} & {*self.packs})
        if "B" in self.packs:
            b = compress_24(b.t().contiguous())
        if "A" in self.packs:
            a = compress_24(a.contiguous())
        return Operands(into(old_a, a), into(old_b, b) if has_b else None, exact.wgrad_scale)

    def fprop(
        self, how: Geometry, xs: tuple[Tensor, Tensor], operands: Operands, bias: Tensor | None
    ) -> tuple[Tensor, Kept]:
        """Yᵀ = A·Xᵀ + b."""
        x, a = xs[0], operands.forward
        if a.shape[1] == x.shape[-1]:  # not packed
            return super().fprop(how, xs, operands, bias)
        bias = None if bias is None else bias.to(x.dtype)
        flags: Any = {"transpose_dense": True, "transpose_result": True}
        y = matmul_24(a, _rows(x, DENSE), bias, **flags)
        return _cut(y, (*x.shape[:-1], a.shape[0])), (xs[1],)

    def dgrad(self, how: Geometry, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """DXᵀ = Bᵀ·Gᵀ, or dX = P(G)·B."""
        if weight.shape != (grad.shape[-1], shape[-1]):  # packed
            flags: Any = {"transpose_dense": True, "transpose_result": True}
            return _cut(matmul_24(weight, _rows(grad, DENSE), **flags), shape)
        if "P" not in self.packs:
            return super().dgrad(how, grad, weight, shape)
        packed, turned = compress_24(_rows(grad, SPARSE)), weight.t().is_contiguous()
        dense = weight.t() if turned else weight.contiguous()  # Conv1D stores (in, out)
        return _cut(matmul_24(packed, dense, transpose_dense=turned), shape)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """DW = U(G)ᵀ·X, or its transpose where the weight is stored so."""
        x = kept[0]
        if "U" not in self.packs or straddles(x.shape[:-1]):
            return super().wgrad(how, grad, estimate, kept, shape)
        sampled = estimate(grad).to(x.dtype)
        packed = compress_24(sampled.reshape(-1, grad.shape[-1]).t().contiguous())
        assert isinstance(how, Linear)
        return matmul_24(packed, _rows(x, SPARSE), transpose_result=how.dim == 0)


def straddles(shape: tuple[int, ...]) -> str:
    """Why the tokens of an input (…, tokens of a sample) are no packed groups; "": they are."""
    tokens = torch.Size(shape).numel()
    if len(shape) > 1 and shape[-1] % 4:
        return f"samples of {shape[-1]} tokens, no multiple of 4"
    return f"{tokens} tokens, no multiple of {SPARSE}" if tokens % SPARSE else ""


def _rows(x: Tensor, multiple: int) -> Tensor:
    """X as a contiguous matrix, with zeros for tokens that are missing to a multiple."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % multiple
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).contiguous()


def _cut(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without what :func:`_rows` has added, in ``shape``."""
    return rows[: torch.Size(shape[:-1]).numel()].view(shape)


_EXECUTIONS = {
    "".join(places): SemiStructured(packs="".join(places))
    for count in (1, 2, 3)
    for places in itertools.combinations(PACKED, count)
}
"""One object per choice: compiled graphs know them by their identity."""


class Case(NamedTuple):
    """A product of a layer, for as many tokens as a micro-batch has."""

    place: str
    out_features: int
    in_features: int
    tokens: int
    dtype: torch.dtype
    dim: int  # of in_features in the stored weight
    bias: bool


class Trial(NamedTuple):
    """Seconds of one product in a forward or backward, as a median; 0: not timed."""

    emulated: float = 0.0
    sparse: float = 0.0
    """With the packing of its operand, as if every micro-batch packed the weights."""
    error: str = ""

    @property
    def objection(self) -> str:
        """Why the product is emulated; "": it is not."""
        if self.error or self.sparse <= self.emulated:
            return self.error
        return f"slower: {self.sparse * 1e6:.0f} µs, emulated {self.emulated * 1e6:.0f} µs"


class Backend:
    """Which products of a model are sparse: all that can be, or (``auto``) those that are faster.

    What is decided for a layer is in its state; this holds what layers of one size share.

    Args:
        name: ``semi_structured`` or ``auto``.
        device: where a model that is on the meta device will train; None: not known.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name = name
        self.device = device
        self.trials: dict[Case, Trial] = {}

    def fit(
        self, row: Row, shape: tuple[int, ...], dim: int, device: torch.device, why: str = ""
    ) -> dict[str, str]:
        """Place of an N:M operand -> why it cannot be packed; "": it can.

        Args:
            row: what the products see once they are sparse.
            shape: of the stored weight.
            dim: of in_features in it.
            device: of the weight.
            why: no product of the model can be sparse.
        """
        where = self.device if device.type == "meta" else device
        if not why and where is not None:
            why = unsupported(where) or ""
        if not why and len(shape) != 2:
            why = "a convolution"
        sizes = {"out_features": shape[1 - dim], "in_features": shape[dim]}
        odd = [
            f"{k} = {size}, no multiple of {SPARSE}" for k, size in sizes.items() if size % SPARSE
        ]
        why, found = why or ", ".join(odd), {}
        for place, operand in row._asdict().items():
            if operand.pattern is None:
                continue
            n, m = operand.pattern
            other = "" if place in PACKED else "the 2:4 operand is an activation"
            other = other if (n, m) == (2, 4) else f"{n}:{m}, not 2:4"
            found[place] = other or why
        return found

    def require(self, method: str, fits: Iterable[dict[str, str]]) -> None:
        """Refuse a model of which no product can be sparse, where sparse ones were asked for.

        Raises:
            ConfigError: says why.
        """
        reasons = [why for layer in fits for why in layer.values()]
        if self.name == "auto" or "" in reasons:
            return
        why = statistics.mode(reasons) if reasons else f"{method} has no 2:4 operand"
        raise ConfigError(
            f"backend={self.name}: no product can be sparse: {why}: backend=auto or emulate trains"
        )

    def require_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse a device or a dtype without sparse products, where these were asked for.

        Raises:
            ConfigError: says why.
        """
        if self.name != "auto" and (why := unsupported(device) or no_products(dtype)):
            raise ConfigError(f"backend={self.name}: {why}: backend=auto or emulate trains")

    def execution(self, row: Row, packs: str, dtype: torch.dtype) -> Execution:
        """What a layer multiplies with in the phase of ``row``."""
        packs = "".join([place for place in packs if getattr(row, place).pattern == (2, 4)])
        return _EXECUTIONS[packs] if packs and dtype in TYPES else EMULATE

    def settle(
        self,
        fits: Mapping[str, str],
        sizes: tuple[int, int, int],
        inputs: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool,
    ) -> dict[str, str]:
        """``fits`` after trials with inputs of one shape.

        Args:
            fits: see :meth:`fit`.
            sizes: out_features, in_features, and the dimension of the latter.
            inputs: (…, tokens of a sample), without in_features.
            dtype: of the products.
            device: of the layer.
            bias: whether the layer has one.
        """
        out_features, in_features, dim = sizes
        found = dict(fits)
        for place in (place for place, why in fits.items() if not why):
            tokens = torch.Size(inputs).numel()
            case = Case(place, out_features, in_features, tokens, dtype, dim, bias)
            why = objection(place, inputs, dtype)
            if not why and case not in self.trials:
                self.trials[case] = self.attempt(case, device)
            found[place] = why or self.trials[case].objection
        return found

    @torch.no_grad()
    def attempt(self, case: Case, device: torch.device) -> Trial:
        """Run one product, sparse and emulated, on random numbers; ``auto`` times both."""
        place, out_features, in_features, tokens, dtype, dim, bias = case
        random = torch.Generator(device).manual_seed(0)

        def draw(*size: int) -> Tensor:
            """2:4 along both axes: every other one, as on a chessboard."""
            values = torch.randn(size, generator=random, device=device)
            values[::2, 1::2], values[1::2, ::2] = 0, 0
            return values.to(dtype)

        x, grad = draw(tokens, in_features), draw(tokens, out_features)
        weight = draw(out_features, in_features)
        weight = weight if dim == 1 else weight.t().contiguous().t()
        offset = draw(1, out_features)[0] if bias else None
        stored = torch.Size((out_features, in_features) if dim else (in_features, out_features))
        how = Linear(dim)

        def run(execution: Execution) -> Tensor:
            operands = execution.prepare(Operands(weight, None, None), dtype, None)
            if place == "A":
                return execution.fprop(how, (x, x), operands, offset)[0]
            if place == "U":
                return execution.wgrad(how, grad, lambda g: g, (x,), stored)
            b = operands.forward if operands.backward is None else operands.backward
            return execution.dgrad(how, grad, b, x.shape)

        sparse, times = _EXECUTIONS[place], []
        try:
            run(sparse)
            for _ in range(ROUNDS if self.name == "auto" else 0):  # in turns
                times.append([seconds(partial(run, each), device) for each in (EMULATE, sparse)])
        except RuntimeError as error:
            return Trial(error=one_line(error))
        return Trial(*map(statistics.median, zip(*times, strict=True)))

    def table(self) -> list[dict[str, Any]]:
        """What was tried, as rows of plain values."""
        rows = []
        for case, trial in self.trials.items():
            runs = {"product": PRODUCT[case.place], "runs": "sparse"}
            if trial.objection:
                runs["runs"] = "emulated"
            dtype = {"dtype": str(case.dtype).removeprefix("torch.")}
            rows.append(runs | case._asdict() | dtype | trial._asdict())
        return rows


def objection(place: str, inputs: tuple[int, ...], dtype: torch.dtype) -> str:
    """Why inputs (…, tokens of a sample) of ``dtype`` have no sparse product; "": they have."""
    return no_products(dtype) or (straddles(inputs) if place == "U" else "")


def no_products(dtype: torch.dtype) -> str:
    """Why products in ``dtype`` are not sparse; "": they can be."""
    name = str(dtype).removeprefix("torch.")
    return "" if dtype in TYPES else f"sparse products exist in fp16 and bf16, not in {name}"
