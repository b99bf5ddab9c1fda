"""RIA: relative importance and activations, with channel permutation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from sparsepretrain.pruning import InputSums, PruningOptions, ScoreMethod
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class RIAOptions(PruningOptions):
    """Options of RIA."""

    power: Annotated[float, "≥ 0"] = 0.5
    """Exponent a of ‖X_j‖₂; 0 ignores the inputs."""
    permute: bool = True
    """Reorder input channels where the order can be folded into the layer before."""


@register("pruning", "ria")
class RIA(ScoreMethod):
    """Score (|W_ij| / Σ_i |W_ij| + |W_ij| / Σ_j |W_ij|)·‖X_j‖₂^a.

    Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language
    Models", ICLR 2024. The sums run over the outputs and over the inputs. A channel or an output
    whose weights are all zero has the score 0.
    """

    Options = RIAOptions
    options: RIAOptions
    summary = "relative importance · ‖X‖^a, channels permuted where that is free"
    paper = "ICLR 2024 (Zhang et al.)"

    @property
    def permutes(self) -> bool:
        return self.options.permute

    def score(self, weight: Tensor, inputs: InputSums | None) -> Tensor:
        assert inputs is not None
        size = weight.abs().double()
        by_input = size / size.sum(0, keepdim=True).clamp(min=1e-300)
        by_output = size / size.sum(1, keepdim=True).clamp(min=1e-300)
        return (by_input + by_output) * inputs.norms**self.options.power
