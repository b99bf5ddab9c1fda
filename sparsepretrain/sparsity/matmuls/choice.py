"""Choose the matmuls of each layer: dense, in fp8 or sparse, with the reasons."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError, Problems, one_line
from sparsepretrain.kernels import no_fp8_matmuls
from sparsepretrain.kernels.cusparselt.packed24 import searching, unsupported
from sparsepretrain.kernels.fp8 import FP8_MULTIPLE
from sparsepretrain.kernels.hardware import broken
from sparsepretrain.kernels.timing import medians
from sparsepretrain.sparsity.matmuls.fp8 import fp8_matmuls
from sparsepretrain.sparsity.matmuls.geometry import Linear
from sparsepretrain.sparsity.matmuls.sparse24 import (
    PACKED,
    cannot_pack,
    packing,
    padding,
    straddles,
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
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.operand_table import Row


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


class LayerSize(NamedTuple):
    """The stored weight of a layer, as far as the choice of matmuls depends on it."""

    shape: tuple[int, ...]
    dim: int  # axis of in_features
    device: torch.device  # the meta device: not known where the layer will train

    def features(self) -> tuple[int, int]:
        """Return out_features and in_features."""
        return self.shape[1 - self.dim], self.shape[self.dim]

    def no_matrix(self) -> str:
        """Return why the weight is not a matrix, which sparse and fp8 matmuls need, or ""."""
        return "" if len(self.shape) == 2 else "a convolution"

    def misfit(self, multiple: int) -> str:
        """Return the reason for which the features are not multiples of this number, or ""."""
        if why := self.no_matrix():
            return why
        sizes = zip(("out", "in"), self.features(), strict=True)
        odd = [f"{k}_features = {n}, no multiple of {multiple}" for k, n in sizes if n % multiple]
        return ", ".join(odd)


def unpacked_matmuls(precision: FP8Precision | None, size: LayerSize) -> tuple[Matmuls, str]:
    """Return the matmuls of a layer without packing.

    Also return the reason for which they simulate fp8 if tensor cores were asked for, or "".
    """
    if precision is None:
        return DENSE, ""
    why = ""
    if precision.name == "fp8":
        why = "" if size.device.type == "meta" else no_fp8_matmuls(size.device)
        why = why or size.misfit(FP8_MULTIPLE)
    return fp8_matmuls(precision.recipe, precision.name == "fp8_sim" or bool(why)), why


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
        missing = "" if device is None else unsupported(device, fp8=uses_fp8(base)) or ""
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
        if why := unsupported(device, fp8=uses_fp8(base)) or cannot_pack(base.fprop, dtype):
            raise ConfigError(
                f"sparse_matmuls={self.name}: {why}: sparse_matmuls=auto or emulate trains"
            )

    @torch.no_grad()
    def attempt(self, case: Case, device: torch.device, base: Matmuls) -> Trial:
        """Run one sparse matmul on random numbers; ``auto`` also times it against ``base``."""
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


class LayerMatmuls:
    """The matmuls of one layer, chosen for its size, device and first inputs.

    Args:
        method: reads the present row; see :class:`~sparsepretrain.sparsity.method.Method`.
        precision: None: matmuls follow autocast.
        policy: None: no operand is packed.
        size: of the stored weight.
        sharded: the weight is prepared for FSDP, whose operands are not packed.
    """

    def __init__(
        self,
        method: Method,
        precision: FP8Precision | None,
        policy: SparseMatmulPolicy | None,
        size: LayerSize,
        *,
        sharded: bool = False,
    ) -> None:
        self.method = method
        self.precision = precision
        self.policy = policy
        self.size = size
        self.base, self.simulated = unpacked_matmuls(precision, size)
        self.reasons: dict[str, str] = {}
        """N:M operand -> the reason for which it is not packed; "": it is."""
        self.packs = ""
        """Operands that are packed while their row is 2:4."""
        self.is_final = False
        """True once the matmuls were tried with inputs of the layer."""
        if policy is None:
            return
        self.reasons = policy.reasons(method.sparse_row, size, self.base)
        if sharded:
            self.reasons = {k: why or "its weight is sharded" for k, why in self.reasons.items()}
        if policy.name != "auto":
            self.packs = self._possible

    def on(self, device: torch.device, *, sharded: bool) -> LayerMatmuls:
        """Return the matmuls of the same layer on ``device``, not tried yet."""
        size = self.size._replace(device=device)
        return LayerMatmuls(self.method, self.precision, self.policy, size, sharded=sharded)

    @property
    def _possible(self) -> str:
        return "".join(name for name, why in self.reasons.items() if not why)

    def padding(self) -> dict[str, str]:
        """Return operand -> the zero padding of its sparse matmul, where that has any."""
        words = {name: padding(self.base, name, *self.size.features()) for name in self._possible}
        return {name: text for name, text in words.items() if text}

    def now(self, dtype: torch.dtype, training: bool) -> Matmuls:
        """Return the matmuls of the present phase."""
        if not training:
            return DENSE
        if not self.packs:
            return self.base
        row = self.method.phase.row
        packs = [name for name in self.packs if getattr(row, name).pattern == (2, 4)]
        packs = [
            name for name in packs if not cannot_pack(getattr(self.base, MATMUL_OF[name]), dtype)
        ]
        return packing(self.base, "".join(packs)) if packs else self.base

    def try_inputs(
        self, weight: Tensor, inputs: Sequence[int], dtype: torch.dtype, *, bias: bool
    ) -> bool:
        """Try the possible matmuls with inputs of one shape; return True if packing changed.

        Args:
            weight: of the layer, as stored.
            inputs: (…, tokens of a sample, in_features).
            dtype: of the layer's matmuls.
            bias: True if the layer has one.
        """
        if self.is_final or weight.is_meta:
            return False
        policy = self.policy
        before = self.packs
        device = weight.device
        if self.precision is not None:
            self.precision.require_here(device)
        if policy is not None:
            policy.require_here(device, dtype, self.precision)
        self.is_final = True
        if policy is None:
            return False
        shape = self.size.shape
        dim = self.size.dim
        tokens = torch.Size(inputs[:-1])
        for name in self._possible:
            case = Case(name, shape[1 - dim], shape[dim], tokens.numel(), dtype, dim, bias)
            why = objection(name, tokens, dtype, self.base)
            if not why and case not in policy.trials:
                policy.trials[case] = policy.attempt(case, device, self.base)
            self.reasons[name] = why or policy.trials[case].objection
        self.packs = self._possible
        return self.packs != before


def objection(operand: str, tokens: Sequence[int], dtype: torch.dtype, base: Matmuls) -> str:
    """Return the reason for which tokens (…, tokens of a sample) have no sparse matmul, or ""."""
    why = cannot_pack(getattr(base, MATMUL_OF[operand]), dtype)
    return why or (straddles(tuple(tokens)) if operand == "U" else "")


def uses_fp8(base: Matmuls) -> bool:
    """Return True if the matmuls run on fp8 tensor cores."""
    return base.fprop.rounds and not cannot_pack(base.fprop)


def random_matmul(
    case: Case, device: torch.device
) -> tuple[Tensor | Estimate, Tensor, MatmulCall, Tensor | None]:
    """Return left and right operands, their matmul and a bias, with zeros in the packed operand.

    More zeros would make the dense matmul faster than it is in training.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, holes: bool = False) -> Tensor:
        """Random numbers; with holes 2:4 along both axes, as on a chessboard."""
        values = torch.randn(size, generator=generator, device=device)
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
