"""The processes of a run: which of them this is, and what they do together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sparsepretrain.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """Where this process stands among those of a run.

    What the loop, the trainer and an evaluation do once for all processes goes through here. In a
    world of one process every call returns what it was given.
    """

    device: torch.device
    """Of this process."""
    rank: int = 0
    size: int = 1

    @classmethod
    def single(cls, device: str) -> World:
        """One process on ``parallel.device``.

        Raises:
            ConfigError: cuda was asked for and there is none.
        """
        available = torch.cuda.is_available()
        if device == "cuda" and not available:
            raise ConfigError("parallel.device=cuda, but torch sees no GPU: use auto or cpu")
        return cls(torch.device("cuda" if available and device != "cpu" else "cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all processes."""
        return value

    def gather(self, value: T) -> list[T]:
        """What every process gives, in the order of ranks."""
        return [value]

    def agree(self, code: int | None) -> int | None:
        """The exit code that all processes stop with as soon as one of them has to; or None."""
        return code

    def first(self, action: Callable[[], T]) -> T:
        """Let the first process act for all; its result and its error are those of every one."""
        return action()
