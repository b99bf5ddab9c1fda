"""Dense training; the baseline that logs the flips its masks would make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity.policy import Method, MethodOptions, Products

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class DenseOptions(MethodOptions):
    """Options of dense training: which masks are compared for the record."""

    flip_rule: Literal["magnitude", "transposable"] = "magnitude"
    """The masks whose flips are logged: those of the method that the run is compared with."""
    refresh: int = 1
    """Optimiser steps between two comparisons of masks."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from MethodOptions.problems(self)
        if self.refresh < 1:
            yield "refresh", f"must be ≥ 1, got {self.refresh}"
        if self.flip_rule == "transposable" and (self.n, self.m) != (2, 4):
            yield "n", f"and m must be 2 and 4 for transposable masks, got {self.n}:{self.m}"


@register("method", "dense")
class Dense(Method):
    """Every product is dense; the mask is computed for the record only."""

    Options = DenseOptions
    summary = "ordinary layers; logs the mask that magnitude would choose"
    paper = "–"
    products = Products()

    @property
    def multiples(self) -> tuple[int, int]:
        """Transposable masks are chosen in blocks of 4×4."""
        return (4, 4) if self.options.flip_rule == "transposable" else (1, self.options.m)

    @property
    def compares(self) -> bool:
        """At the steps at which a method with this window and ``refresh`` compares."""
        return (self.step - self.window[0]) % self.options.refresh == 0

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """What ``flip_rule`` would choose."""
        if self.options.flip_rule == "transposable":
            return kernels.transposable_mask(weight)
        return Method.mask(self, weight, dim)
