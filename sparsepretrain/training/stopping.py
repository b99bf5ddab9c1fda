"""Requests to stop a run: flags that are read where stopping loses nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from sparsepretrain import processes
from sparsepretrain.errors import INTERRUPTED, PREEMPTED, CheckpointError

_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}


class StoppedEarly(KeyboardInterrupt):
    """Signal that ended work that has nothing to save: exit code of the signal."""

    def __init__(self, code: int) -> None:
        self.exit_code = code
        super().__init__()


class StopSignals:
    """Handlers of SIGTERM and SIGINT, installed as a context manager and restored on exit.

    ``exit_code`` is None until a signal asks the run to stop. The first signal counts; a SIGINT
    after it interrupts at once. Outside the main thread (a notebook server, a test) signals stay as
    they are.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._at_once = False
        self._previous: dict[signal.Signals, Any] = {}

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let the first signal end the work inside, which has nothing to save.

        Raises:
            StoppedEarly: after a signal, whatever a library has made of the interrupt: some turn it
                into an error of their own, some swallow it.
        """
        self._at_once = True
        try:
            yield
        except BaseException:
            if self.exit_code is None:
                raise
        finally:
            self._at_once = False
        if self.exit_code is not None:
            raise StoppedEarly(self.exit_code)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            if processes.interrupted:  # a library has swallowed the exception
                raise KeyboardInterrupt
            for number in _CODES:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.exit_code is None
        if first:
            self.exit_code = _CODES[signal.Signals(number)]
        if self._at_once if first else number == signal.SIGINT:
            raise KeyboardInterrupt


@dataclass
class StopRequest:
    """Exit code to stop with: what this rank asks for, and what all ranks agreed on."""

    signals: StopSignals = field(default_factory=StopSignals)
    save_failed: Callable[[], bool] = lambda: False
    """True if a background save failed; its error is raised when the next checkpoint is saved."""
    agreed: int | None = None
    """Code that the ranks agreed on in the last step or evaluation."""

    @property
    def requested(self) -> int | None:
        """Code that this rank asks for, after a signal or a failed save."""
        if self.signals.exit_code is None and self.save_failed():
            return CheckpointError.exit_code
        return self.signals.exit_code
