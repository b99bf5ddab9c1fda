"""SIGTERM and SIGINT become a flag that is read where stopping loses nothing."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from sparsepretrain import processes
from sparsepretrain.errors import INTERRUPTED, PREEMPTED

_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}


class StopSignals:
    """Context manager; ``exit_code`` is None until a signal asks the run to stop. That of the first
    signal counts; a SIGINT after it interrupts at once. Handlers are restored on exit. Outside the
    main thread (a notebook server, a test) signals stay as they are.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

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
        if self.exit_code is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.exit_code is None:
            self.exit_code = _CODES[signal.Signals(number)]
