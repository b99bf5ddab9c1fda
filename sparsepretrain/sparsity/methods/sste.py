"""S-STE: a continuous pruning function with a scale frozen at initialization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.operand_table import DGRAD


@dataclass(slots=True, kw_only=True)
class SSTEOptions(MethodOptions):
    """Options of S-STE."""

    gamma: Annotated[float, "[0, 1]"] = 0.0
    """Threshold between |t2| (0, the authors' code) and |t3| (1); S-STE Table 1."""
    beta: Literal["mse", "l1", "none"] = "mse"
    """Scale: least squares ⟨W,S⟩/⟨S,S⟩, same L1 norm, or 1; S-STE Table 2."""
    beta_at: Annotated[int, "≥ 0"] = 0
    """Optimizer step after which β is computed again, once; 0: never. For initial weights that say
    nothing about it, such as zeros."""
    beta_update: Literal["init", "step"] = "init"
    """Frozen after weight initialization, or recomputed every step; S-STE Figure 4."""
    mvue: Literal["gradient", "none", "weight"] = "gradient"
    """Unbiased N:M sampling: of the output gradient for wgrad, of the weight for dgrad (2:4 only),
    or none."""
    estimator: Literal["approximate", "exact"] = "approximate"
    """The published sampler of 2:4, or that of least variance; other patterns have the latter."""
    ste_scale: Literal["identity", "beta"] = "identity"
    """Factor of dW: 1 (authors' code) or β, the derivative of β·S."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        if self.mvue == "weight" and (self.n, self.m) != (2, 4):
            yield "mvue", f"weight exists for 2:4 only, got {self.n}:{self.m}"
        if self.beta_at and (self.beta == "none" or self.beta_update == "step"):
            key = "beta=none" if self.beta == "none" else "beta_update=step"
            yield "beta_at", f"must be 0 with {key}, got {self.beta_at}"


@register("method", "sste")
class SSTE(Method):
    """Y = X·(β·S(W))ᵀ; the gradient passes straight through, no decay, no mask state."""

    Options = SSTEOptions
    options: SSTEOptions
    summary = "soft threshold, frozen scale β, MVUE on the weight gradient"
    paper = "arXiv:2409.09099 (NeurIPS 2024)"
    finetuning = FineTuning(options={"mvue": "none", "beta_at": 0}, same=("gamma", "beta"))
    """S-STE, Table 6, and the authors' code fine-tune without MVUE."""

    def __init__(self, options: SSTEOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self.needs_whole = options.mvue == "weight" or options.beta_update == "step"
        first = max(1, self.schedule.start)
        end = min(self.schedule.stop, total_steps or math.inf)
        if options.beta_at and not first <= options.beta_at < end:
            span = f"steps {first} to {end - 1}" if end < math.inf else f"step {first} or later"
            reason = f": β can be computed again after {span}, got {options.beta_at}"
            raise ConfigError([("beta_at", reason)])

    @property
    def estimator(self) -> str:
        return self.options.estimator

    def scale(self, state: LayerState) -> Tensor:
        return state.beta

    @property
    def sparse_row(self) -> Row:
        row = Row(A=self.nm("β·S(W)"))
        if self.options.mvue == "gradient":
            return row._replace(U=self.nm("MVUE(G)", "tokens"))
        if self.options.mvue == "weight":
            return row._replace(B=self.nm("MVUE(β·S(W))", "out"))
        return row

    @property
    def multiples(self) -> tuple[int, int]:
        """Sampling the weight for dgrad needs groups of four along out_features as well."""
        return 4 if self.options.mvue == "weight" else 1, self.options.m

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        """β of the initial weight (S-STE section 4.2), also if the window begins later."""
        soft = self._soft(weight, state.dim)
        is_lasting = self.options.beta != "none" and self.options.beta_update == "init"
        if is_lasting and not weight.is_meta and not soft.any():
            again = self.options.beta_at
            until = f"until step {again} (beta_at)" if again else "for good (see beta_at)"
            text = f"S(W) is 0, as for zeros, so its scale β is 1 {until} in"
            self.remark(text, state.layer_name)
        return {"beta": self._fit_beta(weight, soft, state.slice_rows)}

    @property
    def update_needs_whole(self) -> bool:
        return self.needs_whole or 0 < self.options.beta_at == self.schedule.step

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Recompute β if asked to; in every step it grows layer by layer (S-STE Figure 4)."""
        if self.options.beta_update == "step" or 0 < self.options.beta_at == self.schedule.step:
            soft = self._soft(weight, state.dim)
            state.beta.copy_(self._fit_beta(weight, soft, state.slice_rows))

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """Return the non-zeros of S(W), at most n of m: those of :meth:`project`, in any phase."""
        return self._soft(weight, dim) != 0

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        """Return A = β·S(W), and B = A or its unbiased 2:4 estimate along out_features."""
        samples_weight = self.options.mvue == "weight"
        in_slices = state.slice_rows is not None
        forward, mask = kernels.soft_prune(
            weight,
            *self.pattern,
            gamma=self.options.gamma,
            dim=state.dim,
            scale=None if in_slices else state.beta,
            # sampling, and the scales of slices, read A before it is rounded to the dtype of `out`
            out=None if samples_weight or in_slices else state.out,
        )
        if in_slices:
            forward.view(len(state.beta), -1).mul_(state.beta[:, None])
        backward = None
        if samples_weight:
            estimator = self.options.estimator
            key = state.key(DGRAD)
            backward = kernels.mvue(forward, dim=1 - state.dim, estimator=estimator, key=key)
            backward.add_(0.0)  # -0.0 has a non-zero bit and would count as kept when packed
        wgrad_scale = state.beta if self.options.ste_scale == "beta" else None
        return Projection(forward, mask, backward, wgrad_scale)

    def _soft(self, weight: Tensor, dim: int) -> Tensor:
        return kernels.soft_threshold(weight, *self.pattern, gamma=self.options.gamma, dim=dim)

    def _fit_beta(self, weight: Tensor, soft: Tensor, slice_rows: int | None) -> Tensor:
        """Return β, 0-d, or (slices,) for the slices of a bank."""
        if slice_rows is not None:
            pairs = zip(weight.split(slice_rows), soft.split(slice_rows), strict=True)
            return torch.stack([self._fit_beta(*pair, None) for pair in pairs])
        if self.options.beta == "mse":
            return kernels.optimal_scale(weight, soft)
        if self.options.beta == "l1":
            return kernels.l1_scale(weight, soft)
        return weight.new_ones(()).float()
