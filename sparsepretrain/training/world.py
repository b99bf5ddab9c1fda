"""The processes of a run: what they agree on, and the signals that stop them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsepretrain.errors import INTERRUPTED, PREEMPTED, ConfigError

T = TypeVar("T")
_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}


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


class StopSignals:
    """SIGTERM and SIGINT as a flag that the loop reads between steps and evaluation batches.

    A context manager; ``exit_code`` is None until a signal asks the run to stop. The second SIGINT
    interrupts at once. Handlers are restored on exit. Outside the main thread (a notebook server, a
    test) signals stay as they are.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _CODES:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.exit_code = _CODES[signal.Signals(number)]
