"""Wanda: weights times activations."""

from __future__ import annotations

from torch import Tensor

from sparsepretrain.pruning import InputSums, ScoreMethod
from sparsepretrain.registry import register


@register("pruning", "wanda")
class Wanda(ScoreMethod):
    """Score |W_ij|·‖X_j‖₂ (Sun et al., ICLR 2024, arXiv:2306.11695, equation 1)."""

    summary = "|W|·‖X‖, kept weights unchanged"
    paper = "arXiv:2306.11695 (ICLR 2024)"

    def score(self, weight: Tensor, inputs: InputSums | None) -> Tensor:
        assert inputs is not None
        return weight.abs().double() * inputs.norms
