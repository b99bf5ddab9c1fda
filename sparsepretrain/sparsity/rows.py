"""Rows of a stored weight that this rank has: all of them, or a shard of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Rows(Protocol):
    """Access to the master weight of a layer and to tensors with the same rows.

    ``weight`` is the Parameter of the layer. Methods that gather are collective.
    """

    is_sharded: bool

    def local(self, weight: Tensor) -> Tensor:
        """Return the own rows of the master weight."""

    def parameter(self, weight: Tensor) -> Tensor:
        """Return the Parameter that the optimizer holds."""

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Return the gradient of the own rows."""

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather the rows of a tensor."""

    def mine(self, whole: Tensor) -> Tensor:
        """Copy the own rows of a whole tensor."""

    def padded(self, rows: Tensor) -> Tensor:
        """Pad the own rows with zeros to as many as every rank has."""

    def total(self, counts: Tensor) -> Tensor:
        """Sum counts of the own rows over all ranks, in place."""

    def complete(self, rows: Tensor, group: int) -> Tensor:
        """Return rows in whole groups of ``group``, each row on one rank only."""

    def apply(
        self,
        function: Callable[[Tensor, Any], T],
        rows: Tensor,
        layer: nn.Module,
        group: int | None,
    ) -> T:
        """Call ``function(rows, layer)`` and return the own rows of the result.

        Args:
            function: takes a weight, or the rows of one, and what a method sees of a layer.
            rows: the own rows of the weight.
            layer: the layer's state.
            group: rows that the function must see together; None: all of them.
        """

    def write(self, layer: nn.Module, name: str, value: Tensor) -> None:
        """Write a whole tensor into a buffer or Parameter of ``layer``."""

    def follow(self, layer: nn.Module) -> None:
        """Find the local tensors again after buffers of ``layer`` were replaced."""


class AllRows:
    """Every row, as without FSDP."""

    is_sharded = False

    def __deepcopy__(self, memo: object) -> AllRows:
        return self

    def local(self, weight: Tensor) -> Tensor:
        return weight

    def parameter(self, weight: Tensor) -> Tensor:
        return weight

    def gradient(self, weight: Tensor) -> Tensor | None:
        return weight.grad

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def mine(self, whole: Tensor) -> Tensor:
        return whole.clone()

    def padded(self, rows: Tensor) -> Tensor:
        return rows

    def total(self, counts: Tensor) -> Tensor:
        return counts

    def complete(self, rows: Tensor, group: int) -> Tensor:
        return rows

    def apply(
        self,
        function: Callable[[Tensor, Any], T],
        rows: Tensor,
        layer: nn.Module,
        group: int | None,
    ) -> T:
        return function(rows, layer)

    def write(self, layer: nn.Module, name: str, value: Tensor) -> None:
        getattr(layer, name).copy_(value)

    def follow(self, layer: nn.Module) -> None:
        pass


ALL_ROWS = AllRows()
