"""Policy of sparse matmuls: which 2:4 operands of a model are packed, with the reasons."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsepretrain.errors import ConfigError, one_line
from sparsepretrain.kernels.cusparselt.packed24 import searching
from sparsepretrain.kernels.cusparselt.startup import FP8, unsupported
from sparsepretrain.kernels.hardware import broken
from sparsepretrain.kernels.timing import medians
from sparsepretrain.sparsity.matmuls.fp8 import FP8Precision, fp8_matmuls
from sparsepretrain.sparsity.matmuls.geometry import LayerSize, Linear
from sparsepretrain.sparsity.matmuls.sparse24 import (
    PACKED,
    cannot_pack,
    packing,
    spans_samples,
)
from sparsepretrain.sparsity.matmuls.three import (
    DENSE,
    MATMUL_OF,
    Estimate,
    Matmul,
    MatmulCall,
    Matmuls,
    Prepared,
)
from sparsepretrain.sparsity.operand_table import Row


class Case(NamedTuple):
    """One matmul of layers of one size, for the tokens of a micro-batch."""

    operand: str  # that is packed
    out_features: int
    in_features: int
    tokens: int
    dtype: torch.dtype
    dim: int  # axis of in_features in the stored weight
    bias: bool


class Trial(NamedTuple):
    """Median seconds of one matmul in a forward or backward; 0: not timed."""

    emulated: float = 0.0
    sparse: float = 0.0
    """Packing included; the packing of weights divided by the micro-batches of a step."""
    error: str = ""

    @property
    def objection(self) -> str:
        """Reason for which the matmul stays dense; "": it is sparse."""
        if self.error or self.sparse <= self.emulated:
            return self.error
        return f"slower: {self.sparse * 1e6:.0f} µs, emulated {self.emulated * 1e6:.0f} µs"


class SparseMatmulPolicy:
    """Policy of a model: which of the possible 2:4 operands are packed.

    ``semi_structured`` packs all of them, ``auto`` those whose matmul becomes faster. Layers of one
    size share trials.

    Args:
        name: ``semi_structured`` or ``auto``.
        device: where a model that is on the meta device will train; None: not known.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name = name
        self.device = device
        self.micro_batches = 1
        """Micro-batches of a step, which share packed weights; 1 if not known."""
        self.trials: dict[Case, Trial] = {}

    def reasons(self, row: Row, size: LayerSize, base: Matmuls) -> dict[str, str]:
        """Return N:M operand -> the reason for which it cannot be packed; "": it can."""
        device = self.device if size.device.type == "meta" else size.device
        missing = "" if device is None else unsupported(device, *packed_types(base)) or ""
        whys = {}
        for name, operand in row._asdict().items():
            if operand.pattern is None:
                continue
            why = "" if name in PACKED else "the 2:4 operand is an activation"
            if operand.pattern != (2, 4):
                why = "{}:{}, not 2:4".format(*operand.pattern)
            elif not why:
                matmul = getattr(base, MATMUL_OF[name])
                why = cannot_pack(matmul) or missing or size.no_matrix()
            whys[name] = why
        return whys

    def require(self, method: str, reasons: Iterable[Mapping[str, str]]) -> None:
        """Refuse a model without a single sparse matmul, unless ``auto`` chooses."""
        every = [why for layer in reasons for why in layer.values()]
        if self.name == "auto" or "" in every:
            return
        why = statistics.mode(every) if every else f"{method} has no 2:4 operand"
        raise ConfigError(
            f"sparse_matmuls={self.name}: no matmul can be sparse: {why}: sparse_matmuls=auto or "
            "emulate trains"
        )

    def require_here(
        self, device: torch.device, dtype: torch.dtype, precision: FP8Precision | None
    ) -> None:
        """Refuse a device or dtype without sparse matmuls, unless ``auto`` chooses."""
        if self.name == "auto":
            return
        base = DENSE
        if precision is not None:
            base = fp8_matmuls(precision.recipe, precision.name == "fp8_sim")
        # in this order: a type that cannot be packed is not tested on the device
        if why := cannot_pack(base.fprop, dtype) or unsupported(device, *packed_types(base, dtype)):
            raise ConfigError(
                f"sparse_matmuls={self.name}: {why}: sparse_matmuls=auto or emulate trains"
            )

    @torch.no_grad()
    def attempt(self, case: Case, device: torch.device, base: Matmuls) -> Trial:
        """Run one sparse matmul on random numbers; ``auto`` also times it against ``base``."""
        # before any search, which would break the device where a type does not work
        if why := unsupported(device, *packed_types(base, case.dtype)):
            return Trial(error=why)
        left, right, call, bias = random_matmul(case, device)
        names = {"fprop": ("Xf", "A"), "dgrad": ("P", "B"), "wgrad": ("U", "Xw")}[call.name]
        matmuls = {
            "emulated": getattr(base, call.name),
            "sparse": getattr(packing(base, case.operand), call.name),
        }

        def run(matmul: Matmul, prepared: Prepared | None = None) -> Tensor:
            a = matmul.prepare(left, names[0])
            return matmul(call, a, prepared or matmul.prepare(right, names[1]), bias)

        works: dict[str, Callable[[], Tensor]] = {}
        times: dict[str, float] = {}
        try:
            with searching():
                run(matmuls["sparse"])
            if self.name == "auto":
                for name, matmul in matmuls.items():
                    works[name] = partial(run, matmul, matmul.prepare(right, names[1]))
                    if case.operand in ("A", "B"):
                        works[f"first {name}"] = partial(run, matmul)
                times = medians(works, device)
        except (RuntimeError, ValueError) as error:  # raised by the library, or for a size
            if broken(error, device):
                raise
            return Trial(error=one_line(error))

        def mean(name: str) -> float:
            """Seconds per micro-batch, the first of which prepares the weights."""
            later = times.get(name, 0.0)
            return later + (times.get(f"first {name}", later) - later) / self.micro_batches

        return Trial(mean("emulated"), mean("sparse"))

    def table(self) -> list[dict[str, Any]]:
        """Return the trials as rows of plain values."""
        rows = []
        for case, trial in self.trials.items():
            runs = {
                "matmul": MATMUL_OF[case.operand],
                "runs": "emulated" if trial.objection else "sparse",
            }
            dtype = {"dtype": str(case.dtype).removeprefix("torch.")}
            rows.append(runs | case._asdict() | dtype | trial._asdict())
        return rows


def objection(operand: str, tokens: Sequence[int], dtype: torch.dtype, base: Matmuls) -> str:
    """Return the reason for which tokens (…, tokens of a sample) have no sparse matmul, or ""."""
    why = cannot_pack(getattr(base, MATMUL_OF[operand]), dtype)
    return why or (spans_samples(tuple(tokens)) if operand == "U" else "")


def uses_fp8(base: Matmuls) -> bool:
    """Return True if the matmuls run on fp8 tensor cores."""
    return base.fprop.rounds and not cannot_pack(base.fprop)


def packed_types(base: Matmuls, dtype: torch.dtype | None = None) -> tuple[torch.dtype, ...]:
    """Return the type that packed operands of a layer have; () if ``dtype`` is not known yet."""
    if uses_fp8(base):
        return (FP8,)
    return () if dtype is None else (dtype,)


def random_matmul(
    case: Case, device: torch.device
) -> tuple[Tensor | Estimate, Tensor, MatmulCall, Tensor | None]:
    """Return left and right operands, their matmul and a bias, with zeros in the packed operand.

    More zeros would make the dense matmul faster than it is in training.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, holes: bool = False) -> Tensor:
        """Random numbers; with holes 2:4 along both axes, as on a chessboard."""
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        if holes:
            values[::2, 1::2], values[1::2, ::2] = 0, 0
        return values.to(case.dtype)

    name = MATMUL_OF[case.operand]
    out = case.out_features
    inputs = case.in_features
    dim = case.dim
    is_weight = case.operand in ("A", "B")
    x = draw(case.tokens, inputs)
    grad = draw(case.tokens, out, holes=not is_weight)
    weight = draw(out, inputs, holes=is_weight)
    weight = weight if dim == 1 else weight.t().contiguous().t()
    bias = draw(1, out)[0] if case.bias and name == "fprop" else None
    geometry = Linear(dim)
    if name == "fprop":
        return x, weight, MatmulCall("fprop", geometry, grad.shape, case.dtype), bias
    if name == "dgrad":
        return grad, weight, MatmulCall("dgrad", geometry, x.shape, case.dtype), bias
    shape = (out, inputs) if dim else (inputs, out)
    estimate = Estimate(grad, lambda g, order: g)
    return estimate, x, MatmulCall("wgrad", geometry, shape, torch.float32), bias


def sparse_matmul_policy(policy: str | SparseMatmulPolicy) -> SparseMatmulPolicy | None:
    """Return the policy of ``sparsify(sparse_matmuls=…)``; None: no operand is packed."""
    if isinstance(policy, SparseMatmulPolicy):
        return policy
    if policy == "emulate":
        return None
    if policy in ("semi_structured", "auto"):
        return SparseMatmulPolicy(policy)
    if policy in ("reference", "triton", "cpu", "cusparselt"):
        raise ConfigError(
            f"sparse_matmuls={policy!r} is a backend of single kernels (sparsepretrain.kernels); "
            "layers have 'emulate', 'semi_structured' and 'auto'"
        )
    raise ConfigError(
        "sparse_matmuls must be 'emulate' (dense matmuls of sparse operands), 'semi_structured' "
        f"(sparse matmuls) or 'auto' (the faster ones), got {policy!r}"
    )
