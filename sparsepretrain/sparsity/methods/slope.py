"""SLoPe: a fixed mask, a second one for the backward weight, low-rank adapters at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Phase, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.asp import StoredMask
from sparsepretrain.sparsity.operand_table import FPROP, WGRAD


@dataclass(slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters: Y = X·(M∘W)ᵀ + (X·Rᵀ)·Lᵀ in the last part of the run."""

    rank: Annotated[int, "≥ 0"] = 0
    """Columns of L and rows of R; 0: no adapters."""
    start: Annotated[float, "[0, 1)"] = 0.99
    """First step with adapters, as a fraction of the run (the paper: the last 1 %)."""


@dataclass(slots=True, kw_only=True)
class SLoPeOptions(MethodOptions):
    """Options of SLoPe."""

    mask: Literal["magnitude", "random"] = "magnitude"
    """Rule for the fixed mask, which is chosen at the first sparse step."""
    adapters: Adapters = field(default_factory=Adapters)


@register("method", "slope")
class SLoPe(StoredMask):
    """A = M∘W with a mask that never changes; B is A, pruned once more along out_features.

    Mozaffari et al., ICLR 2025, arXiv:2405.16325: A and B are both N:M along the axis that their
    matmul reduces over. As in the authors' reference code the second mask follows the current
    weights and dW is masked; weights outside the mask keep their values, unused, instead of being
    zeroed. With ``adapters.rank`` every sparse layer has the paper's lazy low-rank adapters L·R.
    They are created at the start (L = 0 and R uniform in ±1/√in_features: our choice), and are
    used and trained from ``adapters.start`` on.
    """

    Options = SLoPeOptions
    options: SLoPeOptions
    summary = "fixed mask; dgrad uses the weight pruned a second time; late adapters"
    paper = "arXiv:2405.16325 (ICLR 2025)"
    finetuning = FineTuning(same=("adapters.rank",), zero="adapters.rank")
    """With adapters, fine-tuning starts from the evaluated weights, into which they are folded."""

    def __init__(self, options: SLoPeOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        if options.adapters.rank:
            self.layer_kinds = ("linear",)
        start = options.adapters.start if options.adapters.rank else 0.0
        self._first = self.schedule.begin_of(start, "adapters.start")

    @property
    def reads_initial_weights(self) -> bool:
        return self.options.mask == "magnitude"

    @property
    def fixed_from(self) -> int:
        return self.schedule.start

    @property
    def update_needs_whole(self) -> bool:
        return self.schedule.step == self.schedule.start  # random masks and ties, by position

    @property
    def sparse_row(self) -> Row:
        return Row(self.nm("M∘W"), self.nm("M2∘M∘W", "out"), J=Operand("M∘dW"))

    @property
    def multiples(self) -> tuple[int, int]:
        return self.options.m, self.options.m

    def phase_of(self, step: int) -> Phase:
        """Return stage 1 where adapters take part."""
        phase = super().phase_of(step)
        rank = self.options.adapters.rank
        return phase._replace(stage=int(rank > 0 and phase.training and step >= self._first))

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        tensors = super().initial_state(weight, state)
        if not self.options.adapters.rank:
            return tensors
        rank = self.options.adapters.rank
        inputs = weight.shape[state.dim]
        right = weight.new_zeros(rank, inputs)
        if not weight.is_meta:
            right = kernels.uniform_like(right, state.key(WGRAD), 1).to(right).mul_(2).sub_(1)
        left = weight.new_zeros(weight.shape[1 - state.dim], rank)
        return tensors | {"left": Parameter(left), "right": Parameter(right / inputs**0.5)}

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Choose the mask at the first sparse step, and never again."""
        if self.schedule.step != self.schedule.start:
            return
        if self.options.mask == "magnitude":
            mask = self.choose(weight, state)
        else:
            draws = kernels.uniform_like(weight, state.key(FPROP), state.dim)
            mask = self.mask(draws, state.dim)
        self.keep(mask, state)

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        forward = kernels.apply_mask(weight, state.mask)
        second = kernels.nm_mask(forward, *self.pattern, dim=1 - state.dim)
        return Projection(forward, state.mask, kernels.apply_mask(forward, second))

    def low_rank(self, state: LayerState) -> tuple[Tensor, Tensor] | None:
        """Return L (out_features, rank) and R (rank, in_features); None: no adapters yet."""
        return (state.left, state.right) if self.phase.stage else None

    @property
    def has_residual(self) -> bool:
        return self.phase.stage > 0

    def residual(self, x: Tensor, state: LayerState) -> Tensor | None:
        if (factors := self.low_rank(state)) is None:
            return None
        # the factors are fp32, also beside weights in bf16
        left, right = (factor.to(x.dtype) for factor in factors)
        return linear(linear(x, right), left)
