"""MaskPro: masks of frozen weights, drawn from learned logits and judged by the loss alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.asp import LayerMask
from sparsepretrain.sparsity.operand_table import FPROP


@dataclass(slots=True, kw_only=True)
class LearnedMaskOptions(MethodOptions):
    """Options of every method that learns masks of weights that stay."""

    targets: str | list[str] = "all"
    """Layers, see :class:`MethodOptions`; all linear layers of the blocks get masks."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        if self.window.start > 0 or self.window.stop < 1:
            yield "window", "must be the whole run: without masks there is nothing to learn"


class LearnedMask(LayerMask):
    """Masks of frozen weights; ``state.mask`` is the one that training begins from."""

    finetuning = FineTuning("asp")
    mask_rule = "other"
    trains = "method"
    trains_another_weight = True
    needs_whole = True  # draws by position

    @property
    def sparse_row(self) -> Row:
        return Row(self.nm("M∘W"))

    @property
    def reads_initial_weights(self) -> bool:
        return True

    @property
    def takes_masks(self) -> bool:
        return True


@dataclass(slots=True, kw_only=True)
class MaskProOptions(LearnedMaskOptions):
    """Options of MaskPro."""

    logit: Annotated[float, "≥ 0"] = 7.0
    """First logit of the entries of the mask that training begins from; the others have 0."""
    smoothing: Annotated[float, "[0, 1)"] = 0.99
    """α of δ, the moving average of loss differences that is subtracted from them."""


@register("method", "maskpro")
class MaskPro(LearnedMask):
    """N entries of each group are drawn without replacement from the softmax of M logits.

    MaskPro (arXiv:2506.12876). The logits π, one per weight, learn by policy gradient, from the
    loss f of the masked model:

        g = (f(m∘W) − f(m0∘W) − δ)·∇ log p(m | π),   δ ← α·δ + (1−α)·(f(m∘W) − f(m0∘W))

    m is drawn. m0, which ``state.mask`` keeps, is the mask that training began from: that of the
    largest magnitudes, or a given one (:meth:`Sparsifier.keep_masks`, ``init.mask``). p is the
    probability of the *ordered* draw (Plackett and Luce), whose logarithm has N terms; that of the
    set sums N! orders and has a smaller variance. One mask per step serves all micro-batches and
    processes. No backward runs, and no activations are kept (:meth:`Sparsifier.policy_step`).
    Evaluation, flips and export use the most probable mask.
    """

    Options = MaskProOptions
    options: MaskProOptions
    summary = "frozen weights; masks drawn from learned logits, judged by two forwards"
    paper = "arXiv:2506.12876"
    follows_policy = True

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        mask = self.choose(weight, state)
        return {
            "mask": kernels.pack_rows(mask),
            "logits": Parameter(mask * weight.new_tensor(self.options.logit)),
            "tracker": weight.new_zeros((), dtype=torch.float64),
        }

    def begin_from_mask_(self, state: LayerState) -> None:
        state.logits.copy_(kernels.unpacked(state.mask, state.shape) * self.options.logit)

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        scores = grouped(state.logits.detach(), self.options.m, state.dim)
        mask = self._mask_of(scores, state.dim)
        return Projection(kernels.apply_mask(weight, mask), mask)

    def project_in_training(self, weight: Tensor, state: LayerState) -> Projection:
        if self.uses_first_mask:
            mask = kernels.unpacked(state.mask, state.shape)
        else:
            mask = self._mask_of(self._perturbed(state.logits.detach(), state), state.dim)
        return Projection(kernels.apply_mask(weight, mask), mask)

    def policy_gradient(self, logits: Tensor, state: LayerState, difference: Tensor) -> Tensor:
        remaining = grouped(logits, self.options.m, state.dim).clone()
        order = _largest(self._perturbed(logits, state), self.options.n)
        gradient = torch.zeros_like(remaining)
        for chosen in order.split(1, -1):  # softmax over what is left, in the order of the draws
            gradient -= remaining.softmax(-1)
            gradient.scatter_add_(-1, chosen, torch.ones_like(remaining[..., :1]))
            remaining.scatter_(-1, chosen, -torch.inf)
        gradient *= difference - state.tracker
        state.tracker.lerp_(difference, 1 - self.options.smoothing)
        return ungrouped(gradient, state.dim)

    def _perturbed(self, logits: Tensor, state: LayerState) -> Tensor:
        """Return logits plus Gumbel noise: their N largest, in order, are N draws."""
        noise = kernels.gumbel_like(logits, state.key(FPROP), state.dim)
        return grouped(logits.double() + noise, self.options.m, state.dim)

    def _mask_of(self, scores: Tensor, dim: int) -> Tensor:
        """Return the mask of the N largest scores of each group."""
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(-1, _largest(scores, self.options.n), True)
        return ungrouped(kept, dim)


def grouped(x: Tensor, m: int, dim: int) -> Tensor:
    """Return (…, groups, M), the groups along an axis; the other axes keep their order."""
    last = x.movedim(dim, -1)
    return last.reshape(*last.shape[:-1], -1, m)


def ungrouped(groups: Tensor, dim: int) -> Tensor:
    """Return groups (…, groups, M) as the tensor whose axis they divide."""
    return groups.flatten(-2).movedim(-1, dim).contiguous()


def _largest(scores: Tensor, n: int) -> Tensor:
    """Return the positions of the N largest of each group, in falling order; ties in theirs."""
    return scores.argsort(stable=True, dim=-1, descending=True)[..., :n]
