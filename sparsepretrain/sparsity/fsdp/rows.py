"""Shard of a master weight on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

S = TypeVar("S")  # LayerState
T = TypeVar("T")


class Rows:
    """All rows of a weight (no FSDP); :class:`ShardedRows` overrides every method.

    ``weight`` is the Parameter of the layer. Methods that gather are collective.
    """

    is_sharded = False
    is_prepared = False
    """True between ``prepare_sharding`` and ``attach``."""

    def local(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of the master weight."""
        return weight

    def parameter(self, weight: Tensor) -> Tensor:
        """Return the Parameter that the optimizer holds."""
        return weight

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Return the gradient of this rank's rows."""
        return weight.grad

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather the rows of a tensor."""
        return rows

    def own_rows(self, whole: Tensor) -> Tensor:
        """Return the own rows of a whole tensor."""
        return whole

    def own_part(self, parameter: Tensor) -> Tensor:
        """Return this rank's rows of a Parameter of the method."""
        return parameter

    def shard_like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return a whole tensor, equal on all ranks, sharded as a Parameter of the method."""
        return whole

    def wrap(self, rows: Tensor) -> Tensor:
        """Return rows as state dicts have them: a DTensor if they are sharded."""
        return rows

    def stored(self, rows: Tensor) -> Tensor:
        """Return the rows of a mask or weight in the shape of the Parameter."""
        return rows

    def total(self, counts: Tensor) -> Tensor:
        """All-reduce (sum) counts of this rank's rows in place."""
        return counts

    def complete(self, rows: Tensor, group: int) -> Tensor:
        """Return rows in whole groups of ``group``; each row is on one rank."""
        return rows

    def apply(
        self,
        function: Callable[[Tensor, S], T],
        rows: Tensor,
        state: S,
        group: int | None,
    ) -> T:
        """Call ``function(rows, state)`` and return this rank's rows of the result.

        Args:
            function: takes a weight, or the rows of one, and the state of the layer.
            rows: this rank's rows of the weight.
            state: of the layer.
            group: rows that the function must see together; None: all of them.
        """
        return function(rows, state)

    def whole_state(self, state: S) -> S:
        """Return the state of a layer for a function that sees the whole weight."""
        return state

    def write(self, layer: nn.Module, name: str, value: Tensor) -> None:
        """Write a whole tensor into a buffer or Parameter of ``layer``."""
        getattr(layer, name).copy_(value)

    def follow(self, layer: nn.Module) -> None:
        """Update references to local tensors after buffers of ``layer`` were replaced."""


class BankRows(Rows):
    """All slices of a bank, as the rows of one matrix; ``shape`` is that of the Parameter."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def local(self, weight: Tensor) -> Tensor:
        return weight.view(-1, weight.shape[-1])

    def gradient(self, weight: Tensor) -> Tensor | None:
        if weight.grad is None:
            return None
        if not weight.grad.is_contiguous():  # a loop may have set it
            weight.grad = weight.grad.contiguous()
        return self.local(weight.grad)

    def stored(self, rows: Tensor) -> Tensor:
        return rows.view(self.shape)


ALL_ROWS = Rows()
