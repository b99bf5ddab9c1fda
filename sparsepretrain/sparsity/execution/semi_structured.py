"""Sparse products of packed 2:4 operands, and which products of which layer are worth one."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.kernels import compress_24, matmul_24, quantize_fp8, unscaled
from sparsepretrain.kernels.common import Limits, broken
from sparsepretrain.kernels.cusparselt.packed24 import unsupported
from sparsepretrain.kernels.timing import medians
from sparsepretrain.sparsity.execution.base import (
    Estimate,
    Execution,
    Geometry,
    Kept,
    Linear,
    Operands,
    into,
    misfit,
)
from sparsepretrain.sparsity.execution.fp8 import FP8, Quantised

if TYPE_CHECKING:
    from sparsepretrain.sparsity.method import Row

PRODUCT = {"A": "fprop", "Xf": "fprop", "B": "dgrad", "P": "dgrad", "U": "wgrad", "Xw": "wgrad"}
"""Place of an operand in the row -> the product that it belongs to."""
PACKED = ("A", "B", "P", "U")
"""Places whose operands are packed."""
TOKENS = 512
"""Zeros fill up the tokens of a sparse product to a multiple of it.

Every size of a product is checked once and searched for its fastest algorithm, which takes tenths
of a second. Token counts that change from batch to batch (translation, fine-tuning) then share a
few sizes, and each product that runs is still one that was checked. At 16k tokens it costs at most
3 % of a product; ``auto`` counts it. It is a multiple of all of :data:`LIMITS`, too.
"""


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
        old_a, old_b, *_ = out or (None, None)
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
        y = matmul_24(a, _rows(x), bias, **flags)
        return _cut(y, (*x.shape[:-1], a.shape[0])), (xs[1],)

    def dgrad(self, how: Geometry, grad: Tensor, operands: Operands, shape: torch.Size) -> Tensor:
        """DXᵀ = Bᵀ·Gᵀ, or dX = P(G)·B."""
        weight = operands.for_dgrad()
        if weight.shape != (grad.shape[-1], shape[-1]):  # packed
            flags: Any = {"transpose_dense": True, "transpose_result": True}
            return _cut(matmul_24(weight, _rows(grad), **flags), shape)
        if "P" not in self.packs:
            return super().dgrad(how, grad, operands, shape)
        packed, turned = compress_24(_rows(grad)), weight.t().is_contiguous()
        dense = weight.t() if turned else weight.contiguous()  # Conv1D stores (in, out)
        return _cut(matmul_24(packed, dense, transpose_dense=turned), shape)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """DW = U(G)ᵀ·X, or its transpose where the weight is stored so."""
        x = kept[0]
        if "U" not in self.packs or straddles(x.shape[:-1]):
            return super().wgrad(how, grad, estimate, kept, shape)
        sampled = estimate(grad, "tokens_last").to(x.dtype)  # its transpose is contiguous
        assert isinstance(how, Linear)
        return matmul_24(compress_24(_columns(sampled)), _rows(x), transpose_result=how.dim == 0)


@dataclass(frozen=True, kw_only=True)
class SemiStructuredFP8(FP8):
    """Sparse fp8 products of some operands of a layer; the others are dense fp8 products.

    The library reads a factor of the product on the host, so scales and bias come after it.
    """

    packs: str
    """As in :class:`SemiStructured`; what is packed shares its format with the other operand."""

    def __str__(self) -> str:
        return f"semi_structured: {self.packs}, {super().__str__()}"

    def arrange(self, q: Tensor, place: str) -> Tensor:
        """A of (out, in·10/16) and the transpose of Bᵀ of (in, out·10/16) where they are packed."""
        if place not in self.packs:
            return super().arrange(q, place)
        return compress_24(q.contiguous()) if place == "A" else compress_24(q.t().contiguous()).t()

    def multiply(
        self, left: Quantised, right: Quantised, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Yᵀ = A·Xᵀ and dXᵀ = Bᵀ·Gᵀ where ``right`` is packed."""
        (x, scale_x), (packed, scale) = left, right
        if packed.shape[1] == x.shape[1]:
            return super().multiply(left, right, bias, dtype)
        y = _product(packed, _rows(x), transpose_result=True)
        return unscaled(y[: x.shape[0]], scale_x, scale, bias, out_dtype=dtype)

    def dgrad(self, how: Geometry, grad: Tensor, operands: Operands, shape: torch.Size) -> Tensor:
        """As dense, or dX = P(G)·B."""
        if "P" not in self.packs:
            return super().dgrad(how, grad, operands, shape)
        assert operands.scales is not None
        g, scale = quantize_fp8(grad, self.gradient)
        packed = compress_24(_rows(g))
        dx = _product(packed, operands.for_dgrad().t(), transpose_result=False)
        scales = scale, operands.scales[1]
        return unscaled(_cut(dx, shape), *scales, out_dtype=grad.dtype)

    def wgrad(
        self, how: Geometry, grad: Tensor, estimate: Estimate, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """As dense, or dW = U(G)ᵀ·X."""
        x, scale_x = kept
        if "U" not in self.packs or straddles(x.shape[:-1]):
            return super().wgrad(how, grad, estimate, kept, shape)
        assert isinstance(how, Linear)
        u, scale = quantize_fp8(estimate(grad.float(), "tokens_last"), self.gradient)
        dw = _product(compress_24(_columns(u)), _columns(x), transpose_result=how.dim == 0)
        return unscaled(dw, scale, scale_x, out_dtype=torch.float32)


def _product(packed: Tensor, dense: Tensor, *, transpose_result: bool) -> Tensor:
    """Packed·denseᵀ in fp8, the one layout that has kernels, with fp32 for what it comes to."""
    flags: Any = {"transpose_dense": True, "transpose_result": transpose_result}
    return matmul_24(packed, dense, out_dtype=torch.float32, **flags)


def _multiples(place: str, limits: Limits) -> tuple[int, int]:
    """Multiples that out_features and in_features are of, where the operand at ``place`` is packed.

    A (out, in), B (in, out), P (tokens, out) and U (out, tokens) are packed; with P and U,
    in_features are columns of the dense operand.
    """
    rows, columns, dense, _ = limits
    return {"A": (rows, columns), "B": (columns, rows), "P": (columns, dense), "U": (rows, dense)}[
        place
    ]


@functools.cache
def packings(base: Execution) -> dict[str, Execution]:
    """Places whose operands are packed -> the execution that does; ``base`` multiplies the rest.

    One object per choice: compiled graphs know them by their identity.
    """
    counts = range(1, 4)
    found = ["".join(p) for n in counts for p in itertools.combinations(PACKED, n)]
    made: dict[str, Execution] = {"": base}
    if isinstance(base, FP8):
        return made | {k: SemiStructuredFP8(**asdict(base), packs=k) for k in found}
    return made | {k: SemiStructured(packs=k) for k in found}


def straddles(shape: tuple[int, ...]) -> str:
    """Why the tokens of an input (…, tokens of a sample) are no packed groups; "": they are."""
    odd = len(shape) > 1 and shape[-1] % 4
    return f"samples of {shape[-1]} tokens, no multiple of 4" if odd else ""


def _rows(x: Tensor) -> Tensor:
    """X as a contiguous matrix, with zeros for tokens that are missing to a multiple."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % TOKENS
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).contiguous()


def _columns(x: Tensor) -> Tensor:
    """The transpose of :func:`_rows`, contiguous."""
    columns = x.reshape(-1, x.shape[-1]).t()
    missing = -columns.shape[1] % TOKENS
    return (F.pad(columns, (0, missing)) if missing else columns).contiguous()


def _cut(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without what :func:`_rows` has added, in ``shape``."""
    return rows[: torch.Size(shape[:-1]).numel()].view(shape)


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
    """With the packing of its operand; of weights, the share of one micro-batch of a step."""
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
        self.micro_batches = 1
        """Micro-batches of a step, which share packed weights; 1 where that is not known."""
        self.trials: dict[Case, Trial] = {}

    def fit(
        self,
        row: Row,
        shape: tuple[int, ...],
        dim: int,
        device: torch.device,
        base: Execution,
        why: str = "",
    ) -> dict[str, str]:
        """Place of an N:M operand -> why it cannot be packed; "": it can.

        Args:
            row: what the products see once they are sparse.
            shape: of the stored weight.
            dim: of in_features in it.
            device: of the weight.
            base: multiplies what is not packed.
            why: no product of the model can be sparse.
        """
        where = self.device if device.type == "meta" else device
        if not why and where is not None:
            why = unsupported(where, fp8=isinstance(base, FP8)) or ""
        found = {}
        for place, operand in row._asdict().items():
            if operand.pattern is None:
                continue
            n, m = operand.pattern
            other = "" if place in PACKED else "the 2:4 operand is an activation"
            other = other if (n, m) == (2, 4) else f"{n}:{m}, not 2:4"
            other = other or base.unpackable(place) or why
            found[place] = other or misfit(shape, dim, *_multiples(place, base.limits))
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

    def require_here(self, device: torch.device, dtype: torch.dtype, base: Execution) -> None:
        """Refuse a device or a dtype without sparse products, where these were asked for.

        ``base``: multiplies what is not packed.

        Raises:
            ConfigError: says why.
        """
        if self.name == "auto":
            return
        why = unsupported(device, fp8=isinstance(base, FP8)) or base.unpackable("A", dtype)
        if why:
            raise ConfigError(f"backend={self.name}: {why}: backend=auto or emulate trains")

    def execution(
        self, choices: Mapping[str, Execution], row: Row, packs: str, dtype: torch.dtype
    ) -> Execution:
        """What a layer multiplies with in the phase of ``row``; ``choices``: its packings."""
        base = choices[""]
        now = [place for place in packs if getattr(row, place).pattern == (2, 4)]
        return choices["".join([p for p in now if not base.unpackable(p, dtype)])]

    def settle(
        self,
        fits: Mapping[str, str],
        sizes: tuple[int, int, int],
        inputs: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool,
        base: Execution,
    ) -> dict[str, str]:
        """``fits`` after trials with inputs of one shape.

        Args:
            fits: see :meth:`fit`.
            sizes: out_features, in_features, and the dimension of the latter.
            inputs: (…, tokens of a sample), without in_features.
            dtype: of the products.
            device: of the layer.
            bias: whether the layer has one.
            base: multiplies what is not packed.
        """
        out_features, in_features, dim = sizes
        found = dict(fits)
        for place in (place for place, why in fits.items() if not why):
            tokens = torch.Size(inputs).numel()
            case = Case(place, out_features, in_features, tokens, dtype, dim, bias)
            why = objection(place, inputs, dtype, base)
            if not why and case not in self.trials:
                self.trials[case] = self.attempt(case, device, base)
            found[place] = why or self.trials[case].objection
        return found

    @torch.no_grad()
    def attempt(self, case: Case, device: torch.device, base: Execution) -> Trial:
        """Run one product, sparse, on random numbers; ``auto`` times it and the one by ``base``."""
        place, out_features, in_features, tokens, dtype, dim, bias = case
        random = torch.Generator(device).manual_seed(0)

        def draw(*size: int, holes: bool = False) -> Tensor:
            """Random numbers; with holes 2:4 along both axes, as on a chessboard."""
            values = torch.randn(size, generator=random, device=device)
            if holes:
                values[::2, 1::2], values[1::2, ::2] = 0, 0
            return values.to(dtype)

        # only the packed operand has zeros: a dense product is faster where there are more of them
        weights = place in ("A", "B")
        x, grad = draw(tokens, in_features), draw(tokens, out_features, holes=not weights)
        weight = draw(out_features, in_features, holes=weights)
        weight = weight if dim == 1 else weight.t().contiguous().t()
        offset = draw(1, out_features)[0] if bias else None
        stored = torch.Size((out_features, in_features) if dim else (in_features, out_features))
        how, exact = Linear(dim), Operands(weight, None, None)
        kept = base.fprop(how, (x, x), base.prepare(exact, dtype, None), offset)[1]

        def run(execution: Execution, operands: Operands | None = None) -> Tensor:
            operands = operands or execution.prepare(exact, dtype, None)
            if place == "A":
                return execution.fprop(how, (x, x), operands, offset)[0]
            if place == "U":
                return execution.wgrad(how, grad, lambda g, order=None: g, kept, stored)
            return execution.dgrad(how, grad, operands, x.shape)

        both = {"emulated": base, "sparse": packings(base)[place]}
        works: dict[str, Any] = {}
        times: dict[str, float] = {}
        try:
            run(both["sparse"])  # which looks for an algorithm
            if self.name == "auto":
                for name, each in both.items():
                    works[name] = partial(run, each, each.prepare(exact, dtype, None))
                    if weights:
                        works[f"first {name}"] = partial(run, each)
                times = medians(works, device)
        except (RuntimeError, ValueError) as error:  # of the library, or of a size
            if broken(error, device):
                raise
            return Trial(error=one_line(error))

        def mean(name: str) -> float:
            """Per micro-batch, where the first one of a step prepares the weights."""
            later = times.get(name, 0.0)
            return later + (times.get(f"first {name}", later) - later) / self.micro_batches

        return Trial(mean("emulated"), mean("sparse"))

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


def objection(place: str, inputs: tuple[int, ...], dtype: torch.dtype, base: Execution) -> str:
    """Why inputs (…, tokens of a sample) of ``dtype`` have no sparse product; "": they have."""
    return base.unpackable(place, dtype) or (straddles(inputs) if place == "U" else "")
