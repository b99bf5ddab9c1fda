"""Dense training; the baseline that logs the flips its masks would make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Phase
from sparsepretrain.sparsity.methods.tsrste import transposable


@dataclass(slots=True, kw_only=True)
class DenseOptions(MethodOptions):
    """Options of a dense run: rule and interval of the flips that it logs."""

    flip_rule: Literal["magnitude", "transposable"] = "magnitude"
    """Masks compared: N:M by magnitude, or the transposable ones of T-SR-STE."""
    refresh: Annotated[int, "≥ 1"] = 1
    """Optimizer steps between two comparisons; T-SR-STE's is 40."""


@register("method", "dense")
class DenseMethod(Method):
    """Every matmul is dense; masks are computed for the record only.

    The search for a decay factor (arXiv:2404.01847) divides the flip rate of a sparse run by that
    of a dense one, which needs the same rule and interval on both sides.
    """

    Options = DenseOptions
    options: DenseOptions
    summary = "ordinary layers; logs the flips of the masks it would have"
    paper = "–"

    @property
    def refresh(self) -> int:
        return self.options.refresh

    @property
    def multiples(self) -> tuple[int, int]:
        """Transposable masks are chosen in blocks of M×M."""
        m = self.options.m
        return m if self.options.flip_rule == "transposable" else 1, m

    def phase_of(self, step: int) -> Phase:
        return Phase(False, False)

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        if self.options.flip_rule == "transposable":
            return transposable(weight, *self.pattern, dim)
        return Method.mask(self, weight, dim)
