"""Model + data + loss + metrics. One module per registered task; see :class:`Task`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch = dict[str, Any]
"""Name -> tensor of one micro-batch."""


class Task(Protocol):
    """What the training loop needs to know."""

    Options: ClassVar[type]
    fingerprint: str | None
    """Of the prepared data; None before :meth:`open_data`."""

    def __init__(self, options: Any, model: Any, data: Any, seed: int) -> None:
        """Take option objects; touch no data."""

    @property
    def roles(self) -> dict[str, list[str]]:
        """Alias of ``sparsity.targets`` -> globs of module names."""

    def build_model(self) -> nn.Module:
        """The model with initial weights from torch's global generator."""

    def open_data(
        self, splits: Sequence[str], on_progress: Callable[[Any], None] | None = None
    ) -> None:
        """Open prepared data; raises DataError when it is missing or unsuitable for ``splits``."""

    def batch(
        self, split: str, step: int, positions: Sequence[int], size: int, device: torch.device
    ) -> Batch:
        """Samples at ``positions`` of the global batch of ``size`` of optimiser step ``step``."""

    def samples(self, split: str) -> int:
        """Samples in one pass over ``split``."""

    def example(self, size: int, device: torch.device) -> Batch:
        """A batch of the right shapes without data, for dry runs."""

    def count(self, batch: Batch) -> int:
        """Number of items the loss is summed over (tokens, images)."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(sum, count): summed in fp32, so that accumulation and data parallelism are exact."""
