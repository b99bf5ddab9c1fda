"""CAST: train dense with learned scales while AdamS drives masked weights to zero; prune last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError
from sparsepretrain.optim import AdamS
from sparsepretrain.optim.adamw import adamw_arguments
from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Phase, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.asp import LayerMask
from sparsepretrain.sparsity.methods.ast import DECAYS


@dataclass(slots=True, kw_only=True)
class CASTOptions(MethodOptions):
    """Options of CAST."""

    targets: str | list[str] = "all"
    """Layers, see :class:`MethodOptions`; retraining prunes all linear layers of the blocks."""
    decay: Annotated[float, "> 0"] = 4.0e-7
    """λ of the decay of masked weights (Llama-2-7B)."""
    refresh: Annotated[int, "≥ 1"] = 10
    """Optimizer steps between two choices of the masks."""
    scales: Annotated[int, "≥ 1"] = 2
    """Learned scales per output channel, each of one of as many blocks of inputs."""


@register("method", "cast")
class CAST(LayerMask):
    """A = a∘W, dense until the last step, then A = M∘a∘W.

    Continuous and differentiable sparsity-aware training (arXiv:2509.25996), for which no code was
    published. The input channels of a layer are ``scales`` contiguous blocks; a (out_features,
    blocks) begins as ones and is trained. The mask of the N largest |W| is renewed every
    ``refresh`` steps and is seen by the optimizer alone (:class:`~sparsepretrain.optim.AdamS`),
    whose α is the completed share of the run. The last mask prunes, and ``densify`` folds a into
    the weight. Betas, schedule, clipping and weight decay were not found in the paper: they are
    those of the run.
    """

    Options = CASTOptions
    options: CASTOptions
    summary = "dense with learned scales; AdamS moves masked weights to zero, pruned at the end"
    paper = "arXiv:2509.25996"
    finetuning = FineTuning("asp", zero="decay")
    """A new run starts from the weights that the finished one evaluates with, since it is dense."""
    layer_kinds = ("linear", "bank")
    differentiable = True
    optimizer_class = AdamS
    prunes_at_end = True
    dense_training = "weights are dense until the last step"
    follows_length = True

    def __init__(self, options: CASTOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        if total_steps is None:
            text = " follows the length of the run: sparsify needs total_steps"
            raise ConfigError([("cast: α of AdamS", text)])
        self._end = total_steps

    @property
    def refresh(self) -> int:
        return self.options.refresh

    @property
    def fixed_from(self) -> int:
        return self._end

    @property
    def sparse_row(self) -> Row:
        return Row(self.nm("M∘a∘W"))

    @property
    def multiples(self) -> tuple[int, int]:
        return 1, math.lcm(self.options.m, self.options.scales)

    def pull(self, step: int) -> float:
        """Return α: (t-t0)/(T-t0) after t of T steps, in a window from step t0."""
        done = step - self.schedule.start
        return min(1.0, max(0.0, done / (self._end - self.schedule.start)))

    @property
    def decay(self) -> float:
        """α·λ of the next step."""
        return self.pull(self.schedule.step) * self.options.decay

    def phase_of(self, step: int) -> Phase:
        """Return stage 1, in which no weight is pruned, until the last step is complete."""
        phase = super().phase_of(step)
        if phase.training and step < self._end:
            return phase._replace(row=Row(A=Operand("a∘W")), stage=1)
        return phase

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        # one axis, since decay of weights is for tensors of two or more
        ones = weight.new_ones(weight.shape[1 - state.dim] * self.options.scales)
        return super().initial_state(weight, state) | {"scale": Parameter(ones)}

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Choose the mask every ``refresh`` steps; the mask of the last step prunes."""
        step = self.schedule.step
        if step < self._end and self.schedule.compares_after(step):
            self.keep(self.mask(weight, state.dim), state)

    def kept_mask(self, state: LayerState) -> Tensor | None:
        return state.mask if self.phase.training else None

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        blocks = state.scale.view(-1, self.options.scales)
        scales = blocks.repeat_interleave(weight.shape[state.dim] // self.options.scales, 1)
        scaled = weight * (scales if state.dim == 1 else scales.t())
        if not self.phase.stage:
            mask = kernels.unpacked(state.mask, weight.shape)
            scaled = torch.where(mask, scaled, 0.0)
        return Projection(scaled, state.mask)

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer:
        """AdamS with the AdamW options of the run."""
        return AdamS(groups, **adamw_arguments(options, "cast", DECAYS))

    def guide_optimizer(self, optimizer: Any, masks: Mapping[Tensor, Tensor]) -> None:
        optimizer.masks = masks
        optimizer.decay = self.options.decay
        optimizer.share = self.pull(self.schedule.step)
