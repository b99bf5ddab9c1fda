"""A mirror of the record, and the thread that keeps it away from training."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

CAPACITY = 4096
"""Records that wait for a slow mirror, a few MB at most; one that is further behind is dropped."""


class Mirror(Protocol):
    """What a tracker implements. All three are called on one thread, which is not the main one."""

    name: str
    """As a user calls it, for warnings."""

    def open(self) -> str | None:
        """Import the package, connect, send the configuration; may return a warning."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the values of one step."""

    def close(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Send the summary and finish."""


class Lane(threading.Thread):
    """Runs one mirror behind a bounded queue. Whatever the mirror does, callers go on.

    A mirror that raises, or that is ``capacity`` records behind, is dropped with one warning.
    """

    def __init__(
        self, mirror: Mirror, warn: Callable[[str], None], *, capacity: int = CAPACITY
    ) -> None:
        super().__init__(name=f"tracker {mirror.name}", daemon=True)
        self._mirror = mirror
        self._warn = warn
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(capacity)
        self._ending: tuple[int, dict[str, Any]] = (0, {})
        self._dropped = threading.Event()
        self._lock = threading.Lock()
        self.start()

    def offer(self, step: int, values: dict[str, float]) -> None:
        """Queue one record; returns at once."""
        if self._dropped.is_set():
            return
        try:
            self._queue.put_nowait((step, values))
        except queue.Full:
            self._drop("does not keep up")

    def finish(self, exit_code: int, summary: dict[str, Any], *, deadline: float) -> None:
        """Let the mirror send what is queued and close, but not beyond ``deadline`` (monotonic)."""
        self._ending = (exit_code, summary)
        try:
            if not self._dropped.is_set():
                self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
                self.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self.is_alive():
            self._drop("did not finish in time")

    def run(self) -> None:
        """Body of the thread."""
        try:
            if note := self._mirror.open():
                self._warn(f"{self._mirror.name} {note}")
            while (item := self._queue.get()) is not None:
                if self._dropped.is_set():
                    return
                self._mirror.log(*item)
            self._mirror.close(*self._ending)
        except ImportError as error:
            package = (error.name or self._mirror.name).partition(".")[0]
            self._drop(f"needs the package {package}, which is not installed")
        except Exception as error:  # of a third party: a run must survive all of them
            first = next(iter(str(error).splitlines()), "")
            self._drop(f"failed ({type(error).__name__}{': ' if first else ''}{first})")

    def _drop(self, reason: str) -> None:
        with self._lock:
            if self._dropped.is_set():
                return
            self._dropped.set()
        self._warn(f"{self._mirror.name} {reason}; metrics.jsonl stays complete")
