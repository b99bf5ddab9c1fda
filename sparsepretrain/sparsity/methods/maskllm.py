"""MaskLLM: masks of frozen weights, a Gumbel softmax over all N:M masks of each group."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Operand, Phase, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.methods.maskpro import (
    LearnedMask,
    LearnedMaskOptions,
    grouped,
    ungrouped,
)
from sparsepretrain.sparsity.operand_table import DGRAD, FPROP

CANDIDATES = 70
"""Masks of a group, at most: those of 4:8, with 8.75 gates per weight."""


@dataclass(slots=True, kw_only=True)
class MaskLLMOptions(LearnedMaskOptions):
    """Options of MaskLLM; a schedule is linear in completed steps over all steps of the run."""

    temperature: Annotated[float, "> 0"] = 4.0
    """τ of the softmax at the first step."""
    temperature_end: Annotated[float, "> 0"] = 0.05
    """τ at the end of the run."""
    scale: Annotated[float, "> 0"] = 100.0
    """κ, the factor of the gates, at the first step."""
    scale_end: Annotated[float, "> 0"] = 500.0
    """κ at the end of the run."""
    prior: Annotated[float, "≥ 0"] = 3.0
    """Pull of the gates to the mask that training begins from; 0: gates begin as noise."""
    gate_std: Annotated[float, "> 0"] = 0.01
    """Standard deviation of the first gates."""
    penalty: Annotated[float, "≥ 0"] = 1.0e-5
    """λ at the first step, of the reward for large kept weights; it falls to 0."""

    def problems(self) -> Problems:
        yield from LearnedMaskOptions.problems(self)
        if 1 <= self.n <= self.m and (count := math.comb(self.m, self.n)) > CANDIDATES:
            text = f"gives {count:,} masks per group with n={self.n}, each with a gate; expected at"
            yield "m", f"{text} most {CANDIDATES}: use maskpro, which has M logits per group"


@register("method", "maskllm")
class MaskLLM(LearnedMask):
    """Each of the C(M, N) masks of a group has a gate g; training multiplies by a mean of masks.

    MaskLLM (arXiv:2409.17481). With Gumbel noise ε, drawn once per step:

        y = softmax((κ·g + ε)/τ),   A = (Σ y·masks)∘W
        loss - λ·(1 - t/T)·Σ A²   is minimized over g

    after t of T steps. τ falls and κ grows, so the means become masks. Evaluation, flips and export
    use the mask of the largest gate. The gates begin as noise plus a prior: ``prior`` standard
    deviations times the number of entries that a mask shares with ``state.mask``, which keeps the
    largest magnitudes or is given (:meth:`Sparsifier.keep_masks`, ``init.mask``).
    """

    Options = MaskLLMOptions
    options: MaskLLMOptions
    summary = "frozen weights; learned gates of all masks of a group, mixed by a Gumbel softmax"
    paper = "arXiv:2409.17481 (NeurIPS 2024)"
    differentiable = True
    dense_training = "training multiplies by means of masks"
    follows_length = True

    def __init__(self, options: MaskLLMOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        if total_steps is None:
            text = " and κ follow the length of the run: sparsify needs total_steps"
            raise ConfigError([("maskllm: τ", text)])
        self._total = total_steps
        kept = list(itertools.combinations(range(options.m), options.n))
        # on the CPU also where models are made on the meta device
        self._masks = torch.zeros(len(kept), options.m, dtype=torch.float64, device="cpu")
        self._masks.scatter_(1, torch.tensor(kept, device="cpu"), 1.0)
        self._copies = {self._masks.device: self._masks}

    def phase_of(self, step: int) -> Phase:
        return super().phase_of(step)._replace(row=Row(A=Operand("soft M∘W")))

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        mask = self.choose(weight, state)
        gates = self._first_gates(mask, state).to(weight.dtype)
        return {"mask": kernels.pack_rows(mask), "gates": Parameter(gates)}

    def begin_from_mask_(self, state: LayerState) -> None:
        mask = kernels.unpacked(state.mask, state.shape)
        state.gates.copy_(self._first_gates(mask, state))

    def _first_gates(self, mask: Tensor, state: LayerState) -> Tensor:
        """Return gates (…, groups, masks) in fp64: noise, and the prior of a mask."""
        masks = self._masks_on(mask.device)
        shared = grouped(mask, self.options.m, state.dim).double() @ masks.t()
        # the stream of another matmul: that of training would repeat these draws at the first step
        noise = kernels.normal_like(shared, state.key(DGRAD), -1) * self.options.gate_std
        n, m = self.pattern
        # N²/M is the mean of the overlaps; a constant changes no softmax, but weight decay sees it
        return noise + (shared - n * n / m) * self.options.prior * noise.std(correction=0)

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        masks = self._masks_on(weight.device).bool()
        mask = ungrouped(masks[state.gates.detach().argmax(-1)], state.dim)
        return Projection(kernels.apply_mask(weight, mask), mask)

    def project_in_training(self, weight: Tensor, state: LayerState) -> Projection:
        return Projection(self._soft_mask(state.gates, state) * weight, None)

    @property
    def has_penalty(self) -> bool:
        return self.options.penalty > 0

    def penalty_gradients(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        gates = state.gates.detach().requires_grad_()
        with torch.enable_grad():
            kept = (self._soft_mask(gates, state) * weight).square().sum()
        (gradient,) = torch.autograd.grad(kept, gates)
        return {"gates": gradient * (-self.options.penalty * (1 - self._done(state)))}

    def _soft_mask(self, gates: Tensor, state: LayerState) -> Tensor:
        """Return Σ y·masks in the shape of the weight, by autograd."""
        o = self.options
        done = self._done(state)
        temperature = o.temperature + (o.temperature_end - o.temperature) * done
        scale = o.scale + (o.scale_end - o.scale) * done
        noise = kernels.gumbel_like(gates, state.key(FPROP), -1).to(gates.dtype)
        shares = ((gates * scale + noise) / temperature).softmax(-1)
        masks = self._masks_on(gates.device).to(gates.dtype)
        return ungrouped(shares @ masks, state.dim)

    def _done(self, state: LayerState) -> float | Tensor:
        """Return the completed share of the run; a 0-d tensor in compiled graphs."""
        step = state.step
        if isinstance(step, Tensor):
            return (step.double() / self._total).clamp(max=1.0)
        return min(step / self._total, 1.0)

    def _masks_on(self, device: torch.device) -> Tensor:
        """Return the masks of a group, (masks, M) fp64, on a device."""
        if device not in self._copies:
            with torch.inference_mode(False):  # training reads them later
                self._copies[device] = self._masks.to(device)
        return self._copies[device]
