"""Base classes of pruning methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.pruning.inputs import InputSums, Kept


@dataclass(slots=True, kw_only=True)
class PruningOptions:
    """Options of a method without any; those of other methods extend it."""


class Pruned(NamedTuple):
    """Result for one layer."""

    weight: Tensor
    """(out_features, in_features), +0.0 outside the mask."""
    mask: Tensor
    """bool, the same shape; exactly N of every M consecutive inputs are kept."""


class PruningMethod(ABC):
    """Rule that prunes the weight of one layer to N:M.

    Args:
        options: of the class's ``Options``.
        n: elements kept of every m.
        m: group size along in_features.
    """

    Options: ClassVar[type] = PruningOptions
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    reads: ClassVar[Kept] = "squares"
    """Sums over calibration inputs that :meth:`prune` needs."""

    def __init__(self, options: Any, n: int, m: int) -> None:
        self.options = options
        self.n = n
        self.m = m

    @abstractmethod
    def prune(self, weight: Tensor, inputs: InputSums | None) -> Pruned:
        """Prune one layer.

        Args:
            weight: (out_features, in_features), fp32 or fp64, finite.
            inputs: sums over its calibration inputs; None if :attr:`reads` is ``nothing``.
        """


class ScoreMethod(PruningMethod):
    """Method that keeps the N largest scores of every M consecutive inputs of an output."""

    @property
    def permutes(self) -> bool:
        """True if input channels are reordered first where the order folds into other layers."""
        return False

    @abstractmethod
    def score(self, weight: Tensor, inputs: InputSums | None) -> Tensor:
        """Return the score of every weight, ≥ 0, of the shape of ``weight``."""

    def prune(self, weight: Tensor, inputs: InputSums | None) -> Pruned:
        """Keep the largest scores; kept weights do not change."""
        mask = kernels.nm_mask(self.score(weight, inputs), self.n, self.m)
        return Pruned(kernels.apply_mask(weight, mask), mask)
