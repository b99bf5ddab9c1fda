"""AST: retrain a dense model under a moving mask, with annealed decay inside AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.optim import Optimizer

from sparsepretrain.optim import ASTAdamW
from sparsepretrain.optim.adamw import adamw_arguments
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.asp import StoredMask
from sparsepretrain.sparsity.methods.srste import RampedDecay, RampedDecayOptions

DECAYS = "the decay is part of its update"
"""Reason for which AST and CAST need AdamW."""


@dataclass(slots=True, kw_only=True)
class ASTOptions(RampedDecayOptions):
    """Options of AST."""

    targets: str | list[str] = "all"
    """Layers, see :class:`MethodOptions`; retraining prunes all linear layers of the blocks."""
    decay: Annotated[float, "≥ 0"] = 1.0e-4
    """λ of the masked decay on the update (GPT-2; 6e-5 for Llama-2-7B)."""
    decay_ramp: Annotated[float, "[0, 1]"] = 0.25
    """λ rises linearly from 0 over this fraction of the run (10,000 of 40,000 steps)."""
    refresh: Annotated[int, "≥ 1"] = 10
    """Optimizer steps between two choices of the masks."""
    slorb: Annotated[int, "≥ 0"] = 0
    """Inputs per block of SLoRB, a dense branch beside every sparse layer (the paper: 16); 0: no
    branch. With it the model is not N:M."""


@register("method", "ast")
class AST(RampedDecay, StoredMask):
    """A = M∘W with magnitude masks every few steps; the decay is part of AdamW's update.

    Adaptive Sparse Trainer (Huang et al., AAAI 2025, arXiv:2407.20584). It starts from a dense
    checkpoint, with that as teacher (``teacher=self``). The masks of the paper's larger models use
    activations (Wanda); these follow magnitudes.

    With ``slorb=k`` every sparse layer has the paper's branch X·Pᵀ·Sᵀ. P (in_features/k,
    in_features) begins as sums over blocks of k inputs, and S (out_features, in_features/k) as the
    means over these blocks of the weights that the first mask prunes; both are trained.
    """

    Options = ASTOptions
    options: ASTOptions
    summary = "mask every 10 steps, decay on the update of AdamW that rises from 0"
    paper = "arXiv:2407.20584 (AAAI 2025)"
    finetuning = FineTuning("asp", zero="slorb")
    """With a branch, fine-tuning starts from the evaluated weights, into which it is folded."""
    optimizer_class = ASTAdamW
    reads_packed_masks = False

    def __init__(self, options: ASTOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        if options.slorb:
            self.layer_kinds = ("linear",)

    @property
    def refresh(self) -> int:
        return self.options.refresh

    @property
    def sparse_row(self) -> Row:
        return Row(self.nm("M∘W"))

    @property
    def multiples(self) -> tuple[int, int]:
        return 1, math.lcm(self.options.m, self.options.slorb or 1)

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        tensors = super().initial_state(weight, state)
        if not self.options.slorb:
            return tensors
        size = self.options.slorb
        inputs = weight.shape[state.dim]
        pruned = weight.masked_fill(self.mask(weight, state.dim), 0.0).movedim(state.dim, 1)
        means = pruned.reshape(pruned.shape[0], inputs // size, size).mean(-1)
        blocks = torch.eye(inputs // size, dtype=weight.dtype, device=weight.device)
        sums = blocks.repeat_interleave(size, 1)
        return tensors | {"means": Parameter(means), "sums": Parameter(sums)}

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Choose the mask at the first sparse step and every ``refresh`` steps after it."""
        if self.schedule.compares_after(self.schedule.step):
            self.keep(self.mask(weight, state.dim), state)

    @property
    def has_residual(self) -> bool:
        return self.options.slorb > 0 and self.phase.training

    def residual(self, x: Tensor, state: LayerState) -> Tensor | None:
        if not self.has_residual:
            return None
        # sums and means are fp32, also beside weights in bf16
        return linear(linear(x, state.sums.to(x.dtype)), state.means.to(x.dtype))

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer:
        """ASTAdamW with the AdamW options of the run."""
        return ASTAdamW(groups, **adamw_arguments(options, "ast", DECAYS))

    def guide_optimizer(self, optimizer: Any, masks: Mapping[Tensor, Tensor]) -> None:
        optimizer.masks = masks
        optimizer.decay = self.decay
