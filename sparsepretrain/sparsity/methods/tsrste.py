"""T-SR-STE: transposable masks, masked decay on gradients, MVUE, dense fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.asp import StoredMask
from sparsepretrain.sparsity.methods.srste import MaskedDecay, RampedDecayOptions


def transposable(weight: Tensor, n: int, m: int, dim: int) -> Tensor:
    """Return the transposable mask (arXiv:2404.01847 section 5.1), per kernel position.

    It serves both of the first two axes, along which the features are; ``dim``: in_features.
    """
    # TSENOR begins with rows, so a weight and its transpose are given in one order. The search for
    # 2:4 treats both axes alike, and takes the weight as it lies in memory.
    axes = (0, 1) if dim == 1 or (n, m) == (2, 4) else (1, 0)
    matrices = weight.movedim(axes, (-2, -1))
    mask = kernels.transposable_mask(matrices.flatten(0, -2), n, m)
    return mask.view(matrices.shape).movedim((-2, -1), axes)


@dataclass(slots=True, kw_only=True)
class TSRSTEOptions(RampedDecayOptions):
    """Options of T-SR-STE."""

    decay: Annotated[float, "≥ 0"] = 6.0e-5
    """λ of the masked decay on gradients (GPT-2 124M; between 6e-6 and 1e-3 elsewhere)."""
    refresh: Annotated[int, "≥ 1"] = 40
    """Optimizer steps between two mask searches (GPT-2, BERT)."""
    mvue: Literal["gradient", "none"] = "gradient"
    """Unbiased N:M sampling of the output gradient for wgrad, or none."""
    estimator: Literal["approximate", "exact"] = "approximate"
    """The published sampler of 2:4, or that of least variance; other patterns have the latter."""
    dense_tail: Annotated[float, "[0, 1)"] = 0.16666667
    """Last part of the run that trains dense, as a fraction (250,000 of 300,000 steps sparse)."""

    def problems(self) -> Problems:
        yield from RampedDecayOptions.problems(self)
        if 0 <= self.dense_tail < 1 and self.window.start >= 1 - self.dense_tail:
            yield "dense_tail", f"leaves no sparse step after window.start ({self.window.start})"


@register("method", "tsrste")
class TSRSTE(MaskedDecay, StoredMask):
    """One mask for W and Wᵀ, refreshed every few steps, so that all three matmuls are sparse."""

    Options = TSRSTEOptions
    options: TSRSTEOptions
    mask_rule = "transposable"
    summary = "transposable mask every 40 steps, masked decay, MVUE, dense tail"
    paper = "arXiv:2404.01847 (ICML 2024)"
    finetuning = FineTuning("dense", {"mvue": "none"}, same=("dense_tail",))
    """S-STE, Table 6, and the authors' code fine-tune without MVUE."""

    def __init__(self, options: TSRSTEOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self.schedule.stop_at(1 - options.dense_tail, "dense_tail")

    @property
    def refresh(self) -> int:
        return self.options.refresh

    @property
    def estimator(self) -> str:
        return self.options.estimator

    @property
    def sparse_row(self) -> Row:
        """One operand for fprop and dgrad: the mask is N:M along both axes."""
        row = Row(self.nm("Mt∘W"), self.nm("A", "out"), J=self.decayed("Mt"))
        if self.options.mvue == "none":
            return row
        return row._replace(U=self.nm("MVUE(G)", "tokens"))

    @property
    def multiples(self) -> tuple[int, int]:
        """Masks are chosen in blocks of M×M."""
        return self.options.m, self.options.m

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        return transposable(weight, *self.pattern, dim)

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Search again at the first sparse step and every ``refresh`` steps after it."""
        if self.schedule.compares_after(self.schedule.step):
            self.keep(self.mask(weight, state.dim), state)
