"""Magnitude pruning."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sparsepretrain.pruning import InputSums, ScoreMethod
from sparsepretrain.pruning.inputs import Kept
from sparsepretrain.registry import register


@register("pruning", "magnitude")
class Magnitude(ScoreMethod):
    """Score |W|, without calibration data."""

    summary = "|W|; no calibration data"
    paper = "arXiv:2104.08378"
    reads: ClassVar[Kept] = "nothing"

    def score(self, weight: Tensor, inputs: InputSums | None) -> Tensor:
        return weight.abs()
